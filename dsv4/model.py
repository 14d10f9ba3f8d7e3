"""The model: one pure `step` for prefill chunks, decode, draft verification and research alike.

`forward` is a thin wrapper over the same `step`. Spec section 10.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4 import experts, layer, mhc
from dsv4.batch import Batch, StepOut, whole
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.site import Site, turn, window_row, write
from dsv4.state import Pools, PoolSizes, init_pools


def step(params: Params, pools: Pools, batch: Batch, ctx: Ctx) -> tuple[StepOut, Pools]:
    """Run the backbone over one batch.

    Returns logits of the wanted tokens, the streams of all tokens, the expert load, and the pools
    after the step. Arguments are not changed (unless `ctx.ops` says that pools are donated).
    """
    cfg = ctx.cfg
    embedded = F.embedding(batch.tokens, params.embed)
    h = embedded[:, None].expand(-1, cfg.streams, -1)
    ropes = tuple(plan.rope for plan in cfg.plans)
    tables = turn(batch.positions, ropes, cfg.rope_dim, h.dtype)
    real = batch.seq > 0
    new, loads = [], []
    for p, pool, plan in zip(params.layers, pools.layers, cfg.plans, strict=True):
        site = Site(plan, ctx, pools.page_tokens, pools.drafts, *tables[plan.rope])
        h, pool, chosen = layer.block(p, pool, h, batch, site)
        new.append(pool)
        loads.append(experts.load(chosen, real, cfg.experts))
    y = ctx.ops.rms(mhc.head(params.hc_head, h[batch.wanted], cfg), params.norm, cfg.norm_eps)
    logits = ctx.ops.linear_wide(y, params.head)
    out = StepOut(logits=logits, hidden=h, load=torch.stack(loads))
    return out, dataclasses.replace(
        pools, layers=tuple(new), streams=_keep_streams(pools, h, batch, ctx)
    )


def _keep_streams(pools: Pools, h_TMD: Tensor, batch: Batch, ctx: Ctx) -> Tensor | None:
    """The streams of tokens that end a page, in the page's header: see `Pools.streams`."""
    if pools.streams is None:
        return None
    n = pools.page_tokens
    ends = (batch.seq > 0) & (batch.positions % n == n - 1)
    page = window_row(batch, batch.seq, batch.positions, n) // n
    return write(ctx, pools.streams, page, h_TMD.flatten(1), ends)


def fresh(params: Params, tokens_BS: Tensor, ctx: Ctx, block: int = 64) -> tuple[Batch, Pools]:
    """One batch of whole sequences and zeroed pools that hold exactly them."""
    cfg = ctx.cfg
    if tokens_BS.dim() != 2:
        raise ValueError(f"tokens have shape {tuple(tokens_BS.shape)}; give [sequences, tokens]")
    num_seqs, length = tokens_BS.shape
    if length < 1 or num_seqs < 1:
        raise ValueError(f"tokens have shape {tuple(tokens_BS.shape)}; at least one is needed")
    if length > cfg.max_positions:
        raise ValueError(f"{length} tokens; the model's limit is {cfg.max_positions}")
    page = cfg.page_tokens
    pages = 1 + num_seqs * -(-length // page)
    sizes = PoolSizes(history_pages=pages, window_pages=pages, slots=num_seqs + 1, page_tokens=page)
    pools = init_pools(cfg, sizes, params.embed.dtype, tokens_BS.device)
    return whole(tokens_BS, cfg, page, min(block, length)), pools


def forward(params: Params, tokens_BS: Tensor, ctx: Ctx) -> Tensor:
    """Logits of every position of B sequences of equal length. [B, S, V] wide

    Differentiable; works under `torch.func.vmap`, and under `grad` over `tree.floats(params)` (the
    hash tables among the parameters are integers, which have no gradient). `ctx` must hold the
    plain operators, as `Ctx(cfg)` does. Raises ValueError for tokens that are not [B, S], none at
    all, or more than `max_positions`.
    """
    batch, pools = fresh(params, tokens_BS, ctx)
    out, _ = step(params, pools, batch, ctx)
    return out.logits.unflatten(0, tuple(tokens_BS.shape))
