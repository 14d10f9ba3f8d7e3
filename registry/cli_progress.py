"""Progress on stderr: a bar of the weights on a terminal, and a line per program anywhere."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiler.program import Program

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


def programs() -> "Callable[[Program, int], None]":
    """A callback (program, how many there will be) that tells of each when it is ready."""
    done = 0

    def tell(program: "Program", total: int) -> None:
        nonlocal done
        done += 1
        filled = "#" * (_WIDTH * done // total)
        how = "found" if program.found else "compiled"
        note = f" ({program.note})" if program.note else ""
        print(
            f"graphs [{filled:<{_WIDTH}}] {done:3d} / {total}  {how} in {program.ready_s:.2f} s: "
            f"{program.label}{note}",
            file=sys.stderr,
            flush=True,
        )

    return tell
