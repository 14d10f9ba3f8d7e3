"""Where the time between a command and its first step goes. The parts add up to the whole."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.columns import columns


class StartUp:
    """Times the parts of one start, in the order in which they begin."""

    def __init__(self) -> None:
        """The start is now."""
        self._begin_s = time.perf_counter()
        self._parts: dict[str, float] = {}
        self._open = False
        self.ready_s: float | None = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done meanwhile as `name`; parts do not overlap."""
        assert not self._open, f"part {name!r} begins within another"
        self._open, begin_s = True, time.perf_counter()
        try:
            yield
        finally:
            self._open = False
            took_s = time.perf_counter() - begin_s
            self._parts[name] = self._parts.get(name, 0.0) + took_s

    def ready(self) -> None:
        """The first step can run."""
        self.ready_s = time.perf_counter() - self._begin_s

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part, and of what belongs to none as "other"."""
        assert self.ready_s is not None, "the start has not ended"
        other_s = self.ready_s - sum(self._parts.values())
        return {**self._parts, "other": other_s}

    def table(self) -> str:
        """The parts and their sum, in seconds and in percent."""
        whole_s = self.ready_s
        assert whole_s is not None, "the start has not ended"
        rows = [*self.parts.items(), ("ready", whole_s)]
        told = [(name, f"{s:8.2f} s", f"{100 * s / whole_s:5.1f} %") for name, s in rows]
        return "\n".join(columns(told))
