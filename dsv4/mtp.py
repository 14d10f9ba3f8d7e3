"""The draft module (multi-token prediction): hidden of p and token p + 1 predict token p + 2.

Spec section 11. Its batch carries the NEXT tokens at their own positions p + 1: the module's
key/value row of position p lives where token p + 1 lives, so that a window page is a function of
the tokens in it alone (nothing is written to a shared page later). Rotary positions stay p.
"""

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from dsv4 import experts, layer, mhc
from dsv4.batch import Batch, StepOut
from dsv4.context import Ctx
from dsv4.model import fresh, step
from dsv4.params import Params
from dsv4.site import Site, turn
from dsv4.state import Pools


def draft(
    params: Params, pools: Pools, hidden_TMD: Tensor, batch: Batch, ctx: Ctx
) -> tuple[StepOut, Pools]:
    """Run the draft module over the tokens of `batch`, each paired with the streams before it.

    `hidden_TMD[t]` are the streams of position `batch.positions[t] - 1`: the backbone's, or this
    module's own for the second and later drafts. Logits predict the token after `tokens[t]`.
    Raises ValueError if the model was built without its draft module.
    """
    p, pool = params.mtp, pools.mtp
    if p is None or pool is None:
        raise ValueError("this model has no draft module: build it from a config with mtp = 1")
    cfg = ctx.cfg
    e = ctx.ops.rms(F.embedding(batch.tokens, params.embed), p.enorm, cfg.norm_eps)
    g = ctx.ops.rms(hidden_TMD, p.hnorm, cfg.norm_eps)
    h = ctx.ops.linear(e, p.e_proj)[:, None] + ctx.ops.linear(g, p.h_proj)
    plan = cfg.mtp_plan
    before = (batch.positions - 1).clamp(min=0)
    tables = turn(before, (plan.rope,), cfg.rope_dim, h.dtype)
    site = Site(plan, ctx, pools.page_tokens, pools.drafts, *tables[plan.rope], first_key=1)
    h, pool, chosen = layer.block(p.block, pool, h, batch, site)
    y = ctx.ops.rms(mhc.head(p.hc_head, h[batch.wanted], cfg), p.norm, cfg.norm_eps)
    load = experts.load(chosen, batch.seq > 0, cfg.experts)
    out = StepOut(logits=ctx.ops.linear_wide(y, params.head), hidden=h, load=load[None])
    return out, dataclasses.replace(pools, mtp=pool)


def forward(params: Params, tokens_BS: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """Logits of the backbone and of the draft module at every position, both [B, S, V] wide.

    Both at position q predict token q + 1; the draft's have seen the backbone up to q - 1 and token
    q. Its position 0 has no streams before it and means nothing. Raises as `model.forward`.
    """
    batch, pools = fresh(params, tokens_BS, ctx)
    out, pools = step(params, pools, batch, ctx)
    shape = tuple(tokens_BS.shape)
    drafted, _ = draft(params, pools, out.hidden.roll(1, 0), batch, ctx)
    return out.logits.unflatten(0, shape), drafted.logits.unflatten(0, shape)
