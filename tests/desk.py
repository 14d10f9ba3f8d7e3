"""A scheduler without an engine: steps are planned, answered with made-up results, and committed.

The pretended model counts: the token after n is n + 1. Its drafts count too, where `right` says so.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from dsv4.config import Config
from dsv4.state import PoolSizes
from runtime.drafts import Drafts
from runtime.pages import Pages
from runtime.plan import Plan, Ran, Work
from runtime.prefix import Prefix
from runtime.request import Event, Limits, Proposal, Request, Sampled
from runtime.rules import Rules
from runtime.scheduler import Scheduler
from tests import tiny

PAGE = 8
CFG = tiny.short("wc", 0, mtp=0, eos=(), max_positions=96)
Right = Callable[[int], bool]  # whether the draft of the token at this position is right


def sizes(history: int, slots: int, window: int | None = None, drafts: int = 0) -> PoolSizes:
    """Pools of so many pages and slots that can be owned."""
    return PoolSizes(
        history_pages=history + 1,
        window_pages=(window or history) + 1,
        slots=slots + 1,
        page_tokens=PAGE,
        drafts=drafts,
    )


def sampled(work: Work) -> list[Sampled]:
    """What the pretended model wants: the drafts that count on, and one token more."""
    token, out = work.tokens[-1], []
    for draft in (*work.drafts, None):
        token = (token + 1) % CFG.vocab
        out.append(Sampled(token))
        if token != draft:
            break
    return out


def proposal(work: Work, new: Sequence[Sampled], right: Right) -> Proposal | None:
    """As many drafts as the work asks for and has pages for."""
    end = work.start + len(work.tokens) + len(new) - 1
    token, drafts = new[-1].token, []
    for i in range(min(work.propose, work.reach - end)):
        token = (token + (1 if right(end + 1 + i) else 2)) % CFG.vocab
        drafts.append(token)
    return Proposal(tuple(drafts)) if drafts else None


def answers(plan: Plan, right: Right = lambda _: True) -> list[Ran]:
    """What a run of the plan brings."""
    out = []
    for work in plan.work:
        new = sampled(work) if work.wanted else []
        out.append(Ran(new, proposal(work, new, right) if new else None))
    return out


def facts(plan: Plan) -> tuple:
    """A plan as plain numbers, to be compared."""
    rows = tuple(tuple(w) for w in plan.work)
    imports = tuple((i, h.history, h.window, h.length, p) for i, h, p in plan.imports)
    tables = (plan.history.tolist(), plan.window.tolist())
    return rows, tables, plan.admitted, plan.preempted, imports


@dataclasses.dataclass
class Desk:
    """A scheduler on pools of its own, and what it did so far."""

    sizes: PoolSizes
    chunk: int = 16
    budget: int | None = None
    drafts: Drafts | None = None
    max_waiting: int | None = None
    cache: bool = False
    right: Right = lambda _: True

    def __post_init__(self) -> None:
        """Rules are checked as an engine does."""
        self.cfg: Config = dataclasses.replace(CFG, mtp=int(self.drafts is not None))
        slots = self.sizes.slots - 1
        self.depth = self.drafts.depth if self.drafts else 0
        budget = self.budget or self.chunk + slots * (1 + self.depth)
        self.rules = Rules(
            chunk=self.chunk, budget=budget, max_waiting=self.max_waiting, drafts=self.drafts
        )
        self.rules.check(slots)
        self.pages = Pages(self.cfg, self.sizes, self.chunk)
        self.prefix = Prefix(self.pages, "a layout", enabled=self.cache)
        self.scheduler = Scheduler(self.cfg, self.pages, self.prefix, self.rules)
        self.plans: list[Plan] = []
        self.ended: list[int] = []

    @property
    def idle(self) -> bool:
        """Nothing waits or runs."""
        return not self.scheduler.waiting and not self.scheduler.running

    def add(self, prompt: Sequence[int] | int, new: int = 4, **more) -> Request:
        """Queue a prompt, or one of so many tokens."""
        ids = [7] * prompt if isinstance(prompt, int) else prompt
        request = Request(prompt=ids, limits=Limits(max_new_tokens=new), **more)
        self.scheduler.add(request, None)
        return request

    def plan(self) -> Plan:
        """The next step, which must exist; what always holds of a plan is asserted."""
        plan = self.scheduler.plan()
        assert plan is not None
        self.scheduler.audit()
        self.check(plan)
        self.plans.append(plan)
        return plan

    def check(self, plan: Plan) -> None:
        """What holds of every plan."""
        assert plan.tokens <= self.rules.budget
        assert len({w.slot for w in plan.work}) == len(plan.work)
        running = {r.id: r for r in self.scheduler.running}
        for work, history in zip(plan.work, plan.history, strict=True):
            request = running[work.id]
            held = request.held
            assert held is not None
            assert (work.start, held.slot) == (held.length, work.slot)
            assert len(work.tokens) <= self.rules.chunk
            assert work.start + work.rows <= work.reach <= request.room
            assert work.wanted == (1 + len(work.drafts) if work.following < 0 else 0)
            assert max(len(work.drafts), work.propose) <= self.depth
            assert len(held.history) * PAGE >= work.reach
            needed = -(-(work.start + work.rows) // PAGE)
            assert np.array_equal(history[:needed], held.history[:needed])
            assert (history[:needed] > 0).all()

    def commit(self, plan: Plan) -> list[Event]:
        """The step has run."""
        events = self.scheduler.commit(plan, answers(plan, self.right))
        self.scheduler.audit()
        self.ended += [e.request.id for e in events if e.finish]
        return events

    def step(self) -> Plan:
        """Plan, pretend to run, commit."""
        plan = self.plan()
        self.commit(plan)
        return plan

    def drain(self, most: int = 1000) -> int:
        """Step until all have ended, which must take at most so many steps; how many it took."""
        count = 0
        while not self.idle:
            assert count < most, f"{most} steps, and requests are left"
            self.step()
            count += 1
        self.all_free()
        return count

    def all_free(self) -> None:
        """Every page and slot can be taken, and no request is remembered."""
        for pool in (self.pages.history, self.pages.window, self.pages.slots):
            assert pool.available == pool.capacity
        assert not self.scheduler._live
        assert self.idle

    def share(self) -> int:
        """Prompt tokens per step that the most urgent request is sure of, by the docstring."""
        others = (self.sizes.slots - 2) * (1 + self.depth)
        return min(self.rules.chunk, max((self.rules.budget - others) // 2, 1))

    def bound(self, request: Request) -> int:
        """Steps after which a request has ended, once those before it have, by the docstring."""
        return math.ceil(len(request.prompt) / self.share()) + request.limits.max_new_tokens
