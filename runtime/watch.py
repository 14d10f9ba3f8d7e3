"""What an engine tells those who watch it, and how full it is.

A watcher is told, in the engine's thread, what happens; it writes nothing of the engine. With none,
a call here is a loop over nothing. One that raises is dropped with a log line: the requests must
not pay for it.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from runtime.drafts import Acceptance
from runtime.plan import Plan, Ran
from runtime.request import Event, Request

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PoolUse:
    """Pages of one group, or slots. Page 0 and slot 0 are padding and not counted."""

    owned: int  # by sequences
    cached: int  # by none, but may be hit
    free: int
    unit_bytes: Mapping[str, int]  # of one page or slot of all layers, by cache kind

    @property
    def share(self) -> float:
        """Of all pages, those that are owned. 0 to 1"""
        return self.owned / (self.owned + self.cached + self.free)


@dataclasses.dataclass(frozen=True)
class Load:
    """How full an engine is, between two steps."""

    running: int  # requests
    waiting: int
    preemptions: int  # so far
    unit_tokens: int  # prefix hits are multiples of it
    pools: Mapping[str, PoolUse]  # history, window, slots
    acceptance: Acceptance | None  # of drafts; to be read, not written


class Watch(Protocol):
    """Somebody who is told what an engine does."""

    def opened(self, look: Callable[[], Load]) -> None:
        """An engine begins; `look` says how full it is, whenever asked."""
        ...

    def added(self, request: Request) -> None:
        """A request was taken into the queue, or forked."""
        ...

    def began(self, stage: str) -> None:
        """A step enters a stage: plan, assemble, step, sample, draft, commit; idle: it is over."""
        ...

    def stepped(self, plan: Plan, ran: Sequence[Ran], events: Sequence[Event]) -> None:
        """A step has succeeded, and this came of it."""
        ...

    def failed(self, plan: Plan, error: BaseException) -> None:
        """A step broke off; its requests start over."""
        ...

    def ended(self, request: Request) -> None:
        """A request has ended, after the step that ended it was told."""
        ...


class Watchers:
    """Tells all who watch an engine, in the order they were given."""

    def __init__(self, watch: Watch | Sequence[Watch] | None) -> None:
        """None: nobody watches."""
        many = watch if isinstance(watch, Sequence) else () if watch is None else (watch,)
        self._all: tuple[Watch, ...] = tuple(many)

    def opened(self, look: Callable[[], Load]) -> None:
        """See `Watch`. What a watcher refuses here goes to the caller."""
        for watch in self._all:
            watch.opened(look)

    def added(self, request: Request) -> None:
        """See `Watch`."""
        self._tell("added", request)

    def began(self, stage: str) -> None:
        """See `Watch`."""
        self._tell("began", stage)

    def stepped(self, plan: Plan, ran: Sequence[Ran], events: Sequence[Event]) -> None:
        """See `Watch`."""
        self._tell("stepped", plan, ran, events)

    def failed(self, plan: Plan, error: BaseException) -> None:
        """See `Watch`."""
        self._tell("failed", plan, error)

    def ended(self, request: Request) -> None:
        """See `Watch`."""
        self._tell("ended", request)

    def _tell(self, what: str, *facts: Any) -> None:
        for watch in self._all:
            try:
                getattr(watch, what)(*facts)
            except Exception:
                log.exception("%s failed to note %r: it watches no more", watch, what)
                self._all = tuple(w for w in self._all if w is not watch)
