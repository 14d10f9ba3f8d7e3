"""Who runs next and with how many rows, decided on plain numbers: no tensor, no model."""

import dataclasses
import re

import pytest
import torch

from runtime.parcel import Parcel
from runtime.request import Status
from runtime.rules import Overloaded
from tests.desk import Desk, answers, facts, sizes

# The order of a step.


def rows(desk: Desk) -> list[tuple[int, int]]:
    """One step, as (request, rows)."""
    return [(w.id, w.rows) for w in desk.step().work]


def test_those_who_generate_are_in_every_step_whatever_prompts_arrive() -> None:
    """A new long prompt before each step: three decodes never miss one, and come first."""
    desk = Desk(sizes(200, 16), chunk=16, budget=20)
    for _ in range(3):
        desk.add(1, new=30)
    desk.step()
    for _ in range(29):
        desk.add(60, new=2)
        plan = desk.step()
        assert [(w.id, w.rows) for w in plan.work[:3]] == [(0, 1), (1, 1), (2, 1)]
        assert plan.tokens <= 20
    assert desk.ended[-3:] == [0, 1, 2]
    assert all(p.tokens == 20 for p in desk.plans[2:])  # and no room was left unused


def test_a_long_prompt_leaves_half_of_the_room_to_those_that_can_finish() -> None:
    desk = Desk(sizes(50, 4), chunk=16, budget=16)
    desk.add(60)
    desk.add(5)
    desk.add(40)
    # 8 of 16 for the first; 5 finish; the third has the rest.
    assert rows(desk) == [(0, 8), (1, 5), (2, 3)]
    # One row generates. Of 15, nobody behind can finish in 8: the first takes all.
    assert rows(desk) == [(1, 1), (0, 15)]
    desk.add(8)
    assert rows(desk) == [(1, 1), (0, 7), (2, 1), (3, 7)] or desk.plans[-1].tokens == 16


def test_half_is_left_only_if_it_is_enough() -> None:
    for behind, first in ((8, 8), (9, 16)):
        desk = Desk(sizes(50, 4), chunk=16, budget=16)
        desk.add(60)
        desk.add(behind)
        assert rows(desk)[0] == (0, first)


def test_first_come_first_served() -> None:
    desk = Desk(sizes(50, 2), chunk=8, budget=8)
    for _ in range(6):
        desk.add(12, new=3)
    assert desk.step().admitted == (0, 1)
    desk.drain()
    assert desk.ended == list(range(6))
    assert [i for p in desk.plans for i in p.admitted] == list(range(6))


def test_priority_goes_before_arrival() -> None:
    """Lower is more urgent; equal ones in order of arrival; in admission and within a step."""
    desk = Desk(sizes(50, 1), chunk=8)
    for priority in (3, -2, 0, -2, 2**31 - 1, 0):
        desk.add(4, new=2, priority=priority)
    desk.drain()
    assert desk.ended == [1, 3, 2, 5, 0, 4]
    wide = Desk(sizes(50, 6), chunk=8, budget=20)
    for priority in (1, 0, -1):
        wide.add(8, priority=priority)
    assert [w.id for w in wide.step().work] == [2, 1, 0]


# When pages run out.


def test_the_least_urgent_is_preempted_and_resumes_at_its_place() -> None:
    """Three grow into pages for two: the last one goes, and comes back before a later arrival."""
    desk = Desk(sizes(8, 4), chunk=16)
    made = [desk.add(9, new=24) for _ in range(3)]
    late = desk.add(30, new=20)
    desk.drain()
    lost = [i for p in desk.plans for i in p.preempted]
    assert lost
    assert 0 not in lost  # the most urgent never
    assert lost[0] == 2  # the least urgent of those that ran
    admitted = [i for p in desk.plans for i in p.admitted]
    assert admitted.index(3) > max(i for i, r in enumerate(admitted) if r == lost[0])
    assert desk.ended == [0, 1, 2, 3]
    assert desk.scheduler.preemptions == len(lost)
    assert [r.preemptions for r in (*made, late)] == [lost.count(i) for i in range(4)]
    for request in made:
        assert request.output == [8 + i for i in range(24)]


def test_a_preempted_request_is_computed_again_with_its_output() -> None:
    """Its tokens stay: after the preemption its next work begins with prompt and output."""
    desk = Desk(sizes(5, 2), chunk=16)
    desk.add(9, new=24)
    second = desk.add(9, new=12)
    while not second.preemptions:
        desk.step()
    so_far = list(second.tokens)
    assert second.status is Status.WAITING
    assert len(so_far) > 9
    desk.drain()
    again = [w for p in desk.plans for w in p.work if w.id == 1 and w.start == 0][1:]
    assert again[0].tokens == tuple(so_far[: len(again[0].tokens)])
    assert second.output == [8 + i for i in range(12)]


