"""Which requests run next, and what becomes of them. Host data only.

First come, first served. A step holds one token of every request that generates, then chunks of
prompts in order of arrival, within the token budget. Pages are promised at admission for the whole
life of a request, so whatever was admitted can finish.
"""

import time
from collections import deque
from collections.abc import Sequence

from dsv4.config import Config
from dsv4.state import PoolSizes
from runtime.pages import Pages
from runtime.plan import Plan, Work
from runtime.request import Event, Request, Sampled, Status
from runtime.text import Decode


class Scheduler:
    """Owns the requests and the pages. `commit` and `abort` alone change a running request."""

    def __init__(self, cfg: Config, sizes: PoolSizes, *, chunk: int, budget: int) -> None:
        """`chunk`: most prompt tokens of one request per step. `budget`: most tokens per step.

        Raises ValueError if a budget cannot serve all slots at once.
        """
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be at least 1 token")
        if budget < sizes.slots - 1:
            raise ValueError(
                f"budget is {budget} tokens per step; {sizes.slots - 1} requests may run at once, "
                f"so it must be at least that"
            )
        self.cfg = cfg
        self.chunk = min(chunk, budget)
        self.budget = budget
        self.pages = Pages(cfg, sizes, self.chunk)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._next_id = 0

    def add(self, request: Request, decode: Decode | None) -> None:
        """Queue a request. Raises ValueError for one that can never be served."""
        request.check(self.cfg)
        room = request.longest(self.cfg)
        self.pages.check(room)
        request.open_text(decode)
        request.room, request.id = room, self._next_id
        self._next_id += 1
        request.status, request.added_s = Status.WAITING, time.perf_counter()
        self.waiting.append(request)

    def plan(self) -> Plan | None:
        """The next step, or None if nothing is left. Its pages are owned when this returns."""
        while self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        left = self.budget
        work: list[Work] = []
        # A stable sort: decodes first, then prompts, each in order of arrival.
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.computed > 1):
            owed = len(request.tokens) - request.computed
            count = min(owed, self.chunk, left)
            if count == 0:
                break
            left -= count
            work.append(Work(request, request.computed, count, wanted=int(count == owed)))
        for w in work:
            assert w.request.held is not None
            self.pages.grow(w.request.held, w.start + w.count)
        return Plan(tuple(work)) if work else None

    def _admit(self, request: Request) -> bool:
        held = self.pages.admit(request.room)
        if held is None:
            return False
        request.held, request.status = held, Status.RUNNING
        return True

    def commit(self, plan: Plan, sampled: Sequence[Sequence[Sampled]]) -> list[Event]:
        """Record what a step computed: per work its sampled tokens, none inside a prompt.

        Returns an event for every request that got tokens, in the order of the plan. Tokens after
        the one that ends a request are dropped.
        """
        events = []
        for work, tokens in zip(plan.work, sampled, strict=True):
            request = work.request
            if request.status is not Status.RUNNING:
                continue  # aborted while the step ran
            assert request.held is not None
            request.computed = work.start + work.count
            self.pages.recycle(request.held, request.computed)
            if tokens:
                events.append(self._extend(request, tokens))
        return events

    def _extend(self, request: Request, sampled: Sequence[Sampled]) -> Event:
        text, taken = "", []
        if not request.first_s:
            request.first_s = time.perf_counter()
        for s in sampled:
            taken.append(s)
            try:
                text += request.append(s, self.cfg)
            except Exception as error:  # a bad detokenizer, NaN: others must not pay for it
                request.finish, request.error = "error", error
            if request.finish is not None:
                if request.status is Status.RUNNING:  # not aborted by its own detokenizer
                    self._retire(request)
                break
        return Event(
            request=request,
            tokens=tuple(s.token for s in taken),
            text=text,
            logprobs=tuple(s.logprobs for s in taken if s.logprobs is not None),
            finish=request.finish,
        )

    def restart(self, plan: Plan) -> None:
        """Compute the requests of a failed step anew, from their first token.

        The step may have written some of its rows: what the pools hold of them is not known. Their
        tokens stand, so nothing else is lost.
        """
        for work in plan.work:
            if work.request.status is Status.RUNNING:
                assert work.request.held is not None
                self.pages.forget(work.request.held)
                work.request.computed = 0

    def abort(self, request: Request) -> None:
        """End a request now and free what it holds. Nothing happens if it has ended.

        Raises ValueError for a request of another engine.
        """
        if request.status in (Status.WAITING, Status.RUNNING):
            if request not in self.waiting and request not in self.running:
                raise ValueError(f"request {request.id} is not one of this engine's")
            request.finish = "abort"
            self._retire(request)

    def _retire(self, request: Request) -> None:
        if request.held is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.pages.release(request.held, request.room)
            request.held = None
        request.status, request.finished_s = Status.DONE, time.perf_counter()

    def audit(self) -> None:
        """Assert that no page and no slot is lost, or owned twice."""
        self.pages.audit(r.held for r in self.running if r.held is not None)
