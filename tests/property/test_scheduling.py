"""Arrivals, priorities, aborts, forks and failed steps in any order, on small pools."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.drafts import Drafts
from runtime.plan import Plan
from runtime.request import Request, Status
from tests.desk import CFG, PAGE, Desk, sizes

_TOKENS = 6 * PAGE  # of the longest request: it fits the smallest pools on its own


@st.composite
def desks(draw, failing: bool = False) -> Desk:
    depth = draw(st.sampled_from([0, 0, 1, 3]))
    history, slots = draw(st.integers(6, 14)), draw(st.integers(1, 5))
    chunk = draw(st.integers(1, 12))
    least = slots * (1 + depth)
    period = draw(st.integers(2, 6))
    return Desk(
        sizes(history, slots, draw(st.integers(6, 14)), drafts=depth),
        chunk=chunk,
        budget=draw(st.integers(least, least + 12)),
        drafts=Drafts(depth=depth, window=3, rest=4) if depth else None,
        cache=draw(st.booleans()),
        right=lambda p: p % period > 0,
    )


@st.composite
def arrivals(draw) -> tuple[list[int], int, int]:
    """A prompt that may share its beginning with others, its new tokens, its priority."""
    new = draw(st.integers(1, 16))
    n = draw(st.integers(1, _TOKENS - new))
    first = draw(st.sampled_from([0, 0, 50]))
    return [(first + i) % CFG.vocab for i in range(n)], new, draw(st.integers(-1, 1))


moves = st.one_of(
    st.tuples(st.just("add"), arrivals()),
    st.tuples(st.sampled_from(["step", "step", "step", "abort", "fork", "late"]), st.integers(0)),
)


class Story:
    """What happened at a desk."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.made = desk, list[Request]()

    def live(self, pick: int) -> Request | None:
        """Any of those that wait or run."""
        those = [r for r in self.made if r.status in (Status.WAITING, Status.RUNNING)]
        return those[pick % len(those)] if those else None

    def play(self, move: str, what) -> None:
        request = self.live(what) if isinstance(what, int) else None
        if move == "add":
            prompt, new, priority = what
            self.made.append(self.desk.add(prompt, new, priority=priority))
        elif move == "step" and not self.desk.idle:
            self.step()
        elif request is not None and move == "abort":
            self.desk.scheduler.abort(request)
        elif request is not None and move == "late":  # between plan and commit
            plan = self.plan()
            self.desk.scheduler.abort(request)
            self.desk.commit(plan)
        elif request is not None and move == "fork" and len(request.tokens) < _TOKENS:
            limits = dataclasses.replace(request.limits, max_new_tokens=3)
            child = request.follow(None, limits)
            self.desk.scheduler.fork(request, child, None)
            self.made.append(child)
        elif request is not None and move == "fail":
            self.fail()
        self.desk.scheduler.audit()

    def plan(self) -> Plan:
        """The next step; those that generate are in it, and the most urgent one stays."""
        running = self.desk.scheduler.running
        first = min(running, key=lambda r: (r.priority, r.id)) if running else None
        waiting = [r for r in self.made if r.status is Status.WAITING]
        plan = self.desk.plan()
        urgent = first is not None and all(r.priority >= first.priority for r in waiting)
        if urgent and not self.desk.scheduler._trials.current():
            assert first is not None
            assert first.id not in plan.preempted
            assert plan.work
            assert first.id in {w.id for w in plan.work}
            planned = {w.id for w in plan.work}
            for request in running:
                if len(request.tokens) - request.computed == 1:
                    # Or it is the least urgent, and there is no page to be had.
                    assert request.id in planned or request is running[-1]
        return plan

    def step(self) -> None:
        self.desk.commit(self.plan())

    def fail(self) -> None:
        """A step breaks, and so do the ones after it that hold the same request alone."""
        plan = self.plan()
        for request in self.desk.scheduler.restart(plan):
            self.desk.scheduler.fail(request, RuntimeError("broken"))

    def bound(self) -> int:
        return sum(self.desk.bound(r) for r in self.made if r.status is not Status.DONE)

    def end(self, most: int) -> None:
        """All end within so many steps, right as far as they came, and everything is free."""
        steps = 0
        while not self.desk.idle:
            assert steps < most
            self.step()
            self.desk.scheduler.audit()
            steps += 1
        self.desk.all_free()
        for request in self.made:
            assert request.finish in ("length", "abort", "error")
            if request.finish == "length":
                assert len(request.output) == request.limits.max_new_tokens
            first = request.prompt[-1]
            assert request.output == [
                (first + 1 + i) % CFG.vocab for i in range(len(request.output))
            ]


@settings(max_examples=150)
@given(desk=desks(), story=st.lists(moves, max_size=40))
def test_every_request_ends_and_everything_is_free(desk: Desk, story: list) -> None:
    """Within the bound of the scheduler's docstring: the sum over all that are left."""
    told = Story(desk)
    for move, what in story:
        told.play(move, what)
    told.end(told.bound())


failures = st.one_of(moves, st.tuples(st.just("fail"), st.integers(0)))


@settings(max_examples=150)
@given(desk=desks(), story=st.lists(failures, max_size=40))
def test_failed_steps_lose_nothing(desk: Desk, story: list) -> None:
    """Those of a failed step start over, one at a time; twice alone ends a request."""
    told = Story(desk)
    for move, what in story:
        told.play(move, what)
    # Each failure makes every running request compute all of its tokens again.
    told.end(told.bound() + (1 + sum(m == "fail" for m, _ in story)) * _TOKENS * len(told.made))
