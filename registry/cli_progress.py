"""A progress bar on stderr for whoever watches a terminal; nothing otherwise."""

import sys
from collections.abc import Callable

_WIDTH = 30


def bar(title: str) -> Callable[[int, int, str], None] | None:
    """A callback (done_bytes, total_bytes, tensor name) that draws, or None without a terminal."""
    if not sys.stderr.isatty():
        return None
    drawn = -1

    def draw(done_bytes: int, total_bytes: int, _name: str) -> None:
        nonlocal drawn
        percent = 100 * done_bytes // max(total_bytes, 1)
        if percent == drawn:
            return
        drawn = percent
        filled = "#" * (_WIDTH * percent // 100)
        sizes = f"{done_bytes / 1e9:.2f} / {total_bytes / 1e9:.2f} GB"
        line = f"\r{title} [{filled:<{_WIDTH}}] {percent:3d} %  {sizes}"
        # The finished bar is wiped, so that the text stands alone.
        print(line if percent < 100 else "\r\033[K", end="", file=sys.stderr, flush=True)

    return draw
