"""Attention with one shared key/value row per token. Spec sections 5 and 8.

Each query sees a sliding window and, in CSA and HCA layers, compressed entries; one softmax with a
sink runs over the union. Queries come in blocks of Z tokens that share one gather of keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4 import quant, rope
from dsv4.batch import Batch
from dsv4.collectives import psum
from dsv4.index import entry_rows
from dsv4.norm import wide
from dsv4.params import Attention
from dsv4.site import Site, entry_row, window_row
from dsv4.state import LayerPool


def project(p: Attention, x_TD: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """Low-rank queries qr [T, R], queries q [T, H, C] and this step's key/value rows kv [T, C]."""
    cfg, rms = site.ctx.cfg, site.ctx.ops.rms
    qr = rms(F.linear(x_TD, p.wq_a), p.q_norm, cfg.norm_eps)
    q = F.linear(qr, p.wq_b).unflatten(-1, (-1, cfg.head_dim))
    q = rope.rotate(rms(q, None, cfg.norm_eps), site.cos[:, None], site.sin[:, None])
    kv = rope.rotate(rms(F.linear(x_TD, p.wkv), p.kv_norm, cfg.norm_eps), site.cos, site.sin)
    if site.ctx.qat:
        kv = quant.round_kv(kv, cfg.rope_dim)
    return qr, q, kv


def window_keys(pool_NC: Tensor, batch: Batch, site: Site) -> tuple[Tensor, Tensor]:
    """Window keys of each block [U, S, C] and their visibility [U, Z, S], S = W + Z - 1.

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
    return site.ctx.ops.read_rows(pool_NC, torch.where(seen, row, 0)), visible


def _compressed_keys(
    pool: LayerPool, picks: Tensor | None, batch: Batch, site: Site
) -> tuple[Tensor, Tensor] | None:
    """Compressed entries and visibility: shared by a block [U, E, C], or picked [U, Z, K, C]."""
    if pool.compressed is None:
        return None
    rate = site.plan.rate
    per_page, read = site.page_tokens // rate, site.ctx.ops.read_rows
    if picks is None:
        rows, visible = entry_rows(batch, per_page, rate)
        return read(pool.compressed.rows, rows), visible
    pos = batch.positions[batch.blocks]
    visible = picks < ((pos + 1) // rate)[..., None]
    if share_entries(batch.blocks.shape[1], batch.history.shape[1] * per_page, picks.shape[-1]):
        rows, _ = entry_rows(batch, per_page, rate)
        chosen = visible.new_zeros(*picks.shape[:-1], rows.shape[-1])
        return read(pool.compressed.rows, rows), chosen.scatter(-1, picks, visible)
    seq = batch.seq[batch.blocks[:, 0]][:, None, None]
    rows = torch.where(visible, entry_row(batch, seq, picks, per_page), 0)
    return read(pool.compressed.rows, rows), visible


def share_entries(z: int, entries: int, kept: int) -> bool:
    """Whether a block reads all entries once under a mask, rather than each query its own picks.

    Sharing multiplies E keys per query instead of K, and reads E / Z rows per query instead of K.
    """
    return z > 1 and entries <= 4 * kept


def attend(
    p: Attention, q_THC: Tensor, pool: LayerPool, picks: Tensor | None, batch: Batch, site: Site
) -> Tensor:
    """Attention output before the projection, rotated back at the query position. [T, H, C]

    Logits, softmax, sink and sums are wide. The sink takes part in the denominator only, unscaled.
    """
    heads, width = q_THC.shape[1:]
    u, z = batch.blocks.shape
    q = wide(q_THC[batch.blocks]) * width**-0.5  # [U, Z, H, C]
    near, visible = window_keys(pool.window, batch, site)
    near = wide(near)
    parts = [_logits(q, near, visible)]
    far = _compressed_keys(pool, picks, batch, site)
    far_keys = None
    if far is not None:
        far_keys = wide(far[0])
        parts.append(_logits(q, far_keys, far[1]))
    logits = torch.cat(parts, dim=-1)  # [U, Z, H, S + E]
    sink = p.attn_sink[:, None]
    top = torch.maximum(logits.max(-1, keepdim=True).values, sink)
    e = torch.exp(logits - top)
    e = e / (e.sum(-1, keepdim=True) + torch.exp(sink - top))
    o = _values(e[..., : near.shape[1]], near)
    if far_keys is not None:
        o = o + _values(e[..., near.shape[1] :], far_keys)
    o = o.reshape(u * z, heads, width)[batch.place].to(q_THC.dtype)
    return rope.rotate(o, site.cos[:, None], site.sin[:, None], inverse=True)


def _logits(q_UZHC: Tensor, keys: Tensor, visible_UZS: Tensor) -> Tensor:
    equation = "uzhc,usc->uzhs" if keys.dim() == 3 else "uzhc,uzsc->uzhs"
    s = torch.einsum(equation, q_UZHC, keys)
    return torch.where(visible_UZS[:, :, None], s, -torch.inf)


def _values(e_UZHS: Tensor, keys: Tensor) -> Tensor:
    equation = "uzhs,usc->uzhc" if keys.dim() == 3 else "uzhs,uzsc->uzhc"
    return torch.einsum(equation, e_UZHS, keys)


def output(p: Attention, o_THC: Tensor, site: Site) -> Tensor:
    """Grouped output projection: consecutive heads form a group. [T, D]"""
    o = o_THC.flatten(1).unflatten(1, (p.wo_a.shape[0], -1))
    z = torch.einsum("tgi,goi->tgo", o, p.wo_a)
    return psum(F.linear(z.flatten(1), p.wo_b), "tp", site.ctx.mesh)
