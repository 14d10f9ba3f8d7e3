"""Admission over data-parallel ranks: the seed's rule by hand, and the bounds of ours.

Cases of the log of reports: K13 (a rank that skips the gather hangs the others).
"""

import dataclasses
import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.balance_dp import (
    CLOSED,
    COSTS,
    FROZEN,
    INT32_MAX,
    OPEN,
    Align,
    Ask,
    Costs,
    Decision,
    RankState,
    align,
    always,
    freeze,
    frozen_when_full,
    least_work,
    routed,
    shortest_queue,
)

IDLE = RankState(limit=4)
DECODES = RankState(limit=4, running=2, decoding=2)
READY = RankState(limit=4, running=2, decoding=1, ready=1)
FULL = RankState(limit=4, running=4, decoding=4)
ASK = Ask(prompt_tokens=100, expected_tokens=10)

COUNTS = st.integers(0, 6)
STATES = st.builds(
    RankState,
    running=COUNTS,
    limit=st.integers(1, 6),
    waiting=COUNTS,
    decoding=COUNTS,
    prompt_tokens=st.integers(0, 9000),
    decode_tokens=st.integers(0, 9000),
    ready=st.integers(0, 1),
    held_ms=st.integers(0, 1500),
    free_pages=st.integers(-3, 3),
)
RANKS = st.lists(STATES, min_size=1, max_size=6)
GATES = (always, frozen_when_full, align)


# The seed's rule.


@pytest.mark.parametrize(
    ("running", "limit", "frozen"),
    [
        ([0, 0], 4, False),
        ([3, 3, 3], 4, False),
        ([0, 4, 0], 4, True),  # one full rank stops idle ones
        ([4, 4], 4, True),
        ([5, 0], 4, True),
        ([1], 1, True),
        ([0], 1, False),
    ],
)
def test_one_full_rank_freezes_all(running: list[int], limit: int, frozen: bool) -> None:
    assert freeze(running, limit) is frozen


def test_frozen_ranks_go_on_with_prompts_they_admitted() -> None:
    assert frozen_when_full([IDLE, FULL]) == FROZEN
    assert (FROZEN.admit, FROZEN.prefill) == (False, True)
    assert frozen_when_full([IDLE, DECODES]) == OPEN
    assert always([FULL, FULL]) == OPEN


@given(RANKS)
def test_limits_may_differ(states: list[RankState]) -> None:
    expected = any(s.running >= s.limit for s in states)
    assert (frozen_when_full(states) == FROZEN) is expected


# Ours: when.


@pytest.mark.parametrize(
    ("states", "decision"),
    [
        ([DECODES] * 5, CLOSED),
        ([READY] * 2 + [DECODES] * 3, CLOSED),  # 40 % of the ranks
        ([READY] * 3 + [DECODES] * 2, OPEN),  # 60 %
        ([READY] * 3 + [DECODES, FULL], CLOSED),  # a full rank: 80 % are asked for
        ([READY] * 4 + [FULL], OPEN),
        ([IDLE] * 4, OPEN),  # nobody decodes: nobody is held up
        ([dataclasses.replace(READY, decoding=0)] + [IDLE] * 4, OPEN),
    ],
)
def test_prompts_wait_until_most_ranks_have_some(
    states: list[RankState], decision: Decision
) -> None:
    assert align(states) == decision


@pytest.mark.parametrize(("others", "hold"), [(DECODES, 50), (FULL, 1000)])
def test_the_oldest_overrides(others: RankState, hold: int) -> None:
    def after(held_ms: int) -> Decision:
        return align([dataclasses.replace(READY, held_ms=held_ms), *[others] * 7])

    assert (after(hold - 1), after(hold)) == (CLOSED, OPEN)


@given(RANKS, st.integers(0, 200), st.integers(0, 2000))
def test_nobody_is_ready_for_longer_than_the_bound(
    states: list[RankState], hold: int, full_hold: int
) -> None:
    rule = Align(hold_ms=hold, full_hold_ms=full_hold)
    if any(s.ready and s.held_ms >= max(hold, full_hold) for s in states):
        assert align(states, rule) == OPEN


@given(RANKS)
def test_no_hold_is_no_gate_for_who_is_ready(states: list[RankState]) -> None:
    rule = Align(hold_ms=0, full_hold_ms=0)
    assert align(states, rule) == OPEN or not any(s.ready for s in states)


@given(RANKS, st.randoms())
def test_a_gate_does_not_know_ranks_apart(states: list[RankState], rng: random.Random) -> None:
    shuffled = rng.sample(states, len(states))
    for gate in GATES:
        assert gate(states) == gate(states) == gate(shuffled)


@given(RANKS)
def test_what_is_gathered_decides(states: list[RankState]) -> None:
    received = [RankState.of(s.vector()) for s in states]
    assert received == states
    assert [gate(received) for gate in GATES] == [gate(states) for gate in GATES]


def test_vectors_fit_int32() -> None:
    state = RankState(limit=4, prompt_tokens=2**40, free_pages=-(2**40))
    assert max(map(abs, state.vector())) == INT32_MAX
    assert RankState.of(state.vector()).prompt_tokens == INT32_MAX


# Ours: where.


def test_work_is_counted_not_requests() -> None:
    one_long = RankState(limit=4, running=1, prompt_tokens=8000)
    two_short = RankState(limit=4, running=2, prompt_tokens=200)
    assert shortest_queue([one_long, two_short], ASK, [0, 0]) == 0
    assert least_work([one_long, two_short], ASK, [0, 0]) == 1


