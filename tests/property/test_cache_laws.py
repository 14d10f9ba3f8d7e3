"""The laws of `runtime.cache`, one by one, at every place where they could break.

The machine in `test_cache_algebra.py` mixes them; here each is swept over page and group ends.
"""

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tests.property.lives import KINDS, Lives, ids, same, settings
from tests.property.world import BOUND, Setting


def setting(kinds: str = "wchc", *, window: int = 3, page: int = 8, **changes: int) -> Setting:
    """A window shorter than a CSA group; pages of two groups of 4 and one of 8."""
    cfg = tiny.short(kinds, 1, window=window, **changes)
    return Setting(cfg=cfg, page_tokens=page, block=4, seed=3)


def committed(kinds: str, length: int, count: int) -> None:
    """From one state, a child per k has n drafts verified of which k hold."""
    given_ = setting(kinds)
    tokens, wrong = ids(given_, length + 12, 0), ids(given_, count, 1)
    lives = Lives(given_, drafts=count)
    start = lives.grown(tokens[:length])
    for k in range(count + 1):
        life = lives.fork(start)
        assert life is not None
        assert lives.advance(life, tokens[length : length + k] + wrong[k:], keep=k)
        assert (life.held.length, life.held.written) == (length + k, length + k)
        assert lives.advance(life, tokens[length + k :])
        lives.audit()
        lives.release(life)
    lives.end()


@pytest.mark.parametrize("length", [3, 7, 8, 13])
def test_commit_k_of_n_drafts_is_the_serial_path(length: int) -> None:
    """Spec 10.4: for every k, the rows of the rejected drafts leave no trace in any ring.

    A ring of c * r rows without slack loses inputs of the open group: c * r + q are needed (6.4).
    """
    committed("wchc", length, 5)


@pytest.mark.long
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_commit_k_of_n_drafts_everywhere(kinds: str, count: int) -> None:
    """Every layer mix, every length over two pages, every k."""
    for length in range(1, 18):
        committed(kinds, length, count)


@pytest.mark.parametrize("kinds", ["c", "h"])
def test_without_slack_a_rejected_draft_is_seen(kinds: str) -> None:
    """The guard of the test above: with rings of c * r rows the same comparison must fail."""
    given_ = setting(kinds, window=8, page=8, mtp=0)
    tokens, wrong = ids(given_, 24, 0), ids(given_, 5, 1)
    errors = []
    for length in range(8, 16):
        lives = Lives(given_, drafts=0)
        life = lives.grown(tokens[:length])
        assert lives.cache.append(life.held, len(wrong))
        assert lives.run(life, wrong) <= BOUND
        lives.cache.rollback(life.held, len(wrong))
        assert lives.cache.append(life.held, 24 - length)
        errors.append(lives.run(life, tokens[length:]))
    assert max(errors) > 1e-3


PLACES = [*(("wchc", n) for n in (1, 4, 7, 8, 9)), *((kinds, 13) for kinds in KINDS)]
EVERYWHERE = [(kinds, n) for kinds in KINDS for n in range(1, 26)]


@pytest.mark.parametrize(("kinds", "length"), PLACES)
def test_fork_then_diverge_is_two_cold_runs(kinds: str, length: int) -> None:
    """The open page, its header and the ring are the child's own; full pages stay the parent's."""
    forked(kinds, length)


@pytest.mark.long
@pytest.mark.parametrize(("kinds", "length"), EVERYWHERE)
def test_fork_everywhere(kinds: str, length: int) -> None:
    """As above, at every length."""
    forked(kinds, length)


def forked(kinds: str, length: int) -> None:
    """A child, then both on in turns, so that one would write over the other's rows."""
    given_ = setting(kinds)
    lives = Lives(given_, drafts=2)
    parent = lives.grown(ids(given_, length, 0))
    child = lives.fork(parent)
    assert child is not None
    assert same(lives.export(parent), lives.export(child))
    for seed in (1, 2):
        assert lives.advance(parent, ids(given_, 5, seed), keep=4)
        assert lives.advance(child, ids(given_, 6, seed + 10), keep=5)
        lives.audit()
    lives.release(parent)
    assert lives.advance(child, ids(given_, 7, 20))
    lives.end()


@pytest.mark.parametrize(("kinds", "length"), PLACES)
def test_export_and_import_is_the_same_sequence(kinds: str, length: int) -> None:
    """Into other pages and rings of another size, twice, and back: not one bit differs."""
    moved(kinds, length)


@pytest.mark.long
@pytest.mark.parametrize(("kinds", "length"), EVERYWHERE)
def test_export_and_import_everywhere(kinds: str, length: int) -> None:
    """As above, at every length."""
    moved(kinds, length)


def moved(kinds: str, length: int) -> None:
    """From here to there, from there to there, and back; then all four go on."""
    given_ = setting(kinds)
    tokens = ids(given_, length + 9, 0)
    here, there = Lives(given_, drafts=0), Lives(given_, drafts=5, history=11, window=9, slots=3)
    life = here.grown(tokens[:length])
    state = here.export(life)
    first = there.receive(state, tokens)
    second = there.receive(there.export(first), tokens) if first else None
    assert first is not None
    assert second is not None
    back = here.receive(there.export(second), tokens)
    assert back is not None
    assert same(here.export(back), state)
    assert same(there.export(second), state)
    for lives, one in ((here, back), (there, second), (there, first), (here, life)):
        assert lives.advance(one, tokens[length:])
        lives.audit()
    here.end()
    there.end()


def test_an_import_outlives_what_it_came_from() -> None:
    """A parcel is a copy: nothing of it is a view of a pool that steps write in place."""
    given_ = setting()
    tokens = ids(given_, 30, 0)
    lives = Lives(given_)
    life = lives.grown(tokens[:13])
    state = lives.export(life)
    lives.release(life)
    lives.prefix.forget()
    lives.grown(ids(given_, 40, 9))
    got = lives.receive(state, tokens)
    assert got is not None
    assert lives.advance(got, tokens[13:25])


@hypothesis.settings(max_examples=8)
@given(
    given_=settings(), length=st.integers(1, 24), count=st.integers(1, 6), seed=st.integers(0, 9)
)
def test_append_and_rollback_is_nothing(
    given_: Setting, length: int, count: int, seed: int
) -> None:
    """Not a bit of an entry or of an open group has changed, and what follows is right."""
    lives = Lives(given_, drafts=6)
    life = lives.grown(ids(given_, length, seed))
    before = lives.export(life).rows
    assert lives.cache.append(life.held, count)
    assert lives.run(life, ids(given_, count, seed + 50)) <= BOUND
    lives.cache.rollback(life.held, count)
    after = lives.export(life).rows
    for name, rows in before.items():
        if name.endswith(("rows", "ring")):  # pages of the window hold rows of no token yet
            assert torch.equal(after[name], rows), name
    assert lives.advance(life, ids(given_, 5, seed + 90))
    lives.end()


def test_a1_a3_one_token_at_a_time() -> None:
    """A1: right from the first token on, at every length. A3: decoding equals computing it anew."""
    lives = Lives(setting("wchc", window=5))
    lives.grown(ids(lives.setting, 40, 0), 1)
    lives.end()


@pytest.mark.long
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_a1_a3_everywhere(kinds: str, window: int) -> None:
    """As above, for every mix of layers and windows of one token and more."""
    lives = Lives(setting(kinds, window=window))
    lives.grown(ids(lives.setting, 60, 0), 1)
    lives.end()
