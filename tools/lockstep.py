"""Data-parallel ranks in lock step, simulated: which request runs when, and how long steps take.

A step lasts base + the largest, over ranks, of prefill cost * prompt tokens + decode cost *
decoding requests. Each rank decodes first, then continues prompts in order of arrival, then admits,
within a token budget, as the schedulers of vLLM do. Routers see states that are `stale_s` old,
corrected by what they sent since. A rank keeps every prefix that was sent to it.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from runtime.balance_dp import COSTS, INT32_MAX, Ask, Costs, Decision, RankState, routed
from tools.arrivals import Arrival


@dataclasses.dataclass(frozen=True)
class Policy:
    """A router and a gate by name."""

    name: str
    route: Callable[[Sequence[RankState], Ask, Sequence[int]], int]
    gate: Callable[[Sequence[RankState]], Decision]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The ranks, what they may hold, and how long they take."""

    ranks: int = 8
    limit: int = 24  # most requests of a rank
    chunk: int = 512  # most prompt tokens of one request per step
    budget: int = 512  # most tokens of a rank per step
    pages: int = 0  # of a rank; 0: as many as are wanted
    page_tokens: int = 128
    base_s: float = 0.010
    costs: Costs = COSTS
    expected_new: int = 200  # what a router takes for the length of an output
    stale_s: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError naming the field, the value and what is allowed."""
        least = (
            ("ranks", 1),
            ("limit", 1),
            ("chunk", 1),
            ("pages", 0),
            ("page_tokens", 1),
            ("expected_new", 1),
            ("base_s", 1e-6),
            ("stale_s", 0),
        )
        for name, low in least:
            if not low <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least {low} and finite"
                )
        if self.budget <= self.limit:
            raise ValueError(
                f"budget is {self.budget} tokens per step and limit is {self.limit} requests; "
                f"budget must be larger, or prompts starve: raise --budget or lower --limit"
            )

    def need(self, arrival: Arrival) -> int:
        """Pages of a request at its end; 0 if pages are not counted."""
        tokens = arrival.prompt_tokens + arrival.new_tokens - 1
        return -(-tokens // self.page_tokens) if self.pages else 0


@dataclasses.dataclass
class Job:
    """One request under way."""

    index: int
    arrival: Arrival
    pages: int
    left: int  # prompt tokens to compute


class Rank:
    """A continuous batcher: decodes first, then prompts in order of arrival, then admission."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.waiting: deque[Job] = deque()
        self.filling: list[Job] = []
        self.decoding = 0
        self.ends: dict[int, list[Job]] = {}  # step -> requests whose last token it gives
        self.prompt_tokens = 0
        self.free_pages = machine.pages or INT32_MAX
        self.promised = 0  # pages that waiting requests will want
        self.prefixes: dict[str, int] = {}  # tokens that are there of each
        self.ready_since: float | None = None

    def hit(self, arrival: Arrival) -> int:
        """Prompt tokens of a request that are cached: whole pages, and never the last token."""
        there = self.prefixes.get(arrival.prefix, 0)
        size = self.machine.page_tokens
        return min(there, arrival.prefix_tokens, arrival.prompt_tokens - 1) // size * size

    def add(self, job: Job) -> None:
        """Queue a request."""
        self.waiting.append(job)
        self.prompt_tokens += job.left
        self.promised += job.pages
        name, tokens = job.arrival.prefix, min(job.arrival.prefix_tokens, job.arrival.prompt_tokens)
        if name:
            self.prefixes[name] = max(tokens, self.prefixes.get(name, 0))

    def fits(self) -> bool:
        """Whether the first waiting request could be admitted."""
        return (
            bool(self.waiting)
            and len(self.filling) + self.decoding < self.machine.limit
            and self.waiting[0].pages <= self.free_pages
        )

    def state(self, now: float) -> RankState:
        """What it tells the others before a step."""
        ready = bool(self.filling) or self.fits()
        if not ready:
            self.ready_since = None
        elif self.ready_since is None:
            self.ready_since = now
        held_s = 0.0 if self.ready_since is None else now - self.ready_since
        # A request that decodes is taken to be half way.
        ahead = 2 * (len(self.waiting) + len(self.filling)) + self.decoding
        return RankState(
            running=len(self.filling) + self.decoding,
            limit=self.machine.limit,
            waiting=len(self.waiting),
            decoding=self.decoding,
            prompt_tokens=self.prompt_tokens,
            decode_tokens=ahead * self.machine.expected_new // 2,
            ready=int(ready),
            held_ms=int(1000 * held_s),
            free_pages=self.free_pages - self.promised,
        )

    def prefill(self, decision: Decision) -> tuple[int, list[Job]]:
        """Prompt tokens computed in a step, and the requests that get their first token by it."""
        before = left = self.machine.budget - self.decoding
        for job in self.filling if decision.prefill else ():
            left -= self._chunk(job, left)
        while decision.admit and left > 0 and self.fits():
            job = self.waiting.popleft()
            self.promised -= job.pages
            self.free_pages -= job.pages
            self.filling.append(job)
            left -= self._chunk(job, left)
        done = [job for job in self.filling if job.left == 0]
        self.filling = [job for job in self.filling if job.left > 0]
        self.prompt_tokens -= before - left
        return before - left, done

    def _chunk(self, job: Job, left: int) -> int:
        count = min(job.left, self.machine.chunk, left)
        job.left -= count
        return count

    def finish(self, step: int, started: list[Job]) -> list[Job]:
        """Requests that end with this step; those that `started` decode from the next one on."""
        ended = self.ends.pop(step, [])
        self.decoding += len(started) - len(ended)
        for job in started:
            self.ends.setdefault(step + job.arrival.new_tokens - 1, []).append(job)
        at_once = self.ends.pop(step, [])  # their first token is their last
        self.decoding -= len(at_once)
        for job in ended + at_once:
            self.free_pages += job.pages
        return ended + at_once


