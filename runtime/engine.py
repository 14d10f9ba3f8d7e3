"""Requests in, tokens out: plan, run, commit, in a loop.

engine = Engine(model, sizes)
for request in engine.generate([Request(prompt=(0, 17, 42))]):
    request.output
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dsv4.state import Pools, PoolSizes
from runtime.cache import Cache
from runtime.drafts import Acceptance, Drafts
from runtime.parcel import Parcel
from runtime.plan import Plan, Ran
from runtime.pools import served
from runtime.prefix import CacheReport, Prefix
from runtime.request import Event, Limits, Request, Sampling, Status
from runtime.rules import CHUNK, Overloaded, Rules
from runtime.runner import Model, Runner
from runtime.scheduler import Scheduler
from runtime.text import Decode
from runtime.watch import Load, PoolUse, Watch, Watchers
from runtime.weights import weights_digest

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Meter:
    """Steps, tokens and seconds so far, of steps with prompt tokens and of pure decode steps."""

    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0

    def count(self, plan: Plan, ran: Sequence[Ran], seconds: float) -> None:
        """Add one step: rows of prompts, or tokens that decoding brought."""
        if plan.decode:
            self.decode_steps += 1
            self.decode_tokens += sum(len(r.sampled) for r in ran)
            self.decode_s += seconds
        else:
            self.prefill_steps += 1
            self.prefill_tokens += plan.tokens
            self.prefill_s += seconds


class Engine:
    """Generates for many requests at once. One thread; for asyncio see `async_engine.py`."""

    def __init__(
        self,
        model: Model,
        sizes: PoolSizes,
        *,
        chunk: int = CHUNK,
        budget: int | None = None,
        block: int = 16,
        decode: Decode | None = None,
        exact: bool = False,
        drafts: Drafts | None = None,
        cache: bool = True,
        max_waiting: int | None = None,
        watch: Watch | Sequence[Watch] | None = None,
    ) -> None:
        """Allocate the pools.

        `chunk`: most prompt tokens of one request per step. `budget`: most tokens per step, at
        least one per slot and its drafts; by default a chunk and these. `block`: tokens per query
        block of steps with prompt tokens (plain decode steps have 1). `decode`: token ids to text,
        needed for text and stop strings. `exact`: make every number of a request bit-equal whatever
        runs beside it, however its prompt is cut and whatever of it was cached, at the price of
        padding each step. `drafts`: draft with the model's draft module. `cache`: reuse prefixes.
        `max_waiting`: requests that may wait before `add` refuses with `Overloaded`. `watch`: who
        is told what happens (`watch.py`).

        Raises ValueError for sizes that do not fit the model or the budget, or drafts without a
        draft module.
        """
        _check_types(sizes, drafts)
        if block < 1:
            raise ValueError(f"block is {block}; it must be at least 1 token")
        depth = drafts.depth if drafts else 0
        if budget is None:
            budget = chunk + (sizes.slots - 1) * (1 + depth)
        rules = Rules(chunk=chunk, budget=budget, max_waiting=max_waiting, drafts=drafts)
        rules.check(sizes.slots - 1)
        _check_drafts(model, sizes, depth)
        # Without drafts nothing is kept for them.
        cfg = served(model.cfg, depth)
        embed = model.params.embed
        self._cache = Cache(cfg, sizes, most=chunk, dtype=embed.dtype, device=embed.device)
        self._cache.name_weights(weights_digest(model.params))
        self._prefix = Prefix(self._cache.pages, self._cache.digest, enabled=cache)
        self._scheduler = Scheduler(cfg, self._cache.pages, self._prefix, rules)
        self._runner = Runner(model, self._cache, block=block, drafts=drafts, exact=exact)
        self._runner.check(sizes.slots - 1, 1 + depth, budget)
        self._decode, self._params = decode, model.params
        self._streams: dict[int, deque[Event]] = {}
        self.meter = Meter()
        self.acceptance = Acceptance(drafts, drafts.price(cfg.layers)) if drafts else None
        self._watch = Watchers(watch)
        self._runner.mark = self._watch.began
        self._watch.opened(self.load)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._scheduler.waiting and not self._scheduler.running

    @property
    def pools(self) -> Pools:
        """The caches as they stand between two steps; the next step may overwrite them."""
        return self._cache.pools

    def load(self) -> Load:
        """How full the engine is."""
        pages, scheduler = self._cache.pages, self._scheduler
        pools = {"history": pages.history, "window": pages.window, "slots": pages.slots}
        sizes = _by_group(self._cache.unit_bytes())
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            unit_tokens=pages.page_tokens,
            pools={
                name: PoolUse(pool.owned, pool.cached, pool.free, sizes.get(name, {}))
                for name, pool in pools.items()
            },
            acceptance=self.acceptance,
        )

    def add(self, request: Request) -> Request:
        """Queue a request.

        Raises ValueError, now, for one that can never be served, and `Overloaded` (a ValueError)
        if too many wait.
        """
        if isinstance(request, Request) and request.parcel is not None:
            self._check(request)
        self._scheduler.add(request, self._decode)
        self._watch.added(request)
        return request

    def fork(
        self, request: Request, *, sampling: Sampling | None = None, limits: Limits | None = None
    ) -> Request:
        """A new request that goes on from what this one has so far; its output begins there.

        Full pages are shared and only the open one is copied, if there is room at once; if not, the
        new request waits like any other. Raises as `add`, and for a request that has ended.
        """
        child = request.follow(sampling, limits)
        copies = self._scheduler.fork(request, child, self._decode)
        if copies is not None:
            self._cache.copy(copies)
        self._watch.added(child)
        return child

    def export(self, request: Request) -> Parcel:
        """A copy of the state of a running request, to go on with in another engine.

        There: `other.add(request.moved(parcel))`; here the request runs on until it is aborted.
        Raises ValueError for a request that has no state here.
        """
        self._scheduler.check_own(request)
        if request.held is None or not request.computed:
            raise ValueError(f"request {request.id} has no state yet; step until it runs")
        return self._cache.export(request.held, request.tokens)

    def abort(self, request: Request) -> None:
        """End a request and free what it holds; no more events come for it."""
        lives = request.status in (Status.WAITING, Status.RUNNING)
        self._scheduler.abort(request)
        if lives:
            self._watch.ended(request)

    def cache_report(self, request: Request) -> CacheReport:
        """How much of a request's prompt was found in the prefix cache, and why not more.

        Of one that was not admitted yet: what would be found now.
        """
        if request.report is not None:
            return request.report
        chain = self._prefix.chain(request.salt, request.extra) if request.cache else None
        return self._prefix.match(chain, request.tokens)[1]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: after the parameters were changed."""
        self._scheduler.forget_prefixes()
        self._cache.name_weights(weights_digest(self._params))
        self._prefix.digest = self._cache.digest

    def step(self) -> list[Event]:
        """Run one step; an event for every request that got tokens. Empty when idle.

        If the step fails, its requests are computed anew, one by one, from the next call on: what
        it may have written is not trusted. One that fails alone too ends with the error, and no
        other does.
        """
        self._watch.began("plan")
        try:
            plan = self._scheduler.plan()
            return self._run(plan) if plan is not None else []
        finally:
            self._watch.began("idle")

    def _run(self, plan: Plan) -> list[Event]:
        start_s = time.perf_counter()
        try:
            ran = self._runner.run(plan)
        except Exception as error:
            guilty = self._scheduler.restart(plan)
            log.exception("a step of %d requests failed; they start over", len(plan.work))
            self._watch.failed(plan, error)
            events = self._told([self._scheduler.fail(r, error) for r in guilty])
            return self._tell_ended(events)
        except BaseException as error:
            self._scheduler.restart(plan)
            self._watch.failed(plan, error)
            raise
        self._watch.began("commit")
        events = self._scheduler.commit(plan, ran)
        self.meter.count(plan, ran, time.perf_counter() - start_s)
        if self.acceptance is not None:
            for work, result in zip(plan.work, ran, strict=True):
                if work.drafts:
                    self.acceptance.verified(len(work.drafts), len(result.sampled) - 1)
        self._told(events)
        self._watch.stepped(plan, ran, events)
        return self._tell_ended(events)

    def _told(self, events: list[Event]) -> list[Event]:
        for event in events:
            if event.request.id in self._streams:
                self._streams[event.request.id].append(event)
        return events

    def _tell_ended(self, events: list[Event]) -> list[Event]:
        for event in events:
            if event.finish not in (None, "abort"):  # `abort` has told its own
                self._watch.ended(event.request)
        return events

    def drain(self) -> list[Request]:
        """Run everything that was added to its end; the requests that ended, in that order."""
        ended = []
        while not self.idle:
            ended += [event.request for event in self.step() if event.finish is not None]
        return ended

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
        listed = list(requests)
        for request in listed:
            self._check(request)
        added: list[Request] = []
        try:
            while len(added) < len(listed) or any(r.finish is None for r in added):
                while len(added) < len(listed) and self._take(listed[len(added)]):
                    added.append(listed[len(added)])
                self.step()
        finally:
            for request in added:
                self.abort(request)
        for request in added:
            if request.error is not None:
                raise request.error
        return added

    def _check(self, request: Request) -> None:
        self._scheduler.check(request)
        if request.parcel is not None:
            self._cache.check(request.parcel)

    def _take(self, request: Request) -> bool:
        """Add a request unless the queue is full."""
        try:
            self.add(request)
        except Overloaded:
            return False
        return True

    def audit(self) -> None:
        """Assert that no page and no slot is lost, or owned twice."""
        self._scheduler.audit()


def _by_group(units: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for (group, kind), size in units.items():
        out.setdefault(group, {})[kind] = size
    return out


def _check_types(sizes: PoolSizes, drafts: Drafts | None) -> None:
    if not isinstance(sizes, PoolSizes):
        raise ValueError(
            f"sizes is of type {type(sizes).__name__}; give PoolSizes: runtime.pages.fit makes "
            f"them, and runtime.pools.plan_pools in its field `sizes`"
        )
    if drafts is not None and not isinstance(drafts, Drafts):
        raise ValueError(f"drafts is {drafts!r:.60}; give runtime.drafts.Drafts(depth=...) or None")


def _check_drafts(model: Model, sizes: PoolSizes, depth: int) -> None:
    if depth and (model.draft is None or not model.cfg.mtp):
        raise ValueError(
            "drafts are asked for, but the model has no draft module: build it with drafts=True "
            "from a checkpoint that has one, or leave drafts out"
        )
    if depth > sizes.drafts:
        raise ValueError(
            f"drafts of depth {depth} need pools with drafts = {depth}, and they have "
            f"{sizes.drafts}: pass drafts={depth} to runtime.pages.fit"
        )
