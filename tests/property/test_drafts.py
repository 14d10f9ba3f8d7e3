"""Tokens that were written and taken back leave no trace, if the rings have room for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tests.property import world
from tests.property.world import BOUND, World, alone, assert_same, off, prompts


@given(
    setting=world.settings(),
    length=world.lengths,
    drafts=st.integers(1, 7),
    data=st.data(),
)
def test_taken_back(setting: world.Setting, length: int, drafts: int, data: st.DataObject) -> None:
    """Before each step, up to `drafts` wrong tokens are written and the length set back."""
    (tokens,) = prompts(setting, length)
    w = World(setting, [tokens], drafts=drafts)
    seen = []
    while w.lengths[0] < length:
        wrong = data.draw(st.integers(0, drafts))
        if wrong:
            w.drafted(0, [(t + 5) % setting.cfg.vocab for t in tokens[:wrong]])
        seen.append(w.step([(0, data.draw(st.integers(1, min(9, length - w.lengths[0]))))])[0])
    assert_same(w, 0, torch.cat(seen), alone(setting, tokens))


@pytest.mark.parametrize("drafts", [2, 3, 5])
@pytest.mark.parametrize(("kinds", "rate"), [("c", 4), ("h", 8)])
def test_room_is_needed(kinds: str, rate: int, drafts: int) -> None:
    """k drafts need k - 1 more ring rows (`PoolSizes.drafts` gives k); k - 2 fail at some length.

    The guard of the property above: it must be able to fail.
    """
    cfg = tiny.short(kinds, 0, mtp=0, window=8)
    setting = world.Setting(cfg=cfg, page_tokens=32, block=4, seed=0)
    (tokens,) = prompts(setting, 24)
    want, _ = alone(setting, tokens)

    def errors(room: int) -> list[float]:
        out = []
        for n in range(rate, 2 * rate):
            w = World(setting, [tokens], drafts=room)
            w.step([(0, n)])
            w.drafted(0, [5] * drafts)
            out.append(off(w.step([(0, 24 - n)])[0], want[n:]))
        return out

    assert max(errors(drafts - 1)) <= BOUND
    assert max(errors(drafts - 2)) > 1e-3
