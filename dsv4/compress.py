"""Compressors: entries of r tokens, closed by absolute position. Spec section 6.

With overlap (c = 2) entry j is made of the A halves of group j-1 and the B halves of group j:

    tokens   0 1 2 3 | 4 5 6 7 | 8 9 ...          entry 0:  (absent) + B[0..3]
    entry    j = 0   | j = 1   |                  entry 1:  A[0..3]  + B[4..7]

The raw inputs (k, g) of a step's own tokens come straight from the step; those of earlier steps
from the ring, by position; and the A halves a group needs across a page boundary from the header of
the page before, where a prefix hit finds them too.

Letters: package docstring; here C is the entry width (head width or indexer width).
"""

import dataclasses

import torch
from torch import Tensor

from dsv4 import quant
from dsv4.batch import Batch
from dsv4.params import Compressor
from dsv4.site import Site, entry_row, window_row, write
from dsv4.state import Entries, ring_rows


def project(p: Compressor, x_TD: Tensor, positions_T: Tensor, site: Site) -> Tensor:
    """Raw inputs (k | g) of each token, [T, 2 * c * C] wide; g includes its position's bias."""
    linear = site.ctx.ops.linear_wide
    gate = linear(x_TD, p.wgate) + p.ape[positions_T % site.plan.rate]
    return torch.cat((linear(x_TD, p.wkv), gate), dim=-1)


def _a_halves(kg: Tensor) -> Tensor:
    """(A k | A g) of raw inputs with overlap."""
    return torch.cat(kg.chunk(4, dim=-1)[0::2], dim=-1)


def _carried(cache: Entries, batch: Batch, site: Site, rows: int) -> Tensor:
    """Raw inputs of the `rows` positions before each sequence's start. [B, rows, 2 * c * C]

    Positions below 0 read slot 0, which is zero.
    """
    rate, seqs = site.plan.rate, batch.slots.shape[0]
    ring = ring_rows(site.plan, site.drafts)
    step = torch.arange(rows, device=batch.starts.device)
    pos = batch.starts[:, None] - rows + step
    valid = pos >= 0
    read = site.ctx.ops.read_rows
    kg = read(cache.ring, torch.where(valid, batch.slots[:, None] * ring + pos % ring, 0))
    if cache.header is None:
        return kg
    # The A halves of the group before a page boundary stand in that page's header.
    group = batch.starts // rate * rate  # start of the group the sequence is in
    crossing = (group % site.page_tokens == 0)[:, None] & (pos < group[:, None]) & valid
    seq = torch.arange(seqs, device=pos.device)[:, None].expand_as(pos)
    page = window_row(batch, seq, torch.where(valid, pos, 0), site.page_tokens) // site.page_tokens
    head = read(cache.header, torch.where(crossing, page * rate + pos % rate, 0))
    ak, bk, ag, bg = kg.chunk(4, dim=-1)
    hk, hg = head.chunk(2, dim=-1)
    pick = crossing[..., None]
    return torch.cat((torch.where(pick, hk, ak), bk, torch.where(pick, hg, ag), bg), dim=-1)


def _groups(kg_T: Tensor, cache: Entries, batch: Batch, site: Site, closes: Tensor) -> Tensor:
    """Raw inputs of the c * r slots of each closing entry. [W, c * r, 2 * c * C]"""
    rate = site.plan.rate
    rows = site.plan.overlap * rate
    seq, entry = closes[:, :1], closes[:, 1:]
    step = torch.arange(rows, device=kg_T.device)
    pos = (entry + 1) * rate - rows + step  # [W, rows]
    start = batch.starts[seq]
    here = batch.first[seq] + pos - start
    before = kg_T.shape[0] + seq * rows + (pos - start + rows)
    source = torch.cat((kg_T, _carried(cache, batch, site, rows).flatten(0, 1)))
    return source[torch.where(pos >= start, here, before)]


def pool_groups(slots: Tensor, entry: Tensor, overlap: int) -> Tensor:
    """Softmax-weighted sum over the slots of each entry, channel by channel. [W, C] wide"""
    if overlap == 1:
        k, g = slots.chunk(2, dim=-1)
    else:
        half = slots.shape[1] // 2
        ak, bk, ag, bg = slots.chunk(4, dim=-1)
        # Entry 0 has no group before it.
        absent = (entry == 0)[:, None, None]
        first = torch.where(absent, -torch.inf, ag[:, :half])
        k = torch.cat((torch.where(absent, 0, ak[:, :half]), bk[:, half:]), dim=1)
        g = torch.cat((first, bg[:, half:]), dim=1)
    return (torch.softmax(g, dim=1) * k).sum(1)


def update(
    p: Compressor, cache: Entries, x_TD: Tensor, batch: Batch, site: Site, *, keys: bool = False
) -> Entries:
    """The cache after this step: raw inputs kept by position, closed groups written as entries.

    `keys`: these are the indexer's keys, which `qat` rounds as such.
    """
    ctx, rate = site.ctx, site.plan.rate
    cfg = ctx.cfg
    kg_T = project(p, x_TD, batch.positions, site)
    closes = batch.closes[cfg.rates.index(rate)]
    new = cache
    if closes.shape[0]:
        seq, entry = closes[:, 0], closes[:, 1]
        e = pool_groups(_groups(kg_T, cache, batch, site, closes), entry, site.plan.overlap)
        e = ctx.ops.rms(e.to(x_TD.dtype), p.norm, cfg.norm_eps)
        e = ctx.ops.rotate(e, *site.angles(entry * rate))
        if ctx.qat:
            e = quant.round_index(e) if keys else quant.round_kv(e, cfg.rope_dim)
        row = entry_row(batch, seq, entry, site.page_tokens // rate)
        new = dataclasses.replace(new, rows=write(ctx, cache.rows, row, e, seq > 0))
    return _keep_inputs(new, kg_T, batch, site)


def _keep_inputs(cache: Entries, kg_T: Tensor, batch: Batch, site: Site) -> Entries:
    ctx, rate, n = site.ctx, site.plan.rate, site.page_tokens
    pos, seq = batch.positions, batch.seq
    ring = ring_rows(site.plan, site.drafts)
    # Of a long chunk only the newest `ring` tokens are kept, so no row is written twice.
    newest = (seq > 0) & (pos >= batch.lengths[seq] - ring)
    kept = write(ctx, cache.ring, batch.slots[seq] * ring + pos % ring, kg_T, newest)
    if cache.header is None:
        return dataclasses.replace(cache, ring=kept)
    last = (seq > 0) & (pos % n >= n - rate)
    row = window_row(batch, seq, pos, n) // n * rate + pos % rate
    header = write(ctx, cache.header, row, _a_halves(kg_T), last)
    return dataclasses.replace(cache, ring=kept, header=header)
