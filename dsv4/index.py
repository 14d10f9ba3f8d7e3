"""Lightning indexer: which compressed entries a CSA query attends to. Spec section 7.

Scores are computed only when a table can address more entries than the layer keeps.
"""

import torch
from torch import Tensor

from dsv4 import quant
from dsv4.batch import Batch
from dsv4.norm import wide
from dsv4.ops import Keys
from dsv4.params import Indexer
from dsv4.site import Site, entry_row
from dsv4.state import Entries


def queries(p: Indexer, x_TD: Tensor, qr_TR: Tensor, site: Site) -> tuple[Tensor, Tensor]:
    """Indexer queries [T, I, J], and head weights [T, I], which are wide."""
    cfg, linear = site.ctx.cfg, site.ctx.ops.linear
    iq = linear(qr_TR, p.wq_b).unflatten(-1, (cfg.index_heads, cfg.index_dim))
    iq = site.ctx.ops.rotate(iq, site.cos[:, None], site.sin[:, None])
    if site.ctx.qat:
        iq = quant.round_index(iq)
    scale = cfg.index_dim**-0.5 * cfg.index_heads**-0.5
    return iq, wide(linear(x_TD, p.weights_proj)) * scale


def entry_rows(batch: Batch, per_page: int, rate: int) -> tuple[Tensor, Tensor]:
    """Pool rows of every addressable entry of each query block, and who may see it.

    Returns rows [U, E] and visible [U, Z, E]: entry j is visible to position t iff j < (t+1) // r.
    Entries that no query of the block sees read row 0, which is zero.
    """
    seq = batch.seq[batch.blocks[:, 0]]
    pos = batch.positions[batch.blocks]
    entry = torch.arange(batch.history.shape[1] * per_page, device=pos.device)
    visible = entry < ((pos + 1) // rate)[..., None]
    rows = entry_row(batch, seq[:, None], entry[None], per_page)
    return torch.where(visible.any(1), rows, 0), visible


def select(
    p: Indexer, cache: Entries, x_TD: Tensor, qr_TR: Tensor, batch: Batch, site: Site
) -> Tensor | None:
    """The entries each query keeps, [U, Z, index_topk] ascending, or None if it keeps all.

    Where fewer than index_topk are visible, the rest of the list is invisible entries: the caller
    masks by visibility.
    """
    cfg, per_page = site.ctx.cfg, site.page_tokens // site.plan.rate
    if batch.history.shape[1] * per_page <= cfg.index_topk:
        return None
    rows, visible = entry_rows(batch, per_page, site.plan.rate)
    iq, w = queries(p, x_TD, qr_TR, site)
    s = site.ctx.ops.scores(iq, w, Keys(cache.rows, rows, visible), batch.blocks)
    return site.ctx.ops.pick(s, cfg.index_topk)