def test_work_by_hand() -> None:
    costs = Costs(prefill_ns=3, decode_ns=2)
    assert costs.outstanding(RankState(limit=4, prompt_tokens=10, decode_tokens=7)) == 44
    # With the request and 60 of its 100 tokens cached: 44 + 3 * 40 = 164, against 45 + 300.
    states = [
        RankState(limit=4, prompt_tokens=15),
        RankState(limit=4, prompt_tokens=10, decode_tokens=7),
    ]
    assert least_work(states, ASK, [0, 60], costs) == 1
    # 45 + 3 * 60 = 225 against 44 + 3 * 60 = 224; then 45 + 3 * 59 = 222.
    assert least_work(states, ASK, [40, 40], costs) == 1
    assert least_work(states, ASK, [41, 40], costs) == 0


def test_ranks_with_pages_come_first() -> None:
    busy = RankState(limit=4, prompt_tokens=5000, free_pages=2)
    cramped = RankState(limit=4, free_pages=1)
    ask = dataclasses.replace(ASK, pages=2)
    assert least_work([cramped, busy], ask, [0, 0]) == 1
    assert least_work([cramped, cramped], ask, [0, 0]) == 0  # it will have to wait somewhere


def test_equal_ranks_take_turns_as_requests_are_sent() -> None:
    states = [IDLE] * 3
    taken = []
    for _ in range(6):
        to = least_work(states, ASK, [0, 0, 0])
        states = [routed(s, ASK, 0) if r == to else s for r, s in enumerate(states)]
        taken.append(to)
    assert taken == [0, 1, 2, 0, 1, 2]


def test_what_was_sent_is_seen() -> None:
    ask = Ask(prompt_tokens=100, expected_tokens=10, pages=3)
    state = routed(RankState(limit=4, prompt_tokens=5, free_pages=2), ask, 64)
    assert (state.waiting, state.prompt_tokens, state.decode_tokens) == (1, 41, 10)
    assert state.free_pages == -1


@given(RANKS, st.randoms())
def test_the_order_of_ranks_decides_ties_only(states: list[RankState], rng: random.Random) -> None:
    order = rng.sample(range(len(states)), len(states))
    hits = [17 * r % 100 for r in range(len(states))]
    ask = dataclasses.replace(ASK, pages=1)

    def work(r: int) -> tuple[bool, int]:
        rest = COSTS.prefill_ns * (ask.prompt_tokens - hits[r])
        return states[r].free_pages < 1, COSTS.outstanding(states[r]) + rest

    here = least_work(states, ask, hits)
    there = order[least_work([states[r] for r in order], ask, [hits[r] for r in order])]
    assert work(here) == work(there) == min(map(work, order))


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=60), st.integers(1, 8))
def test_ranks_differ_by_one_request_at_most(prompts: list[int], count: int) -> None:
    states = [IDLE] * count
    for prompt in prompts:
        ask = Ask(prompt_tokens=prompt, expected_tokens=20)
        to = least_work(states, ask, [0] * count)
        states[to] = routed(states[to], ask, 0)
    work = [COSTS.outstanding(s) for s in states]
    largest = COSTS.prefill_ns * max(prompts) + COSTS.decode_ns * 20
    assert max(work) - min(work) <= largest


# Refusals.


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        freeze([1], 0)
    with pytest.raises(ValueError, match=r"\[1, -1\]"):
        freeze([1, -1], 4)
    with pytest.raises(ValueError, match="limit of a rank is 0"):
        RankState(limit=0)
    with pytest.raises(ValueError, match="waiting of a rank is -1"):
        RankState(limit=4, waiting=-1)
    with pytest.raises(ValueError, match="8 entries; it must have 9"):
        RankState.of(IDLE.vector()[:-1])
    with pytest.raises(ValueError, match="share_percent is 101"):
        Align(share_percent=101)
    with pytest.raises(ValueError, match=r"hold_ms is 0\.5"):
        Align(hold_ms=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="decode_ns is -1"):
        Costs(decode_ns=-1)
    with pytest.raises(ValueError, match="pages of a request is -1"):
        Ask(prompt_tokens=1, expected_tokens=1, pages=-1)
    for hits in ([0], [0, 101], [-1, 0]):
        with pytest.raises(ValueError, match="one entry for each of 2 ranks"):
            least_work([IDLE, IDLE], ASK, hits)


def test_no_ranks_are_refused() -> None:
    for gate in GATES:
        with pytest.raises(ValueError, match="0 ranks"):
            gate([])
    for route in (shortest_queue, least_work):
        with pytest.raises(ValueError, match="0 ranks"):
            route([], ASK, [])


# K13: nothing here gathers, so a caller can do it in every step, idle ones included.


@pytest.mark.parametrize("gate", GATES)
def test_k13_ranks_with_random_idle_steps_agree_and_finish(
    gate: Callable[[list[RankState]], Decision],
) -> None:
    ranks, steps = 2, 300
    barrier = threading.Barrier(ranks, timeout=5)
    rows: list[list[tuple[int, ...]]] = [[()] * ranks for _ in range(steps)]
    decided: list[list[Decision]] = [[] for _ in range(ranks)]

    def serve(rank: int) -> None:
        rng = random.Random(rank)
        for step in range(steps):
            idle = rng.random() < 0.5
            running = rng.randint(1, 4)
            state = RankState(limit=4, running=running, decoding=1, ready=rng.randint(0, 1))
            rows[step][rank] = (IDLE if idle else state).vector()
            barrier.wait()  # the gather: idle or not
            decided[rank].append(gate([RankState.of(row) for row in rows[step]]))

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert [len(d) for d in decided] == [steps] * ranks
    assert decided[0] == decided[1]
