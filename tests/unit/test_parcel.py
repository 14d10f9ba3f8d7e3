"""State that leaves a cache: what is refused, before anything is taken, and what it weighs."""

import dataclasses

import pytest
import torch

from dsv4.config import Config
from dsv4.state import PoolSizes
from dsv4.tree import paths
from runtime.cache import Cache
from runtime.pages import Held
from tests import tiny

CFG = tiny.short("wchc", 1, window=8)
TOKENS = list(range(100, 121))  # 21: two full pages of 8 and an open one


def cache_of(
    cfg: Config = CFG,
    *,
    dtype: torch.dtype = torch.float64,
    page: int = 8,
    history: int = 9,
    window: int = 9,
    slots: int = 4,
    drafts: int = 0,
) -> Cache:
    """A cache whose rows are all different numbers, so that a row from elsewhere is seen."""
    sizes = PoolSizes(
        history_pages=history, window_pages=window, slots=slots, page_tokens=page, drafts=drafts
    )
    cache = Cache(cfg, sizes, most=24, dtype=dtype)
    for pool in paths(cache.pools).values():
        pool.copy_(torch.arange(pool.numel(), dtype=dtype).view_as(pool))
    return cache


def filled(cache: Cache, length: int = 21) -> Held:
    """A sequence of this length, after a page that it no longer needs."""
    held = cache.open()
    assert held is not None
    while held.length < length:
        count = min(8, length - held.length)
        assert cache.append(held, count)
        cache.commit(held, count)
    return held


def taken(cache: Cache) -> tuple[int, ...]:
    pages = cache.pages
    return tuple(p.owned for p in (pages.history, pages.window, pages.slots))


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float32},
        {"page": 16},
        {"cfg": dataclasses.replace(CFG, index_topk=5)},
        {"cfg": dataclasses.replace(CFG, mtp=0)},
    ],
    ids=["dtype", "page", "config", "drafts"],
)
def test_b10_another_layout_is_refused_before_a_page_is_taken(other: dict) -> None:
    """Rows of another dtype or page size would fit in part, and be read as if they were ours."""
    here, there = cache_of(), cache_of(**other)
    state = here.export(filled(here), TOKENS)
    with pytest.raises(ValueError, match="weights, dtype, page size, and whether"):
        there.import_(state, [*TOKENS, 1])
    assert taken(there) == (0, 0, 0)
    there.pages.audit([])


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (TOKENS, "it must have at least 1, and fewer than the prompt"),  # nothing left to compute
        (TOKENS[:9], "the state is of 21 tokens and the prompt has 9"),
        ([*TOKENS[:20], 7, 7], "other tokens than the first 21 of the prompt"),
        ([7, *TOKENS[1:], 7], "other tokens than the first 21 of the prompt"),
    ],
    ids=["full", "shorter", "last", "first"],
)
def test_other_prompts_are_refused_before_a_page_is_taken(prompt: list[int], match: str) -> None:
    here, there = cache_of(), cache_of()
    state = here.export(filled(here), TOKENS)
    with pytest.raises(ValueError, match=match):
        there.import_(state, prompt)
    assert taken(there) == (0, 0, 0)


def test_the_state_of_no_tokens_is_refused() -> None:
    cache = cache_of()
    held = cache.open()
    assert held is not None
    with pytest.raises(ValueError, match="the state is of 0 tokens"):
        cache.import_(cache.export(held, []), [1, 2])
    assert taken(cache) == (0, 0, 1)


def test_a_window_of_one_token_has_no_page_at_a_page_end() -> None:
    """Then nothing of the window travels, and that is no error."""
    cfg = tiny.short("hw", 1, window=1, mtp=0)
    here, there = cache_of(cfg), cache_of(cfg)
    held = filled(here, 16)
    assert held.window == []
    got = there.import_(here.export(held, TOKENS), TOKENS)
    assert got is not None
    assert (len(got.history), got.window, got.window_start) == (2, [], 2)
    there.pages.audit([got])


@pytest.mark.parametrize("length", range(9, 33))
def test_a_state_that_arrived_leaves_again_or_is_refused(length: int) -> None:
    """With drafts an import goes back one token, and its next import would go back one more.

    At a page end the window page for that did not come along: unseen, the next engine's step fails.
    """
    here, there, third = cache_of(), cache_of(), cache_of()
    tokens = list(range(40))
    got = there.import_(here.export(filled(here, length), tokens), tokens)
    assert got is not None
    there.pages.step_back(got)
    there.pages.audit([got])
    if length % 8:
        again = third.import_(there.export(got, tokens), tokens)
        assert again is not None
        assert again.length == length - 1
    else:
        with pytest.raises(ValueError, match="has not run here yet: step, then export"):
            there.export(got, tokens)
        assert there.append(got, 1)
        there.commit(got, 1)
        assert third.import_(there.export(got, tokens), tokens) is not None


