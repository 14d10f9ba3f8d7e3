"""A timeline per request, in the steps and lanes of `sequence.py`.

    trace = Trace()
    with trace.span(8):
        engine = Engine(model, sizes, watch=trace)
    engine.generate(requests)
    trace.chrome(); trace.table()

In a step the thread is watched by a profile hook (`profile_hook.py`), which makes steps slower:
for finding out where time goes, not for production.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from runtime import chrome, trace_table
from runtime.plan import Plan, Ran
from runtime.profile_hook import ProfileHook
from runtime.request import Event, Request
from runtime.sequence import FORWARD
from runtime.timeline import Lap, Part, Segment, make_lap
from runtime.watch import Load

# What begins with a stage of the engine. `sample` goes on until the first mark in it.
_STAGES = (("plan", 14), ("assemble", 20), ("step", FORWARD), ("draft", 36), ("commit", 38))


class Trace:
    """A watcher (`watch.py`) of one engine."""

    def __init__(self, *, keep: int = 10_000) -> None:
        """`keep`: the newest steps, and requests, that are remembered. Raises ValueError."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1 step")
        self.keep = keep
        self.start_ns = time.perf_counter_ns()
        self.started: list[Segment] = []  # spans outside of steps
        self.requests: dict[int, Request] = {}
        self.laps: deque[Lap] = deque(maxlen=keep)
        self.num_steps = 0
        self._stages = dict(_STAGES)
        self._opened = False
        self._open: list[Segment] = []  # of the step that runs
        self._number: int | None = None  # that goes on now
        self._since_ns = 0
        self._hook = ProfileHook(self._switch)

    @contextlib.contextmanager
    def span(self, number: int) -> Iterator[None]:
        """Record what is done meanwhile under this number: for steps outside of the engine's."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.started.append(Segment(number, start_ns, time.perf_counter_ns()))

    def mark(self, number: int) -> None:
        """Record that a step without length, 9 for example, is reached now."""
        now_ns = time.perf_counter_ns()
        self.started.append(Segment(number, now_ns, now_ns))

    def chrome(self) -> dict[str, Any]:
        """The timeline in Chrome's trace event format, for Perfetto and chrome://tracing."""
        return chrome.events(self.start_ns, self.started, self.requests, self.laps)

    def table(self) -> str:
        """The same for people: per request and number how often and for how long."""
        lost = self.num_steps - len(self.laps)
        return trace_table.table(self.started, self.requests, self.laps, lost)

    def opened(self, look: Callable[[], Load]) -> None:
        """See `Watch`. Raises ValueError if this watches another engine already."""
        if self._opened:
            raise ValueError("this trace watches another engine already; make one per engine")
        self._opened = True

    def added(self, request: Request) -> None:
        """See `Watch`."""
        self.requests[request.id] = request
        if len(self.requests) > self.keep:
            del self.requests[next(iter(self.requests))]

    def began(self, stage: str) -> None:
        """See `Watch`."""
        if stage == "plan":
            self._open, self._number = [], None
        if stage in ("idle", "draft"):  # the draft module runs the same functions, all of it is 36
            self._hook.remove()
        if stage in self._stages:
            self._switch(self._stages[stage])
        if stage not in ("idle", "draft"):
            self._hook.install()

    def _switch(self, number: int) -> None:
        """From now on another number goes on."""
        now_ns = time.perf_counter_ns()
        if self._number is not None:
            self._open.append(Segment(self._number, self._since_ns, now_ns))
        self._number, self._since_ns = number, now_ns

    def stepped(self, plan: Plan, ran: Sequence[Ran], events: Sequence[Event]) -> None:
        """See `Watch`."""
        got = {event.request.id: event for event in events}
        self._close(plan, got, None)

    def failed(self, plan: Plan, error: BaseException) -> None:
        """See `Watch`."""
        self._close(plan, {}, f"{type(error).__name__}: {error}")

    def ended(self, request: Request) -> None:
        """See `Watch`. A request tells its own end."""

    def _close(self, plan: Plan, got: dict[int, Event], error: str | None) -> None:
        self._switch(FORWARD)
        self._number = None
        parts = []
        for work in plan.work:
            request, event = self.requests.get(work.id), got.get(work.id)
            report = request.report if request else None
            admitted = work.id in plan.admitted
            parts.append(
                Part(
                    request=work.id,
                    decode=len(work.tokens) == 1
                    and work.start >= (len(request.prompt) if request else 1),
                    rows=work.rows,
                    drafts=len(work.drafts),
                    wanted=work.wanted > 0,
                    tokens=len(event.tokens) if event else 0,
                    admitted=admitted,
                    hit=admitted and report is not None and report.hit > 0,
                    ended=event is not None and event.finish is not None,
                )
            )
        self.laps.append(make_lap(self.num_steps, self._open, tuple(parts), error))
        self.num_steps += 1
        self._open = []
