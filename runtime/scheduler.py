"""Which requests run next, and what becomes of them. Host data only.

`plan` decides and reserves; `commit` alone writes what a request has computed and generated.

Order: by priority (lower first), then first come, first served. A step holds, within its budget of
tokens, one row and the drafts of EVERY request that generates, then chunks of prompts. So a request
that generates is in every step, and waits at most as long as one step of `budget` tokens takes.
A prompt that cannot be finished in a step leaves half of the room to prompts behind it that can.

Pages are taken as a sequence grows. When they run out the least urgent running request is
preempted: its pages go (full ones stay cached while there is room), its tokens stay, and it waits
at its old place in the queue. If it is itself the one that lacks a page, it keeps what it has and
is in no step until one comes free. The most urgent running request is never preempted, and every
request that was accepted fits on its own, so it always finishes: with equal priorities, request i
has ended at most (its prompt / p, rounded up, + its new tokens) steps after those before it, where
p is half of the budget that is left when all others generate, but at least 1 and at most a chunk.
A less urgent request is also preempted for a waiting one of a strictly lower priority number.
"""

import bisect
import dataclasses
import functools
import logging
import time
from collections.abc import Sequence

from dsv4.config import Config
from runtime import admission
from runtime.drafts import DraftRecord
from runtime.filling import Filling
from runtime.pages import Copies, Held, Pages
from runtime.parcel import Parcel
from runtime.plan import Plan, Ran, Work
from runtime.prefix import CacheReport, Hit, Prefix
from runtime.queue import Waiting, order
from runtime.request import Event, Request, Status
from runtime.rules import Overloaded, Rules
from runtime.text import Decode
from runtime.trials import Trials

log = logging.getLogger(__name__)