@pytest.mark.parametrize("short", ["history", "window", "slots"])
def test_without_room_nothing_is_taken(short: str) -> None:
    """The slot is opened first: it must be given back where pages are short."""
    here = cache_of()
    state = here.export(filled(here), TOKENS)
    there = cache_of(**{short: 2})
    held = filled(there, 3) if short == "slots" else None
    before = taken(there)
    assert there.import_(state, [*TOKENS, 1]) is None
    assert taken(there) == before
    there.pages.audit([held] if held else [])


def test_rows_go_to_their_places_and_to_no_other() -> None:
    """Positions, not places, say which row is which: rings of 8 and of 13 rows, other pages."""
    here, there = cache_of(), cache_of(drafts=5, history=12, slots=6)
    held = filled(here)
    filled(there, 12)  # so that pages and slots differ
    before = {name: pool.clone() for name, pool in paths(there.pools).items()}
    got = there.import_(here.export(held, TOKENS), [*TOKENS, 1])
    assert got is not None
    assert got.history != held.history
    assert got.slot != held.slot
    pools, mine = paths(there.pools), paths(here.pools)
    for t in range(21 - 7, 21):  # the window of the next token, and the open groups
        page, at = divmod(t, 8)
        to = got.window[page - got.window_start] * 8 + at
        source = held.window[page - held.window_start] * 8 + at
        assert torch.equal(pools["layers.0.window"][to], mine["layers.0.window"][source])
        ring, other = "layers.1.compressed.ring", got.slot * 13 + t % 13
        assert torch.equal(pools[ring][other], mine[ring][held.slot * 8 + t % 8])
    for j in range(21 // 4):
        page, at = divmod(j, 2)
        name = "layers.1.compressed.rows"
        to = got.history[page] * 2 + at
        assert torch.equal(pools[name][to], mine[name][held.history[page] * 2 + at])
    # 5 entries of 4 tokens: the 6th is not closed, and its row stays what it was.
    changed = (pools[name] != before[name]).any(-1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(got.history[j // 2] * 2 + j % 2 for j in range(5))


def test_bytes_of_a_sequence_and_of_a_parcel() -> None:
    """By hand: 3 history pages and 2 window pages of 8 tokens, rings of 8, float64.

    Head width 80, indexer width 32; layers w, c, h, c and the draft module; rates 4 and 8.
    """
    cache = cache_of()
    held = filled(cache)
    assert (len(held.history), len(held.window)) == (3, 2)
    eight = 8
    by_kind = {
        "window": 5 * 2 * 8 * 80 * eight,
        "compressed": 3 * (2 * 2 * 80 + 1 * 80) * eight,
        "index keys": 3 * 2 * 2 * 32 * eight,
        "overlap": 2 * 2 * 4 * 2 * (80 + 32) * eight,
        "open inputs": (2 * 8 * 4 * (80 + 32) + 8 * 2 * 80) * eight,
        "draft streams": 2 * 4 * 64 * eight,
    }
    assert cache.bytes(held) == by_kind
    state = cache.export(held, TOKENS)
    # Of entries 5 of 4 tokens and 2 of 8 are closed, of 6 and 3 that there is room for.
    rows = (2 * 5 * (80 + 32) + 2 * 80) * eight
    same = ("window", "overlap", "open inputs", "draft streams")
    assert state.bytes == rows + sum(by_kind[kind] for kind in same)


def test_a_fork_copies_the_open_page_and_the_slot() -> None:
    """No other row of any pool is written."""
    cache = cache_of()
    held = filled(cache)
    before = {name: pool.clone() for name, pool in paths(cache.pools).items()}
    new = cache.fork(held)
    assert new is not None
    source = {"history": held.history[2], "window": held.window[-1], "slots": held.slot}
    target = {"history": new.history[2], "window": new.window[-1], "slots": new.slot}
    for name, pool in paths(cache.pools).items():
        leaf = paths(cache._spec)[name]
        want = before[name]
        to, from_ = target[leaf.group] * leaf.unit, source[leaf.group] * leaf.unit
        want[to : to + leaf.unit] = want[from_ : from_ + leaf.unit].clone()
        assert torch.equal(pool, want), name
