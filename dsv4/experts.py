"""Mixture of experts: routed experts plus the shared expert. Spec section 9."""

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.collectives import psum
from dsv4.context import Ctx
from dsv4.norm import wide
from dsv4.params import Mlp, Moe
from dsv4.route import route


def shared(p: Mlp, x_TD: Tensor, limit: float, lowered: ops.Ops = ops.PLAIN) -> Tensor:
    """The shared expert. [T, D]"""
    linear = lowered.linear
    a = lowered.activate(linear(x_TD, p.w1), linear(x_TD, p.w3), limit)
    return linear(a.to(x_TD.dtype), p.w2)


def moe(
    p: Moe, x_TD: Tensor, tokens_T: Tensor, ctx: Ctx, real_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [T, D] and the experts chosen [T, K]. The sum over experts is wide, rounded once.

    Tokens that are not real (padding) take the experts of the first token: their output is dropped,
    and experts of their own would be read for nothing.
    """
    limit = ctx.cfg.swiglu_limit
    weights, chosen = route(p, x_TD, tokens_T, ctx)
    if real_T is not None:
        chosen = torch.where(real_T[:, None], chosen, chosen[:1])
    routed = ops.Experts(w1=p.w1, w3=p.w3, w2=p.w2, limit=limit)
    y = psum(ctx.ops.experts(x_TD, weights, chosen, routed), "ep", ctx.mesh)
    return (y + wide(shared(p.shared, x_TD, limit, ctx.ops))).to(x_TD.dtype), chosen


def load(chosen_TK: Tensor, real_T: Tensor, experts: int) -> Tensor:
    """How many real tokens were routed to each expert. [X] int32"""
    ones = real_T[:, None].expand_as(chosen_TK).to(torch.int32)
    counts = torch.zeros(experts, dtype=torch.int32, device=chosen_TK.device)
    return counts.scatter_add(0, chosen_TK.flatten(), ones.flatten())
