"""Attention with one shared key/value row per token. Spec sections 5 and 8.

Each query sees a sliding window and, in CSA and HCA layers, compressed entries; one softmax with a
sink runs over the union. Queries come in blocks of Z tokens that share one gather of keys.
"""

import torch
from torch import Tensor

from dsv4 import quant
from dsv4.batch import Batch
from dsv4.collectives import psum
from dsv4.index import entry_rows
from dsv4.ops import Keys
from dsv4.params import Attention
from dsv4.site import Site, entry_row, window_row
from dsv4.state import LayerPool


def project(p: Attention, x_TD: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """Low-rank queries qr [T, R], queries q [T, H, C] and this step's key/value rows kv [T, C]."""
    cfg, ops = site.ctx.cfg, site.ctx.ops
    linear, rms = ops.linear, ops.rms
    qr = rms(linear(x_TD, p.wq_a), p.q_norm, cfg.norm_eps)
    q = linear(qr, p.wq_b).unflatten(-1, (-1, cfg.head_dim))
    q = ops.rotate(rms(q, None, cfg.norm_eps), site.cos[:, None], site.sin[:, None])
    kv = ops.rotate(rms(linear(x_TD, p.wkv), p.kv_norm, cfg.norm_eps), site.cos, site.sin)
    if site.ctx.qat:
        kv = quant.round_kv(kv, cfg.rope_dim)
    return qr, q, kv


def window_keys(pool_NC: Tensor, batch: Batch, site: Site) -> Keys:
    """Window keys of each block: rows [U, S] and their visibility [U, Z, S], S = W + Z - 1.

    Keys stand at positions m * Z - W + 1 .. m * Z + Z - 1 of a block at m * Z, whatever part of
    the block this step holds. Positions no query sees read row 0, which is zero.
    """
    span, z = site.ctx.cfg.window, batch.blocks.shape[1]
    seq = batch.seq[batch.blocks[:, 0]]
    pos = batch.positions[batch.blocks]
    offset = torch.arange(span + z - 1, device=pos.device) - (span - 1)
    key = (pos[:, :1] // z * z + offset)[:, None]  # [U, 1, S]
    query = pos[..., None]
    visible = (key <= query) & (key > query - span) & (key >= site.first_key)
    seen = visible.any(1)
    row = window_row(batch, seq[:, None], torch.where(seen, key[:, 0], 0), site.page_tokens)
    return Keys(pool_NC, torch.where(seen, row, 0), visible)


def _compressed_keys(
    pool: LayerPool, picks: Tensor | None, batch: Batch, site: Site
) -> Keys | None:
    """Compressed entries: rows shared by a block [U, E], or picked by each query [U, Z, K]."""
    if pool.compressed is None:
        return None
    rate, held = site.plan.rate, pool.compressed.rows
    per_page = site.page_tokens // rate
    if picks is None:
        return Keys(held, *entry_rows(batch, per_page, rate))
    pos = batch.positions[batch.blocks]
    visible = picks < ((pos + 1) // rate)[..., None]
    if share_entries(batch.blocks.shape[1], batch.history.shape[1] * per_page, picks.shape[-1]):
        rows, _ = entry_rows(batch, per_page, rate)
        chosen = visible.new_zeros(*picks.shape[:-1], rows.shape[-1])
        return Keys(held, rows, chosen.scatter(-1, picks, visible))
    seq = batch.seq[batch.blocks[:, 0]][:, None, None]
    rows = torch.where(visible, entry_row(batch, seq, picks, per_page), 0)
    return Keys(held, rows, visible)


def share_entries(z: int, entries: int, kept: int) -> bool:
    """Whether a block reads all entries once under a mask, rather than each query its own picks.

    Sharing multiplies E keys per query instead of K, and reads E / Z rows per query instead of K.
    """
    return z > 1 and entries <= 4 * kept


def attend(
    p: Attention, q_THC: Tensor, pool: LayerPool, picks: Tensor | None, batch: Batch, site: Site
) -> Tensor:
    """Attention output before the projection, rotated back at the query position. [T, H, C]"""
    near = window_keys(pool.window, batch, site)
    far = _compressed_keys(pool, picks, batch, site)
    spots = (batch.blocks, batch.place)
    o = site.ctx.ops.attend(q_THC, near, far, p.attn_sink, spots)
    return site.ctx.ops.rotate(o, site.cos[:, None], site.sin[:, None], inverse=True)


def output(p: Attention, o_THC: Tensor, site: Site) -> Tensor:
    """Grouped output projection: consecutive heads form a group. [T, D]"""
    linear = site.ctx.ops.linear
    o = o_THC.flatten(1).unflatten(1, (p.wo_a.shape[0], -1))
    return psum(linear(linear(o, p.wo_a).flatten(1), p.wo_b), "tp", site.ctx.mesh)
