"""A prefix hit on real rows: what is restored is bit-equal to what was there, and is all of it.

The unit tests of `runtime.prefix` show which pages hit; here steps are computed on them.
"""

import pytest
import torch

from dsv4.tree import paths
from tests import tiny
from tests.property.lives import KINDS, Life, Lives, ids
from tests.property.world import BOUND, Setting

PAGE = 8


def setting(kinds: str = "wchc", **changes: int) -> Setting:
    """A window of one page, as in V4: one window page is all that a hit needs."""
    cfg = tiny.short(kinds, 1, **({"window": 8} | changes))
    return Setting(cfg=cfg, page_tokens=PAGE, block=4, seed=5)


def hit(lives: Lives, prompt: list[int]) -> Life:
    """The sequence that begins with what is cached of a prompt, which is something."""
    life = lives.restore(prompt)
    assert life.tokens
    assert life.tokens == prompt[: (len(prompt) - 1) // PAGE * PAGE]
    return life


@pytest.mark.parametrize("kinds", KINDS)
def test_b1_served_again_after_the_slot_was_used(kinds: str) -> None:
    """B1: serve P, end, fill its slot and all free pages with other tokens, serve P from the cache.

    A window or an overlap kept in the slot, not in pages, would be that of the other request.
    """
    lives = Lives(setting(kinds), slots=2, history=16, window=16)
    prompt = ids(lives.setting, 21, 0)
    lives.release(lives.grown(prompt))
    lives.release(lives.grown(ids(lives.setting, 30, 1)))
    life = hit(lives, prompt)
    assert lives.advance(life, [*prompt[16:], *ids(lives.setting, 6, 2)])
    lives.end()


@pytest.mark.parametrize("drafts", [0, 3])
def test_b9_restored_state_is_bit_equal_at_every_boundary(drafts: int) -> None:
    """B9: exact, not nearly: the state at each boundary is compared bit by bit with a cold run's.

    And the rings, which are not restored, are not missed: every later logit is right.
    """
    lives, cold = Lives(setting(), drafts=drafts), Lives(setting())
    prompt = ids(lives.setting, 41, 0)
    lives.release(lives.grown(prompt, PAGE))
    for boundary in range(PAGE, 41, PAGE):
        life = hit(lives, prompt[: boundary + 1])
        there = lives.export(life).rows
        for name, rows in cold.export(cold.grown(prompt[:boundary], PAGE)).rows.items():
            if not name.endswith("ring"):
                assert torch.equal(there[name], rows), name
        assert lives.advance(life, prompt[boundary : boundary + 11])
        lives.release(life)
        cold.end()
    lives.end()


def test_the_guard_of_these_tests() -> None:
    """Spoil one part of a restored state, and the next logits must be wrong: none is there in vain.

    But for the ring: at a page boundary all groups are closed.
    """
    prompt = ids(setting(), 21, 0)
    parts = {path.split(".")[-1] for path in paths(Lives(setting()).cache.pools)}
    assert parts == {"window", "rows", "ring", "header", "streams"}
    for part in sorted(parts):
        lives = Lives(setting())
        lives.release(lives.grown(prompt))
        life = hit(lives, prompt)
        lives.harm(part)
        assert lives.cache.append(life.held, 5)
        error = lives.run(life, prompt[16:])
        if part == "ring":
            assert error <= BOUND
        else:
            assert error > 1e-6, part


@pytest.mark.parametrize("window", [2, 19])
def test_a7_five_turns_are_the_same_with_and_without_the_cache(window: int) -> None:
    """A7: a conversation, each turn a new request that begins with all before it.

    Both are compared with the tokens alone; the cache is hit to the last whole page every time.
    """
    lives = Lives(setting(window=window), history=30, window=12)
    said: list[int] = []
    for turn in range(5):
        said += ids(lives.setting, 9, turn)  # the user
        life = lives.restore(said)
        assert life.held.length == (len(said) - 9) // PAGE * PAGE
        assert lives.advance(life, said[life.held.length :])
        answer = ids(lives.setting, 4, turn + 100)
        for token in answer:
            assert lives.advance(life, [token])
        said += answer
        lives.release(life)
        lives.grown(ids(lives.setting, 17, turn + 50))  # somebody else
        lives.end()


def test_one_prefix_many_readers() -> None:
    """Sequences that share pages go on apart, beside the one that made them."""
    lives = Lives(setting(), slots=6)
    prompt = ids(lives.setting, 20, 0)
    first = lives.grown(prompt)
    others = [hit(lives, [*prompt[:16], *ids(lives.setting, 5, n)]) for n in range(1, 4)]
    for turn in range(3):
        for n, life in enumerate((first, *others)):
            assert lives.advance(life, ids(lives.setting, 4, 10 * turn + n))
            lives.audit()
    shared = lives.pages.history._count[first.held.history[0]]
    assert shared == 4
    lives.end()


def test_rejected_drafts_do_not_reach_the_cache() -> None:
    """A page that was full of drafts for one step is published with what holds, and found so."""
    lives = Lives(setting(), drafts=4)
    prompt, wrong = ids(lives.setting, 24, 0), ids(lives.setting, 4, 1)
    life = lives.grown(prompt[:13])
    assert lives.advance(life, [prompt[13], *wrong[1:]], keep=1)  # 17 written, 14 hold
    assert lives.advance(life, prompt[14:])
    lives.release(life)
    again = hit(lives, prompt)
    assert lives.advance(again, prompt[16:])
    lives.end()
