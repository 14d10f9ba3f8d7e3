"""Bit-equality: the determinism that is promised (see `runtime.runner`).

Where matrix products have a multiple of 8 rows, blocks one size and tables one width, every
reduction is the same reduction however a prompt is cut and whatever stands beside it.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.assemble import Shape
from tests.property import world
from tests.property.world import LONGEST, World, prompts, schedules


def eights(n: int) -> int:
    return -(-n // 8) * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data(), many=st.lists(world.lengths, min_size=1, max_size=3))
def test_not_one_bit(dtype: torch.dtype, data: st.DataObject, many: list[int]) -> None:
    setting = data.draw(world.settings(dtype))
    sequences = prompts(setting, *many)

    def play(w: World, steps: list[list[tuple[int, int]]]) -> list[torch.Tensor]:
        seen: list[list[torch.Tensor]] = [[] for _ in w.tokens]
        for work in steps:
            n = eights(sum(count for _, count in work))
            shape = Shape(tokens=n, wanted=n, history=-(-LONGEST // setting.page_tokens))
            for i, logits in w.step(work, shape=shape).items():
                seen[i].append(logits)
        return [torch.cat(x) for x in seen]

    together = World(setting, sequences, shuffle=setting.seed)
    logits = play(together, data.draw(schedules(many)))
    for i, tokens in enumerate(sequences):
        lone = World(setting, [tokens])
        (want,) = play(lone, [[(0, len(tokens))]])
        assert torch.equal(logits[i], want)
        rows = together.state(i)
        for name, kept in lone.state(0).items():
            assert torch.equal(rows[name], kept), name
