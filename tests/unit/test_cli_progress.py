"""The progress bar draws for a terminal only, once per percent, and is gone at the end."""

import io

import pytest

from registry import cli_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar(monkeypatch: pytest.MonkeyPatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    draw = cli_progress.bar("loading")
    assert draw is not None
    for done in (0, 1, 500, 501, 1000):
        draw(done * 10**6, 10**9, "embed")
    drawn = screen.getvalue().split("\r")[1:]
    assert len(drawn) == 3  # 0 %, 50 %, wiped; 0.1 % and 50.1 % change nothing
    assert drawn[1] == f"loading [{'#' * 15:<30}]  50 %  0.50 / 1.00 GB"
    assert drawn[2] == "\033[K"


def test_no_terminal_no_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert cli_progress.bar("loading") is None
