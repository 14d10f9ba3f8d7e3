"""Settings of drafting, when it stops for a request, and what an engine tells of it."""

import dataclasses
import logging
import random
import re

import pytest

from runtime.drafts import ENOUGH, RULES, Acceptance, DraftRecord, Drafts


def record(price: float = 0.25, **settings: int | bool) -> DraftRecord:
    return DraftRecord(drafts=Drafts(**settings), price=price)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("depth", 0, "depth is 0; it must be a whole number from 1 to 8"),
        ("depth", 9, "depth is 9; it must be a whole number from 1 to 8"),
        ("depth", 3.0, "depth is 3.0; it must be a whole number from 1 to 8"),
        ("depth", True, "depth is True; it must be a whole number from 1 to 8"),
        ("rule", "mtp", "rule is 'mtp'; it must be one of coupled, ratio"),
        ("rule", None, "rule is None; it must be one of coupled, ratio"),
        ("rule", "Coupled", "rule is 'Coupled'; it must be one of coupled, ratio"),
        ("floor", -0.1, "floor is -0.1; it must be a number from 0, at most 1"),
        ("floor", float("nan"), "floor is nan; it must be a number from 0, at most 1"),
        ("adaptive", 1, "adaptive is 1; it must be True or False"),
        ("window", 0, "window is 0; it must be a whole number of at least 1"),
        ("rest", 0, "rest is 0; it must be a whole number of at least 1"),
        ("longest_rest", 63, "longest_rest is 63; it must be a whole number of at least 64"),
        ("draft_cost", 1.5, "draft_cost is 1.5; it must be a number from 0, at most 1"),
        ("row_cost", "no", "row_cost is 'no'; it must be a number from 0, at most 1"),
    ],
)
def test_bad_settings_are_told_by_field_value_and_range(field: str, value, told: str) -> None:
    """C13: a wrong name of a method is answered with the right ones."""
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        Drafts(**{field: value})


