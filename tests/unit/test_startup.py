"""Where the time of a start goes: the parts add up, and programs are told as they come."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.program import Program
from registry import cli_progress, startup
from registry.startup import StartUp

seconds = st.floats(0, 1e4).map(lambda s: round(s, 3))
parts = st.lists(st.tuples(st.sampled_from(("imports", "weights", "graphs")), seconds), max_size=8)


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def perf_counter(self) -> float:
        return self.now_s


@given(spent=parts, between=seconds)
def test_parts_add_up(spent: list[tuple[str, float]], between: float) -> None:
    """K5: with "other" for what belongs to none; a part that comes twice is one line."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "time", clock)
        start = StartUp()
        for name, s in spent:
            with start.part(name):
                clock.now_s += s
            clock.now_s += between
        start.ready()
    assert start.ready_s == pytest.approx(clock.now_s - 1000)
    assert sum(start.parts.values()) == pytest.approx(start.ready_s)
    assert start.parts["other"] == pytest.approx(between * len(spent), abs=1e-6)
    want: dict[str, float] = {}
    for name, s in spent:
        want[name] = want.get(name, 0) + s
    assert list(start.parts) == [*want, "other"]
    assert {n: start.parts[n] for n in want} == pytest.approx(want, abs=1e-6)


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(startup, "time", clock)
    start = StartUp()
    for name, s in (("weights", 1.5), ("graphs", 6.0)):
        with start.part(name):
            clock.now_s += s
    clock.now_s += 0.5
    start.ready()
    rows = [line.split() for line in start.table().splitlines()]
    assert rows == [
        ["weights", "1.50", "s", "18.8", "%"],
        ["graphs", "6.00", "s", "75.0", "%"],
        ["other", "0.50", "s", "6.2", "%"],
        ["ready", "8.00", "s", "100.0", "%"],
    ]


def test_a_part_that_fails_is_counted_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(startup, "time", clock)
    start = StartUp()

    def fail() -> None:
        with start.part("weights"):
            clock.now_s += 2
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    with start.part("graphs"):
        clock.now_s += 1
    start.ready()
    assert start.parts == {"weights": 2, "graphs": 1, "other": 0}


def test_parts_do_not_overlap() -> None:
    start = StartUp()
    with start.part("weights"), pytest.raises(AssertionError, match="'graphs' begins within"):
        start.part("graphs").__enter__()
    with pytest.raises(AssertionError, match="not ended"):
        start.table()
    with pytest.raises(AssertionError, match="not ended"):
        _ = start.parts


def test_programs_are_told_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, at once, with what was wrong with the one in the store."""
    tell = cli_progress.programs()
    run = Path.exists  # anything
    tell(Program("step a", run, True, 0.126, None), 3)
    first = capsys.readouterr()
    tell(Program("step b", run, False, 12, "program.bin is missing"), 3)
    tell(Program("draft c", run, True, 0, None), 3)
    out, err = capsys.readouterr()
    assert first.out == out == ""
    assert first.err == f"graphs [{'#' * 10:<30}]   1 / 3  found in 0.13 s: step a\n"
    assert err.splitlines() == [
        f"graphs [{'#' * 20:<30}]   2 / 3  compiled in 12.00 s: step b (program.bin is missing)",
        f"graphs [{'#' * 30}]   3 / 3  found in 0.00 s: draft c",
    ]
    assert re.fullmatch(r"(graphs \[.{30}\] .*\n){2}", err)
