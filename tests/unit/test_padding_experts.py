"""Padding tokens read no experts of their own."""

import dataclasses

import torch

from dsv4 import experts, model, ops
from dsv4.context import Ctx
from tests import tiny

CFG = tiny.short("wc")


def test_padding_takes_the_experts_of_the_first_token() -> None:
    """And their output, whatever it is, changes no real token."""
    g = torch.Generator().manual_seed(3)
    p = tiny.params(CFG, 0, torch.float64).layers[1].ffn
    x = torch.randn(7, CFG.dim, generator=g, dtype=torch.float64)
    ids = torch.randint(CFG.vocab, (7,), generator=g)
    real = torch.tensor([True, True, True, False, False, False, False])
    y, chosen = experts.moe(p, x, ids, Ctx(CFG), real)
    alone, own = experts.moe(p, x[:3], ids[:3], Ctx(CFG))
    assert torch.equal(chosen[:3], own)
    assert (chosen[3:] == own[0]).all()
    torch.testing.assert_close(y[:3], alone, rtol=0, atol=1e-13)
    unpadded = experts.moe(p, x, ids, Ctx(CFG))[1]
    assert not torch.equal(unpadded[3:], chosen[3:]), "these would have had experts of their own"


def test_a_step_asks_for_the_experts_of_its_real_tokens_only() -> None:
    seen: list[set[int]] = []

    def spy(
        x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, w: ops.Experts
    ) -> torch.Tensor:
        seen.append(set(slots.flatten().tolist()))
        return ops.experts(x, weights, slots, w)

    ctx = Ctx(CFG, ops=dataclasses.replace(ops.PLAIN, experts=spy))
    params = tiny.params(CFG, 0, torch.float64)
    (a,) = tiny.tokens(CFG, 1, 3)
    for padding in (0, 9):
        batch = tiny.batch(CFG, [(a, 0)], pages=2, padding=padding)
        model.step(params, tiny.pools(CFG, 1, 2, torch.float64), batch, ctx)
    layers = len(CFG.kinds)
    assert seen[:layers] == seen[layers:]