def test_preemption_takes_rows_back_out_of_the_step() -> None:
    """A prompt needs a page of one that was already planned in this step: it is not in it then."""
    desk = Desk(sizes(7, 3), chunk=8)
    for priority in (1, 2):
        desk.add(6, new=9, priority=priority)
    desk.step()
    desk.add(32, new=2, priority=0)
    for _ in range(3):
        assert [w.id for w in desk.step().work] == [0, 1, 2]
    plan = desk.step()
    assert plan.preempted == (1,)
    assert [w.id for w in plan.work] == [0, 2]
    desk.drain()
    assert desk.ended == [2, 0, 1]


def test_the_least_urgent_waits_for_a_page_with_what_it_has() -> None:
    """Nobody is less urgent to take it from: it loses nothing, and goes on when one comes free."""
    desk = Desk(sizes(5, 2), chunk=16, budget=30)
    first, last = desk.add(10, new=12), desk.add(9, new=12)
    while len(desk.plans[-1].work if desk.plans else "ab") == 2:
        desk.step()
    assert (last.status, last.computed, first.finish) == (Status.RUNNING, 16, None)
    desk.drain()
    assert desk.scheduler.preemptions == 0
    assert last.output == [8 + i for i in range(12)]


def test_only_a_strictly_more_urgent_request_displaces() -> None:
    for priority, admitted, preempted in ((0, (), ()), (1, (), ()), (-1, (1,), (0,))):
        desk = Desk(sizes(4, 4), chunk=16)
        desk.add(20, new=6)
        desk.step()
        desk.add(16, new=2, priority=priority)
        plan = desk.step()
        assert (plan.admitted, plan.preempted) == (admitted, preempted)
        desk.drain()
        assert desk.ended == ([1, 0] if preempted else [0, 1])


def test_nobody_is_displaced_in_vain() -> None:
    """Where even all less urgent ones would not free enough, they keep what they have."""
    desk = Desk(sizes(8, 4), chunk=16)
    desk.add(30, new=2, priority=-5)
    desk.step()
    desk.add(8, new=9, priority=3)
    desk.step()
    desk.add(60, new=2, priority=0)
    plan = desk.step()
    assert (plan.admitted, plan.preempted) == ((), ())
    assert {w.id for w in plan.work} == {0, 1}
    desk.drain()


def test_displacing_takes_no_more_than_is_needed() -> None:
    desk = Desk(sizes(13, 4), chunk=32, budget=100)
    for _ in range(3):
        desk.add(25, new=6, priority=5)
    desk.step()
    desk.add(20, new=2, priority=0)
    assert desk.step().preempted == (2,)
    desk.drain()


# What is refused at once.


@pytest.mark.parametrize(
    ("history", "window", "told"),
    [
        (5, 9, "which need 7 history pages of 8 tokens; the pool has 5"),
        (9, 2, "which need 4 window pages of 8 tokens in chunks of 16; the pool has 2"),
    ],
)
def test_i1_a_request_that_never_fits_is_refused_at_once(
    history: int, window: int, told: str
) -> None:
    """I1: with the short pool, not by waiting for ever at 0 % use."""
    desk = Desk(sizes(history, 2, window), chunk=16)
    with pytest.raises(ValueError, match=re.escape(f"are 49 tokens, {told}")):
        desk.add(40, new=10)
    desk.all_free()
    assert desk.scheduler.plan() is None
    # The longest that fits is served.
    desk.add(8 * min(history, window) - 1, new=2)
    desk.drain()


def test_a_full_queue_refuses_and_takes_again() -> None:
    desk = Desk(sizes(50, 1), chunk=16, max_waiting=2)
    desk.add(4, new=3)
    desk.step()
    desk.add(4)
    desk.add(4)
    with pytest.raises(Overloaded, match="2 requests wait and max_waiting is 2"):
        desk.add(4)
    assert [r.id for r in desk.scheduler._live.values()] == [0, 1, 2]
    desk.step()
    desk.step()
    desk.step()  # request 1 has begun
    assert desk.add(4).id == 3
    desk.drain()


