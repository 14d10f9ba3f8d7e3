"""Drafts in the plan: their rows, their pages, their share of the budget, and when they stop."""

import re

import pytest

from runtime.drafts import Drafts
from tests.desk import PAGE, Desk, sizes


def desk(depth: int = 3, history: int = 40, slots: int = 3, **more) -> Desk:
    settings = {"drafts": Drafts(depth=depth, adaptive=False)} | more
    return Desk(sizes(history, slots, drafts=depth), **settings)


def test_a_step_has_one_row_and_the_drafts() -> None:
    """The first step of a request proposes, the next ones verify: 1 + k rows, k + 1 tokens."""
    d = desk(3)
    request = d.add(5, new=20)
    (first,) = d.step().work
    assert (first.rows, first.wanted, first.propose, first.drafts) == (5, 1, 3, ())
    (second,) = d.step().work
    assert (second.start, second.tokens, second.drafts) == (5, (8,), (9, 10, 11))
    assert (second.rows, second.wanted, second.propose) == (4, 4, 3)
    assert request.output == [8, 9, 10, 11, 12]
    d.drain()
    assert request.output == [8 + i for i in range(20)]


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("new", [1, 2, 3, 7, 12])
def test_no_draft_is_made_that_could_not_count(depth: int, new: int) -> None:
    """Near the end fewer are proposed; rows never pass the request's room; max tokens is exact."""
    d = desk(depth)
    request = d.add(5, new=new)
    assert request.limits.max_new_tokens == new
    while not d.idle:
        left = new - len(request.output)
        for work in d.step().work:
            assert len(work.drafts) <= max(left - 1, 0)
            assert work.propose <= max(left - 2, 0)  # this step brings one at least
    assert request.output == [8 + i for i in range(new)]
    assert len(d.plans) == 1 + -(-(new - 1) // (depth + 1))


def test_a_proposal_is_cut_to_what_can_still_count() -> None:
    """It was made for more tokens than remain once its step's own drafts were accepted."""
    d = desk(3)
    request = d.add(5, new=7)
    d.step()  # 1 token, 6 to come
    (work,) = d.step().work  # 4 more, 2 to come: one draft is enough
    assert work.propose == 3
    assert request.proposal is not None
    assert request.proposal.tokens == (13,)
    (work,) = d.step().work
    assert (work.rows, work.propose) == (2, 0)
    assert d.idle


def test_reach_covers_rows_and_the_drafts_behind_them() -> None:
    """Pages are there for what a step verifies and for what it proposes, beyond page ends too."""
    d = desk(3)
    d.add(PAGE - 2, new=30)
    for i in range(4):
        (work,) = d.step().work
        assert work.reach == work.start + work.rows + work.propose
        assert d.plans[-1].history.shape[1] == -(-(work.start + work.rows) // PAGE), i
    d.drain()


def test_inside_a_prompt_one_position_ahead_has_its_page() -> None:
    """The module's row of the next prompt token lies there."""
    d = desk(2, chunk=PAGE)
    request = d.add(2 * PAGE + 3, new=2)
    (work,) = d.step().work
    assert (work.rows, work.following, work.reach) == (PAGE, 7, PAGE + 1)
    assert request.held is not None
    assert len(request.held.history) == 2
    d.drain()


def test_the_budget_counts_drafts() -> None:
    """Three that generate take 4 rows each; the prompt gets what is left, and all fits."""
    d = desk(3, slots=4, budget=18, chunk=8)
    for _ in range(3):
        d.add(1, new=40)
    d.step()
    d.add(30, new=2)
    assert [(w.id, w.rows) for w in d.step().work] == [(0, 4), (1, 4), (2, 4), (3, 6)]
    d.drain()


def test_a_budget_too_small_for_all_drafts_is_refused() -> None:
    told = "budget is 15 tokens per step; 4 requests with 3 drafts each may run at once, so it "
    with pytest.raises(ValueError, match=re.escape(told + "must be at least 16")):
        desk(3, slots=4, budget=15)


def test_a_resumed_request_keeps_its_drafts() -> None:
    """Tokens that were proposed before a preemption are verified after it, behind its last chunk,

    or in the next step where there is no room for them in this one.
    """
    d = desk(2, history=7, slots=2, chunk=8, budget=9)
    d.add(9, new=36)
    second = d.add(9, new=20)
    while not second.preemptions:
        d.step()
    kept = second.proposal
    assert kept is not None
    d.drain()
    verified = [w for p in d.plans for w in p.work if w.id == 1 and w.drafts]
    assert any(w.drafts == kept.tokens and w.start > 9 for w in verified)
    assert second.output == [8 + i for i in range(20)]


def test_wrong_drafts_cost_nothing_but_rows() -> None:
    d = desk(3, right=lambda _: False)
    request = d.add(5, new=9)
    d.drain()
    assert [len(w.drafts) for p in d.plans for w in p.work] == [0, 3, 3, 3, 3, 3, 2, 1, 0]
    assert request.output == [8 + i for i in range(9)]


def test_a_request_that_wants_no_drafts_gets_none() -> None:
    d = desk(3)
    d.add(5, new=6)
    d.add(5, new=6, drafting=False)
    d.drain()
    assert any(w.drafts for p in d.plans for w in p.work if w.id == 0)
    assert not any(w.drafts or w.propose for p in d.plans for w in p.work if w.id == 1)


def test_drafts_rest_while_they_do_not_pay_and_come_back() -> None:
    """After 4 verified steps without an accepted draft, 8 tokens without, and again from there."""
    drafts = Drafts(depth=2, window=4, rest=8, longest_rest=64)
    d = Desk(sizes(40, 1, drafts=2), drafts=drafts, right=lambda p: p > 36)
    request = d.add(5, new=80)
    d.drain()
    asked = [w.propose for p in d.plans for w in p.work]
    # The first step has nothing to verify. Four are judged; the next 8 tokens come one by one;
    # another four, and twice as long a rest; then drafts are right, and stay.
    assert asked[:5] == [2] * 5
    assert asked[5:13] == [0] * 8
    assert asked[13:18] == [2] * 5
    assert asked[18:34] == [0] * 16
    assert set(asked[34:-2]) == {2}
    assert request.output == [(8 + i) % d.cfg.vocab for i in range(80)]