class Scheduler:
    """Owns the requests and the pages."""

    def __init__(self, cfg: Config, pages: Pages, prefix: Prefix, rules: Rules) -> None:
        """`rules` were checked against the slots of `pages`."""
        self.cfg, self.pages, self.prefix, self.rules = cfg, pages, prefix, rules
        self.waiting = Waiting()
        self.running: list[Request] = []  # the most urgent first
        self.preemptions = 0
        self._live: dict[int, Request] = {}
        self._next_id = 0
        self._trials = Trials()
        self._imports: list[tuple[int, Held, Parcel]] = []
        self._preempted: list[int] = []

    # Requests come and go.

    def add(self, request: Request, decode: Decode | None) -> None:
        """Queue a request. Raises ValueError for one that can never be served, or Overloaded."""
        self._open(request, decode)
        request.status = Status.WAITING
        self.waiting.push(request)

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that can never be served."""
        if not isinstance(request, Request):
            kind = type(request).__name__
            raise ValueError(f"{request!r:.60} is of type {kind}; give a Request(prompt=...)")
        request.check(self.cfg)
        self.pages.check(request.longest(self.cfg))
        if request.parcel is not None:
            request.parcel.check(self.prefix.digest, request.prompt)

    def _open(self, request: Request, decode: Decode | None) -> None:
        self.check(request)
        room = request.longest(self.cfg)
        # Those for whom there are slots only wait for the next step.
        most, wait = self.rules.max_waiting, len(self.waiting) - self.pages.slots.available
        if most is not None and wait >= most:
            raise Overloaded(
                f"{wait} requests wait and max_waiting is {most}: this one was not taken; try "
                f"again when some have ended"
            )
        request.open_text(decode)
        request.room, request.id = room, self._next_id
        self._next_id += 1
        if request.cache and self.prefix.enabled:
            request.chain = self.prefix.chain(request.salt, request.extra)
        drafts = self.rules.drafts
        if drafts is not None and request.drafting:
            request.drafted = DraftRecord(drafts=drafts, price=drafts.price(self.cfg.layers))
        self._live[request.id] = request
        request.added_s = time.perf_counter()

    def fork(self, parent: Request, child: Request, decode: Decode | None) -> Copies | None:
        """Queue a request whose prompt is what `parent` has so far, with its state if possible.

        The state is shared at once if a slot and the open pages are there, and no more urgent
        request waits for them: returns the rows to copy, now. If not, the child waits and begins
        with what the cache has.
        """
        self.check_own(parent)
        self._open(child, decode)
        head = self.waiting.head()
        queued = head is not None and order(head) < order(child)
        forked = None
        if parent.held is not None and parent.computed and not queued:
            forked = self.pages.fork(parent.held)
        if forked is None:
            child.status = Status.WAITING
            self.waiting.push(child)
            return None
        child.held, copies = forked
        child.chain = child.chain if parent.chain is not None else None  # see forget_prefixes
        self._report(child, child.computed, "forked")
        self._start(child)
        return copies

    def abort(self, request: Request) -> None:
        """End a request now and free what it holds. Nothing happens if it has ended.

        Raises ValueError for a request of another engine.
        """
        if request.status in (Status.WAITING, Status.RUNNING):
            self.check_own(request)
            request.finish = "abort"
            self._retire(request)

    def fail(self, request: Request, error: Exception) -> Event:
        """End a request with an error of its own."""
        request.finish, request.error = "error", error
        self._retire(request)
        return Event(request=request, tokens=(), text="", logprobs=(), finish="error")

    def check_own(self, request: Request) -> None:
        """Raise ValueError for a request that does not wait or run here."""
        if self._live.get(request.id) is not request:
            raise ValueError(
                f"request {request.id} is not one of this engine's: it neither runs nor waits here"
            )

    def _retire(self, request: Request) -> None:
        if request.held is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request)
        if request.error is not None and request.chain is not None:
            self.prefix.retract(request.chain)
        del self._live[request.id]
        self._forget_import(request)
        request.parcel = request.proposal = None
        request.status, request.finished_s = Status.DONE, time.perf_counter()

    def _release(self, request: Request) -> None:
        assert request.held is not None
        if request.chain is not None:
            self.prefix.ended(request.chain, request.held)
        self.pages.release(request.held)
        request.held = None

    # A step is planned.

    def plan(self) -> Plan | None:
        """The next step, or None if nothing is left. Its pages are owned when this returns."""
        admitted = self._admit()
        begin = functools.partial(self._begin, admitted)
        step = Filling(self.pages, self.rules, self.running, self._preempt, begin)
        while not step.works and (trial := self._trials.current()) is not None:
            step.alone(trial)
            if not step.works:  # more urgent ones hold pages that it shared before
                self._preempt(trial)
        if not step.works:
            step.decodes()
            step.prompts()
        works = step.works
        assert works or not self.running, "requests run, and none can move"
        imports, preempted = tuple(self._imports), tuple(self._preempted)
        self._imports, self._preempted = [], []
        if not works:
            return None
        work = tuple(works.values())
        slots = [w.slot for w in work]
        end = max([w.start + len(w.tokens) + len(w.drafts) for w in work])
        q = -(-end // self.pages.page_tokens)
        return Plan(
            work=work,
            history=self.pages.history_table[slots, :q],
            window=self.pages.window_table[slots],
            admitted=admitted,
            preempted=preempted,
            imports=imports,
        )

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        self._preempted.append(victim.id)
        self._forget_import(victim)
        self.waiting.push(victim)
        log.info("request %d is preempted: pages are short", victim.id)

    def _forget_import(self, request: Request) -> None:
        self._imports = [i for i in self._imports if i[0] != request.id]

    # Waiting requests are admitted.

    def _admit(self) -> tuple[int, ...]:
        admitted = []
        while (request := self.waiting.head()) is not None:
            if not self.pages.slots.available and not self._outranks(request):
                break
            hit, report = self.prefix.match(request.chain, request.tokens)
            if request.parcel is not None:
                hit = Hit((), ())
            if not self._fits(request, hit) and not self._displace(request, hit):
                break
            self.waiting.remove(request)
            self._enter(request, hit, report)
            admitted.append(request.id)
        return tuple(admitted)

    def _outranks(self, request: Request) -> bool:
        """Whether a less urgent one runs."""
        return bool(self.running) and self.running[-1].priority > request.priority

    def _begin(self, admitted: Sequence[int], request: Request) -> None:
        """Look once more for the prefix of one that gets its first chunk.

        Others that were admitted with it may have computed it meanwhile, in the steps before.
        """
        held = request.held
        if held is None or held.history or request.chain is None or request.id in admitted:
            return
        hit, report = self.prefix.match(request.chain, request.tokens)
        self.pages.restore(held, hit.history, hit.window)
        request.chain.published = len(hit.history)
        if not request.preemptions:
            request.report = report

    def _enter(self, request: Request, hit: Hit, report: CacheReport) -> None:
        request.held = held = self.pages.open()
        parcel, request.parcel = request.parcel, None
        if parcel is not None:
            took = self.pages.begin(held, len(parcel.tokens))
            assert took, "the pages of an import were there"
            here = dataclasses.replace(held, history=[*held.history], window=[*held.window])
            self._imports.append((request.id, here, parcel))
            if self.rules.depth:
                self.pages.step_back(held)  # its next token may be another than where it comes from
            self._report(request, held.length, "imported")
        else:
            self.pages.restore(held, hit.history, hit.window)
            if request.chain is not None:
                request.chain.published = len(hit.history)
            request.report = request.report or report
        self._start(request)

    def _report(self, request: Request, tokens: int, reason: str) -> None:
        unit = self.pages.page_tokens
        request.report = CacheReport(
            len(request.tokens), tokens, len(request.tokens) - 1, unit, reason
        )

    def _start(self, request: Request) -> None:
        request.status = Status.RUNNING
        if not request.admitted_s:
            request.admitted_s = time.perf_counter()
        bisect.insort(self.running, request, key=order)

    def _fits(self, request: Request, hit: Hit) -> bool:
        return admission.fits(self.pages, self.running, request, hit)

    def _displace(self, request: Request, hit: Hit) -> bool:
        """Preempt less urgent requests for one of strictly more urgent priority, if it helps."""
        victims = [r for r in self.running if r.priority > request.priority]
        stay = self.running[: len(self.running) - len(victims)]
        free = admission.gain(victims)
        if not victims or not admission.fits(self.pages, stay, request, hit, free):
            return False
        while victims and not self._fits(request, hit):
            self._preempt(victims.pop())
        return self._fits(request, hit)

    # A step has run.

    def commit(self, plan: Plan, ran: Sequence[Ran]) -> list[Event]:
        """Record what a step computed: per work its sampled tokens, none inside a prompt.

        Returns an event for every request that got tokens, in the order of the plan. Tokens after
        the one that ends a request are dropped.
        """
        events = []
        for work, result in zip(plan.work, ran, strict=True):
            request = self._live.get(work.id)
            if request is None or request.held is None:
                continue  # aborted while the step ran
            if work.wanted:
                events.append(self._extend(request, request.held, work, result))
            else:
                self._advance(request, request.held, len(work.tokens))
        return events

    def _advance(self, request: Request, held: Held, count: int) -> None:
        """Some more tokens have their state; the others of the step are taken back."""
        pages = self.pages
        pages.commit(held, count)
        chain = request.chain
        # Also pages that came with an import: their window pages do not last until the next one.
        if chain is not None and held.length // pages.page_tokens > chain.published:
            self.prefix.publish(chain, held, request.tokens, len(request.prompt))
        if held.length - pages.keep >= (held.window_start + 1) * pages.page_tokens:
            pages.recycle(held)

    def _extend(self, request: Request, held: Held, work: Work, ran: Ran) -> Event:
        text, scores, tokens = "", (), list[int]()
        if not request.first_s:
            request.first_s = time.perf_counter()
        for s in ran.sampled:
            tokens.append(s.token)
            try:
                text += request.append(s, self.cfg)
            except Exception as error:  # a bad detokenizer, NaN: others must not pay for it
                request.finish, request.error = "error", error
            if request.finish is not None:
                break
        if request.held is held:  # not aborted by its own detokenizer
            if request.error is None:
                self._advance(request, held, len(work.tokens) + len(tokens) - 1)
            if request.drafted is not None:
                self._propose(request, request.drafted, work, ran)
            if request.finish is not None:
                self._retire(request)
        if work.logprobs is not None:
            new = ran.sampled[: len(tokens)]
            scores = tuple([s.logprobs for s in new if s.logprobs is not None])
        return tuple.__new__(Event, (request, tuple(tokens), text, scores, request.finish))

    def _propose(self, request: Request, record: DraftRecord, work: Work, ran: Ran) -> None:
        """Note how the drafts did, and keep those of the next step that can be of use."""
        record.verified(len(work.drafts), len(ran.sampled) - 1)
        proposal = ran.proposal
        if proposal is None:
            request.proposal = None
            return
        useful = request.room - len(request.tokens)
        if len(proposal.tokens) > useful:
            proposal = proposal.first(useful) if useful > 0 else None
        request.proposal = proposal

    # A step has failed.

    def restart(self, plan: Plan) -> list[Request]:
        """Compute the requests of a failed step anew, one at a time, from their first token.

        The step may have written some of its rows: what the pools hold of them is not known (pages
        published before are: nobody writes them). Their tokens stand, so nothing is lost. Returns
        those that failed alone, for the second time: they are the cause, and must be ended.
        """
        touched = {w.id for w in plan.work}
        touched |= {i for i, _, _ in plan.imports}
        guilty = []
        for request in [self._live[i] for i in sorted(touched) if i in self._live]:
            held = request.held
            if held is None:
                continue
            tried = request in self._trials
            if tried and len(touched) == 1:
                guilty.append(request)
                continue
            goal = max(
                (w.start + len(w.tokens) for w in plan.work if w.id == request.id), default=0
            )
            self.pages.forget(held)
            if request.chain is not None:
                request.chain.published = 0
            if goal and not tried:
                self._trials.suspect(request, goal)
        return guilty

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; what runs has state of before and publishes no more of it."""
        self.prefix.forget()
        for request in self._live.values():
            request.parcel = None  # computed anew: its state is of before as well
            request.chain = request.chain if request.held is None else None

    def audit(self) -> None:
        """Assert that no page and no slot is lost, or owned by another number than counted."""
        self.pages.audit(r.held for r in self.running if r.held is not None)
        assert self.running == sorted(self.running, key=order)
        waiting = [r for r in self._live.values() if r.held is None]
        assert all(r in self.waiting for r in waiting)
        assert len(waiting) == len(self.waiting)