def test_settings_are_frozen_values() -> None:
    assert Drafts() == Drafts(depth=3, rule="coupled", adaptive=True)
    assert [Drafts(rule=r, depth=8).rule for r in RULES] == ["coupled", "ratio"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Drafts().depth = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_the_price_of_a_draft() -> None:
    assert Drafts().price(39) == pytest.approx(2 / 40 + 0.05)
    assert Drafts(draft_cost=0.12, row_cost=0.25).price(43) == pytest.approx(0.37)
    assert Drafts(draft_cost=0.0, row_cost=0.0).price(1) == 0


@pytest.mark.parametrize(
    ("depth", "room", "want"),
    [
        (1, 9, 1),
        (3, 9, 3),
        (8, 9, 8),
        (8, 8, 7),
        (3, 4, 3),
        (3, 3, 2),
        (3, 2, 1),
        (3, 1, 0),
        (3, 0, 0),
    ],
)
def test_depth(depth: int, room: int, want: int) -> None:
    """No draft behind the last token that the request may take."""
    assert record(depth=depth).next_depth(room) == want


def steps(r: DraftRecord, accepted: list[int]) -> list[int]:
    """The depths that `r` asks for, given what becomes of the drafts it proposes."""
    asked = []
    for a in accepted:
        asked.append(r.next_depth(99))
        r.verified(asked[-1], min(a, asked[-1]))
    return asked


@pytest.mark.parametrize(("accepted", "stops"), [(23, True), (24, False)])
def test_drafting_stops_below_break_even(accepted: int, stops: bool) -> None:
    """32 steps of 3 drafts at 1/4 each: 1.75 plain steps a step, so 24 accepted pay exactly."""
    r = record(0.25)
    assert steps(r, [1] * accepted + [0] * (32 - accepted)) == [3] * 32
    assert r.next_depth(99) == (0 if stops else 3)
    assert (r.resting, r.pause) == ((64, 64) if stops else (0, 0))


def test_the_depth_that_was_used_is_what_costs() -> None:
    """Steps with fewer drafts are judged by what they cost, plain ones not at all."""
    for accepted, rests in ((7, 64), (8, 0)):
        r = record(0.25)
        for i in range(32):
            r.verified(0, 0)
            r.verified(1, int(i < accepted))
        assert r.resting == rests


def test_rests_double_up_to_a_limit_and_start_over_after_success() -> None:
    r = record(0.25, depth=2, window=4, rest=8, longest_rest=20)
    for pause in (8, 16, 20, 20):
        assert steps(r, [0] * 4) == [2] * 4
        assert r.pause == pause
        assert steps(r, [0] * pause) == [0] * pause
    assert steps(r, [2, 0, 0, 0]) == [2] * 4  # 2 of 8 at 1/4 pay
    assert (r.resting, r.pause) == (0, 0)
    assert steps(r, [1, 0, 0, 0]) == [2] * 4
    assert (r.resting, r.pause) == (8, 8)


def test_a_rest_is_counted_in_tokens() -> None:
    """Drafts that were already under way when it began bring several."""
    r = record(window=1, rest=8, longest_rest=8)
    r.verified(3, 0)
    r.verified(3, 2)
    assert r.resting == 5
    r.verified(3, 3)
    r.verified(3, 3)
    assert r.next_depth(99) == 3


def test_not_adaptive_never_stops() -> None:
    r = record(1.0, adaptive=False)
    assert steps(r, [0] * 500) == [3] * 500


def test_a_record_is_a_function_of_its_own_steps() -> None:
    rng = random.Random(0)
    outcomes = [rng.choice((0, 0, 0, 1, 3)) for _ in range(3000)]
    a, b, other = record(0.3), record(0.3), record(0.3)
    first = steps(a, outcomes)
    second = []
    for i in range(0, 3000, 7):  # among the steps of another request
        second += steps(b, outcomes[i : i + 7])
        steps(other, [rng.choice((0, 3)) for _ in range(5)])
    assert first == second
    assert {0, 3} == set(first)


@pytest.mark.parametrize(("proposed", "accepted"), [(1, 2), (0, 1), (3, -1), (-1, -1), (9, 1)])
def test_impossible_counts_are_refused(proposed: int, accepted: int) -> None:
    for taker in (record(), Acceptance(Drafts(), 0.1)):
        with pytest.raises(ValueError, match=f"{accepted} of {proposed} drafts were accepted"):
            taker.verified(proposed, accepted)


def test_more_drafts_than_the_engine_proposes_are_refused() -> None:
    with pytest.raises(ValueError, match="<= 2"):
        Acceptance(Drafts(depth=2), 0.1).verified(3, 1)


def test_shares_by_position() -> None:
    """C8, C7: the rates of a published run; steps with fewer drafts count for what they had."""
    found = Acceptance(Drafts(depth=3), 0.1)
    for accepted, times in ((0, 20), (1, 343), (2, 485), (3, 152)):
        for _ in range(times):
            found.verified(3, accepted)
    assert found.shares == (0.98, 0.637, 0.152)
    assert found.conditional == pytest.approx((0.98, 0.65, 152 / 637))
    assert found.mean_length == pytest.approx(2.769)
    for _ in range(1000):
        found.verified(1, 1)
        found.verified(0, 0)
    assert found.steps == 2000
    assert found.shares == (0.99, 0.637, 0.152)
    assert found.conditional == pytest.approx((0.99, 0.65, 152 / 637))
    assert found.mean_length == pytest.approx((2769 + 2000) / 2000)


@pytest.mark.parametrize(("price", "depth"), [(0.1, 3), (0.152, 3), (0.2, 2), (0.7, 1), (0.99, 0)])
def test_the_depth_that_pays(price: float, depth: int) -> None:
    found = Acceptance(Drafts(depth=3), price)
    assert found.paying_depth == 0
    for accepted, times in ((0, 20), (1, 343), (2, 485), (3, 152)):
        for _ in range(times):
            found.verified(3, accepted)
    assert found.paying_depth == depth


def test_the_table() -> None:
    """C8: per position, and what to do."""
    found = Acceptance(Drafts(depth=3), 0.2)
    for accepted, times in ((0, 20), (1, 343), (2, 485), (3, 152)):
        for _ in range(times):
            found.verified(3, accepted)
    assert found.table() == (
        "draft  proposed  accepted   share  if reached\n"
        "    1      1000       980   98.0%       98.0%\n"
        "    2      1000       637   63.7%       65.0%\n"
        "    3      1000       152   15.2%       23.9%\n"
        "2.77 tokens per step with drafts; a draft pays from a share of 20.0%: depth 2 does"
    )
    assert Acceptance(Drafts(), 0.1).table() == "no drafts were verified yet"


def test_drafts_that_are_never_right_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """C17: an accepted length of 1.06 must not be silent."""
    found = Acceptance(Drafts(depth=3), 0.1)
    with caplog.at_level(logging.WARNING, logger="runtime.drafts"):
        for i in range(ENOUGH - 1):
            found.verified(3, int(i % 16 == 0))
            found.verified(0, 0)
        assert not caplog.records
        for _ in range(5 * ENOUGH):
            found.verified(3, 0)
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert told.getMessage() == (
        "drafts are hardly ever accepted: 6.5% of the last 200 first drafts, and the floor is "
        "20.0%\n"
        "draft  proposed  accepted   share  if reached\n"
        "    1       200        13    6.5%        6.5%\n"
        "    2       200         0    0.0%        0.0%\n"
        "    3       200         0    0.0%        0.0%\n"
        "1.06 tokens per step with drafts; a draft pays from a share of 10.0%: none does\n"
        "The tokens are right, but decoding is not faster for it. Most likely the draft module's "
        "weights (mtp.*) belong to another checkpoint than the backbone's or were quantised "
        "differently, or its state is wrong. Compare them, or decode without drafts."
    )


@pytest.mark.parametrize(("accepted", "warns"), [(39, True), (40, False)])
def test_the_floor(accepted: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of 200 first drafts 20 % are enough; a good past does not hide a bad present (C17)."""
    found = Acceptance(Drafts(), 0.1)
    for _ in range(3 * ENOUGH):
        found.verified(2, 2)
    for i in range(ENOUGH):
        found.verified(3, int(i < accepted))
    assert len(caplog.records) == warns
    silent = Acceptance(Drafts(floor=0.0), 0.1)
    for _ in range(2 * ENOUGH):
        silent.verified(3, 0)
    assert len(caplog.records) == warns