def test_a_queue_that_may_hold_nobody_is_refused() -> None:
    """Every request waits for the next step: an engine with no place to wait could serve none."""
    with pytest.raises(ValueError, match=r"max_waiting is 0; it must be .* at least 1"):
        Desk(sizes(50, 1), max_waiting=0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"digest": "another layout"}, "the state has layout another layout"),
        ({"tokens": (7,) * 12}, "the state is of 12 tokens and the prompt has 12"),
        ({"tokens": ()}, "the state is of 0 tokens"),
        ({"tokens": (7, 8, 7)}, "the state is of other tokens than the first 3"),
    ],
)
def test_a_parcel_that_does_not_match_is_refused(change: dict, told: str) -> None:
    """Before a page is taken; a request refused once can be sent again without the parcel."""
    desk = Desk(sizes(9, 2))
    parcel = dataclasses.replace(Parcel("a layout", (7,) * 5, {}), **change)
    with pytest.raises(ValueError, match=told):
        desk.add(12, parcel=parcel)
    desk.all_free()


def test_a_parcel_saves_its_tokens() -> None:
    """Its state is put in before the first step, which begins behind it; one is enough."""
    desk = Desk(sizes(9, 2))
    parcel = Parcel("a layout", (7,) * 11, {"p": torch.zeros(0)})
    request = desk.add(12, new=3, parcel=parcel)
    plan = desk.step()
    assert [(w.start, w.tokens) for w in plan.work] == [(11, (7,))]
    ((who, held, what),) = plan.imports
    assert (who, held.length, what) == (request.id, 11, parcel)
    assert not desk.step().imports
    assert request.report is not None
    assert (request.report.hit, request.report.reason) == (11, "imported")
    desk.drain()


# Abort, at any moment.


@pytest.mark.parametrize("moment", ["waiting", "planned", "mid-prompt", "decoding", "preempted"])
def test_abort_frees_everything(moment: str) -> None:
    desk = Desk(sizes(5, 2), chunk=8)
    keep = desk.add(8, new=25)
    if moment == "waiting":
        desk.add(8, new=9)
    victim = desk.add(20, new=9)
    other = desk.add(8, new=3)
    planned = None
    if moment == "planned":
        planned = desk.plan()
    elif moment == "mid-prompt":
        desk.step()
        assert 0 < victim.computed < 20
    elif moment != "waiting":
        while not (victim.output if moment == "decoding" else victim.preemptions):
            desk.step()
    desk.scheduler.abort(victim)
    desk.scheduler.audit()
    if planned is not None:
        assert victim.id in {w.id for w in planned.work}
        events = desk.commit(planned)  # its result comes too late
        assert victim.id not in {e.request.id for e in events}
    assert (victim.status, victim.finish, victim.held) == (Status.DONE, "abort", None)
    before = list(victim.tokens)
    desk.scheduler.abort(victim)  # a second time: nothing
    desk.drain()
    assert victim.tokens == before
    assert keep.output == [8 + i for i in range(25)]
    assert other.output == [8, 9, 10]


def test_aborted_requests_leave_no_trace_in_the_queue() -> None:
    """Clients that come and give up behind a request that waits long: memory does not grow."""
    desk = Desk(sizes(12, 1), chunk=8)
    desk.add(8, new=80)
    desk.step()
    desk.add(8)
    for _ in range(2000):
        desk.scheduler.abort(desk.add(8))
    assert len(desk.scheduler.waiting) == 1
    assert len(desk.scheduler.waiting._heap) < 100
    desk.drain()
    assert desk.ended == [0, 1]


# A plan is a value.


def play(**more) -> Desk:
    """The same fixed history: arrivals, preemptions, an abort, a displacement."""
    desk = Desk(sizes(7, 3), chunk=8, cache=True, **more)
    made = [desk.add(list(range(n)), new=12) for n in (9, 20, 13)]
    for i in range(60):
        if i == 9:
            desk.scheduler.abort(made[1])
        if i == 12:
            desk.add(list(range(17)), new=7, priority=-1)
        if desk.idle:
            break
        desk.step()
    return desk


def test_equal_histories_give_equal_plans_that_never_change() -> None:
    """No clock and no address in them; what comes later does not reach back into a plan."""
    first = Desk(sizes(9, 3), chunk=8)
    first.add(20)
    plan = first.plan()
    kept, told = facts(plan), repr(plan)
    first.commit(plan)
    first.drain()
    assert facts(plan) == kept
    assert repr(plan) == told
    assert "tokens=(7, 7, 7, 7, 7, 7, 7, 7)" in told
    a, b = play(), play()
    assert len(a.plans) > 15
    assert [facts(p) for p in a.plans] == [facts(p) for p in b.plans]
    assert a.scheduler.preemptions > 0


def test_a_plan_can_be_answered_twice() -> None:
    """A step that is repeated with the same plan gives the same answers, and commits once."""
    desk = Desk(sizes(9, 3), chunk=8)
    desk.add(5, new=3)
    plan = desk.plan()
    assert answers(plan) == answers(plan)
    desk.commit(plan)
    desk.drain()
    assert desk.ended == [0]