@dataclasses.dataclass(frozen=True)
class Step:
    """What happened in one step; lists by rank."""

    states: list[RankState]
    decision: Decision
    prompt_tokens: list[int]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """What happened. Times in seconds from the start, by request in order of arrival."""

    arrivals: Sequence[Arrival]
    steps: list[Step]
    rank: np.ndarray
    cached: np.ndarray  # prompt tokens that were not computed
    first_s: np.ndarray
    end_s: np.ndarray


class _Router:
    """Sends requests by states that are refreshed every `stale_s`, corrected by what it sent."""

    def __init__(self, machine: Machine, policy: Policy, ranks: list[Rank]) -> None:
        self.machine, self.policy, self.ranks = machine, policy, ranks
        self.seen: list[RankState] = []
        self.seen_s = 0.0

    def look(self, now: float) -> None:
        """See the ranks as they are, if what was seen is old."""
        if not self.seen or now - self.seen_s >= self.machine.stale_s:
            self.seen, self.seen_s = [r.state(now) for r in self.ranks], now

    def send(self, index: int, arrival: Arrival) -> tuple[int, int]:
        """The rank that gets the request, and how many of its tokens are cached there."""
        pages = self.machine.need(arrival)
        ask = Ask(
            prompt_tokens=arrival.prompt_tokens,
            expected_tokens=self.machine.expected_new,
            pages=pages,
        )
        hits = [r.hit(arrival) for r in self.ranks]
        to = self.policy.route(self.seen, ask, hits)
        self.ranks[to].add(Job(index, arrival, pages, arrival.prompt_tokens - hits[to]))
        self.seen[to] = routed(self.seen[to], ask, hits[to])
        return to, hits[to]


def simulate(arrivals: Sequence[Arrival], machine: Machine, policy: Policy) -> Run:
    """Serve `arrivals`, in order of time, to the end. Raises ValueError for one that cannot fit.

    So it does for a gate that stays shut when nobody decodes: nothing would ever move again.
    """
    for a in arrivals:
        if machine.need(a) > machine.pages:
            raise ValueError(
                f"a request of {a.prompt_tokens} prompt and {a.new_tokens} new tokens needs "
                f"{machine.need(a)} pages; a rank has {machine.pages}: raise --pages"
            )
    ranks = [Rank(machine) for _ in range(machine.ranks)]
    router = _Router(machine, policy, ranks)
    rank, cached = np.zeros((2, len(arrivals)), dtype=int)
    first_s, end_s = np.zeros((2, len(arrivals)))
    steps: list[Step] = []
    now, coming, open_jobs = 0.0, 0, 0
    while coming < len(arrivals) or open_jobs:
        if not open_jobs:
            now = max(now, arrivals[coming].arrival_s)
        router.look(now)
        while coming < len(arrivals) and arrivals[coming].arrival_s <= now:
            rank[coming], cached[coming] = router.send(coming, arrivals[coming])
            coming, open_jobs = coming + 1, open_jobs + 1
        states = [r.state(now) for r in ranks]
        decision = policy.gate(states)
        done = [r.prefill(decision) for r in ranks]
        if not any(tokens or s.decoding for (tokens, _), s in zip(done, states, strict=True)):
            raise ValueError(
                f"the gate of policy {policy.name} lets no rank work with {open_jobs} requests "
                f"open; it must open when nobody decodes"
            )
        costs = machine.costs
        work_ns = max(
            costs.prefill_ns * tokens + costs.decode_ns * s.decoding
            for (tokens, _), s in zip(done, states, strict=True)
        )
        seconds = machine.base_s + 1e-9 * work_ns
        now += seconds
        for r, (_, started) in zip(ranks, done, strict=True):
            first_s[[job.index for job in started]] = now
            ended = r.finish(len(steps), started)
            end_s[[job.index for job in ended]] = now
            open_jobs -= len(ended)
        steps.append(Step(states, decision, [tokens for tokens, _ in done], seconds))
    return Run(arrivals, steps, rank, cached, first_s, end_s)
