"""After a step that failed: its requests start over alone, within the budget, and always move."""

from runtime.drafts import Drafts
from tests.desk import Desk, sizes


def test_a_trial_keeps_the_budget() -> None:
    """A chunk is cut to the budget; drafts wait for the next step where they have no room."""
    drafts = Drafts(depth=3, adaptive=False)
    for desk in (
        Desk(sizes(9, 2), chunk=16, budget=3),
        Desk(sizes(9, 1, drafts=3), chunk=16, budget=7, drafts=drafts),
    ):
        request = desk.add(6, new=9)
        while len(request.output) < 2:
            desk.step()
        assert desk.scheduler.restart(desk.plan()) == []
        assert request.computed == 0
        before = len(desk.plans)
        desk.drain()  # every plan is checked against the budget
        assert desk.plans[before].tokens >= 3
        assert request.output == [8 + i for i in range(9)]


def test_a_trial_without_pages_makes_way() -> None:
    """It shared a prefix before the failure, and must compute it again into pages of its own.

    The others hold too many for that. It goes back to the queue; nobody stands still for it.
    """
    desk = Desk(sizes(10, 3), chunk=4, budget=3, cache=True)
    shared = list(range(32))
    desk.add([*shared, 99], new=1)
    desk.drain()
    less = desk.add(shared + list(range(60, 68)), new=20, priority=1)
    while len(less.tokens) < 46:
        desk.step()
    first = desk.add([110] * 16, new=3)
    untouched = desk.add(shared + list(range(70, 78)), new=3)
    while len(less.tokens) < 50:
        desk.step()
    plan = desk.plan()
    assert {w.id for w in plan.work} == {first.id, less.id}
    assert untouched.computed == 32
    desk.scheduler.restart(plan)
    desk.drain()
    assert less.preemptions == 1
    assert [r.finish for r in (less, first, untouched)] == ["length"] * 3
    assert less.output == [68 + i for i in range(20)]


def test_who_fails_alone_twice_is_told() -> None:
    desk = Desk(sizes(20, 3), chunk=16)
    made = [desk.add(5, new=3) for _ in range(3)]
    assert desk.scheduler.restart(desk.plan()) == []
    for request in made:
        alone = desk.plan()
        assert [w.id for w in alone.work] == [request.id]
        if request is made[1]:
            assert desk.scheduler.restart(alone) == [request]
            event = desk.scheduler.fail(request, RuntimeError("the cause"))
            assert (event.finish, event.request) == ("error", request)
        else:
            desk.commit(alone)
    desk.drain()
    assert [r.finish for r in made] == ["length", "error", "length"]
