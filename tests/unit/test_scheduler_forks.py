"""A fork shares its parent's state at once, or waits its turn like any other request."""

import dataclasses

import pytest

from runtime.request import Request, Status
from tests.desk import Desk, sizes


def test_a_fork_without_a_slot_waits_its_turn() -> None:
    desk = Desk(sizes(20, 2), chunk=16, cache=True)
    parent, other = desk.add(20, new=9), desk.add(8, new=4)
    desk.step()
    child = parent.follow(None, dataclasses.replace(parent.limits, max_new_tokens=3))
    assert desk.scheduler.fork(parent, child, None) is None
    assert child.status is Status.WAITING
    desk.scheduler.audit()
    desk.drain()
    assert other.output == [8, 9, 10, 11]
    assert child.prompt == tuple(parent.tokens[: len(child.prompt)])
    assert child.output == parent.tokens[len(child.prompt) : len(child.prompt) + 3]
    assert child.report is not None
    assert (child.report.hit, child.report.reason) == (16, "full")


def test_a_fork_with_room_runs_in_the_next_step() -> None:
    desk = Desk(sizes(20, 3), chunk=32)
    parent = desk.add(20, new=9)
    desk.step()
    child = parent.follow(None, None)
    copies = desk.scheduler.fork(parent, child, None)
    assert copies is not None
    assert (len(copies.history), len(copies.window), len(copies.slots)) == (1, 1, 1)
    assert (child.computed, parent.computed) == (20, 20)
    assert [(w.id, w.rows) for w in desk.step().work] == [(0, 1), (1, 1)]
    desk.drain()
    assert child.output == [9 + i for i in range(9)]


def test_a_fork_does_not_overtake_who_waits() -> None:
    """Room that a more urgent request waits for is not given to a fork."""
    desk = Desk(sizes(8, 3), chunk=16)
    parent = desk.add(20, new=9)
    desk.step()
    desk.add(50, new=2)
    desk.step()
    child = parent.follow(None, None)
    assert desk.scheduler.fork(parent, child, None) is None
    desk.drain()
    assert desk.ended == [0, 1, 2]


def test_a_request_of_another_scheduler_cannot_be_forked_or_aborted() -> None:
    desk, other = Desk(sizes(9, 2)), Desk(sizes(9, 2))
    mine = desk.add(5)
    foreign = Request(prompt=mine.tokens)
    for call in (
        lambda: other.scheduler.abort(mine),
        lambda: other.scheduler.fork(mine, foreign, None),
    ):
        with pytest.raises(ValueError, match="not one of this engine's"):
            call()
    other.all_free()
