"""Requests in, tokens out: plan, run, commit, in a loop.

engine = Engine(model, sizes)
for request in engine.generate([Request(prompt=(0, 17, 42))]):
    request.output
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from dsv4.state import Pools, PoolSizes
from runtime.plan import Plan
from runtime.request import Event, Request
from runtime.runner import Model, Runner
from runtime.scheduler import Scheduler
from runtime.text import Decode


@dataclasses.dataclass
class Meter:
    """Steps, tokens and seconds so far, of steps with prompt tokens and of pure decode steps."""

    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0

    def count(self, plan: Plan, seconds: float) -> None:
        """Add one step."""
        if plan.decode:
            self.decode_steps += 1
            self.decode_tokens += plan.tokens
            self.decode_s += seconds
        else:
            self.prefill_steps += 1
            self.prefill_tokens += plan.tokens
            self.prefill_s += seconds


class Engine:
    """Generates for many requests at once. One thread."""

    def __init__(
        self,
        model: Model,
        sizes: PoolSizes,
        *,
        chunk: int = 512,
        budget: int | None = None,
        block: int = 16,
        decode: Decode | None = None,
        exact: bool = False,
    ) -> None:
        """Allocate the pools.

        `chunk`: most prompt tokens of one request per step. `budget`: most tokens per step, at
        least one per slot; by default a chunk and one per slot. `block`: tokens per query block of
        steps with prompt tokens (plain decode steps have 1). `decode`: token ids to text, needed
        for text and stop strings. `exact`: make every number of a request bit-equal whatever runs
        beside it and however its prompt is cut, at the price of padding each step.

        Raises ValueError for sizes that do not fit the model or the budget.
        """
        if block < 1:
            raise ValueError(f"block is {block}; it must be at least 1 token")
        if budget is None:
            budget = chunk + sizes.slots - 1
        self._scheduler = Scheduler(model.cfg, sizes, chunk=chunk, budget=budget)
        self._runner = Runner(model, sizes, block=block, exact=exact)
        self._decode = decode
        self._streams: dict[int, deque[Event]] = {}
        self.meter = Meter()

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._scheduler.waiting and not self._scheduler.running

    @property
    def pools(self) -> Pools:
        """The caches as they stand between two steps; the next step may overwrite them."""
        return self._runner.pools

    def add(self, request: Request) -> Request:
        """Queue a request. Raises ValueError, now, for one that can never be served."""
        self._scheduler.add(request, self._decode)
        return request

    def abort(self, request: Request) -> None:
        """End a request and free what it holds; no more events come for it."""
        self._scheduler.abort(request)

    def step(self) -> list[Event]:
        """Run one step; an event for every request that got tokens. Empty when idle.

        If the step itself fails, its requests are computed anew from the next call on: what it
        may have written is not trusted.
        """
        plan = self._scheduler.plan()
        if plan is None:
            return []
        start_s = time.perf_counter()
        try:
            sampled = self._runner.run(plan)
        except BaseException:
            self._scheduler.restart(plan)
            raise
        events = self._scheduler.commit(plan, sampled)
        self.meter.count(plan, time.perf_counter() - start_s)
        for event in events:
            if event.request.id in self._streams:
                self._streams[event.request.id].append(event)
        return events

    def stream(self, request: Request) -> Iterator[Event]:
        """Events of one request until it ends. Everything else in the engine moves on as well.

        Adds the request at once: refusals come from this call. Closing the iterator aborts. Raises,
        at the end, what ended this request with an error.
        """
        self.add(request)
        inbox = self._streams[request.id] = deque()
        events = self._events(request, inbox)
        next(events)  # enter the generator: one that never ran would not abort when it is closed
        return events

    def _events(self, request: Request, inbox: deque[Event]) -> Iterator[Any]:
        try:
            yield None
            while inbox or request.finish is None:
                if inbox:
                    yield inbox.popleft()
                else:
                    self.step()
            if request.error is not None:
                raise request.error
        finally:
            del self._streams[request.id]
            self.abort(request)

    def generate(self, requests: Iterable[Request]) -> list[Request]:
        """Run all requests to their ends; the same requests, in the same order.

        All are checked before any runs: on a refusal none is left behind. Raises, when all have
        ended, what ended one of them with an error.
        """
        added: list[Request] = []
        try:
            for request in requests:
                added.append(self.add(request))
            while any(r.finish is None for r in added):
                self.step()
        finally:
            for request in added:
                self.abort(request)
        for request in added:
            if request.error is not None:
                raise request.error
        return added

    def audit(self) -> None:
        """Assert that no page and no slot is lost, or owned twice."""
        self._scheduler.audit()
