"""Which of the 57 steps a thread is in, from the functions that it enters: `sys.setprofile`.

The model is pure functions and knows nothing of this; the marks name its functions from outside. A
number holds from a mark until the next one, so every instant belongs to exactly one number.

It costs a call of Python per call of a function: only a trace asks for it. A compiled forward has
no such functions any more; it is then seen as a whole.
"""

import dataclasses
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Mark:
    """A function at which a step of the 57 begins."""

    module: str
    name: str  # qualified
    enter: int | None = None  # begins with a call
    leave: int | None = None  # begins when it returns
    given: tuple[str, int] | None = None  # in place of `enter` if this argument is true

    def number(self, frame: FrameType) -> int | None:
        """The number that begins with this call."""
        if self.given is not None and frame.f_locals.get(self.given[0]):
            return self.given[1]
        return self.enter


# `layer.block` is 21 .. 32 in order: what is between two marks belongs to the one before.
MARKS = (
    Mark("runtime.prefix", "Prefix.match", enter=15),
    Mark("runtime.pages", "Pages.restore", given=("history", 16)),
    Mark("runtime.scheduler", "Scheduler._admit", enter=14, leave=17),
    Mark("runtime.pages", "Pages.append", enter=18, leave=17),
    Mark("runtime.filling", "Filling.prompts", leave=19),
    Mark("runtime.filling", "Filling.alone", leave=19),
    Mark("dsv4.model", "step", enter=20),
    Mark("dsv4.layer", "block", enter=21),
    Mark("dsv4.layer", "attend", enter=23, leave=29),
    Mark("dsv4.compress", "update", enter=24, given=("keys", 25)),
    Mark("dsv4.index", "select", enter=25),
    Mark("dsv4.attention", "attend", enter=26),
    Mark("dsv4.rope", "rotate", given=("inverse", 27)),
    Mark("dsv4.attention", "output", enter=28),
    Mark("dsv4.route", "route", enter=30, leave=31),
    Mark("dsv4.experts", "shared", enter=32),
    Mark("dsv4.mhc", "head", enter=32, leave=33),
    Mark("runtime.draw", "draw_of", enter=34),
    Mark("dsv4.sample", "log_weights", enter=34, leave=35),
    Mark("dsv4.sample", "greedy", enter=35),
    Mark("runtime.draw", "_rows", leave=37),
    Mark("runtime.scheduler", "Scheduler._extend", enter=38),
    Mark("runtime.request", "Request.append", enter=41, leave=38),
    Mark("runtime.request", "Request._show", enter=39, leave=41),
    Mark("runtime.scheduler", "Scheduler._retire", enter=51, leave=38),
    Mark("runtime.scheduler", "Scheduler._release", enter=52),
    Mark("runtime.engine", "Engine._told", enter=50),
)


class ProfileHook:
    """Tells `switch` each number that begins in this thread while installed."""

    def __init__(self, switch: Callable[[int], None]) -> None:
        """Not installed yet."""
        self._switch = switch
        self._by_name = {(m.module, m.name): m for m in MARKS}
        # By identity: a code object's own hash reads all of it. The code is kept, so that its
        # identity is not given to another one.
        self._seen: dict[int, tuple[CodeType, Mark | None]] = {}
        self._before: Any = None
        self.installed = False

    def install(self) -> None:
        """Begin. A profiler that was there is put back by `remove`."""
        if not self.installed:
            self._before, self.installed = sys.getprofile(), True
            sys.setprofile(self._event)

    def remove(self) -> None:
        """End."""
        if self.installed:
            sys.setprofile(self._before)
            self._before, self.installed = None, False

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        seen = self._seen.get(id(code))
        if seen is None:
            mark = self._by_name.get((frame.f_globals.get("__name__", ""), code.co_qualname))
            seen = self._seen[id(code)] = (code, mark)
        mark = seen[1]
        if mark is None:
            return
        number = None
        if event == "call":
            number = mark.number(frame)
        elif event == "return":
            number = mark.leave
        if number is not None:
            self._switch(number)
