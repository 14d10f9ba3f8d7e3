"""One decoder block: two sublayers, each between a collapse and an expansion of the streams.

Within attention the order is fixed: compute rows, write them, then attend over the pools. Spec
section 4.3 and 10.1.
"""

import dataclasses

from torch import Tensor

from dsv4 import attention, compress, experts, index
from dsv4.batch import Batch
from dsv4.params import Attention, Layer
from dsv4.site import Site, window_row, write
from dsv4.state import LayerPool


def attend(
    p: Attention, pool: LayerPool, x_TD: Tensor, batch: Batch, site: Site
) -> tuple[Tensor, LayerPool]:
    """Attention sublayer [T, D] and the layer's caches after it."""
    qr, q, kv = attention.project(p, x_TD, site)
    row = window_row(batch, batch.seq, batch.positions, site.page_tokens)
    window = write(site.ctx, pool.window, row, kv, batch.seq > 0)
    pool = dataclasses.replace(pool, window=window)
    picks = None
    if p.compressor is not None:
        assert pool.compressed is not None
        cache = compress.update(p.compressor, pool.compressed, x_TD, batch, site)
        pool = dataclasses.replace(pool, compressed=cache)
    if p.indexer is not None:
        assert pool.keys is not None
        keys = compress.update(p.indexer.compressor, pool.keys, x_TD, batch, site, keys=True)
        pool = dataclasses.replace(pool, keys=keys)
        picks = index.select(p.indexer, keys, x_TD, qr, batch, site)
    o = attention.attend(p, q, pool, picks, batch, site)
    return attention.output(p, o, site), pool


def block(
    p: Layer, pool: LayerPool, h_TMD: Tensor, batch: Batch, site: Site
) -> tuple[Tensor, LayerPool, Tensor]:
    """Streams after the block [T, M, D], its caches, and the experts chosen [T, K]."""
    cfg, ops = site.ctx.cfg, site.ctx.ops
    pre, post, comb = ops.mix(p.hc_attn, h_TMD, cfg)
    x = ops.rms(ops.collapse(h_TMD, pre), p.attn_norm, cfg.norm_eps)
    y, pool = attend(p.attn, pool, x, batch, site)
    h_TMD = ops.expand(y, h_TMD, post, comb)

    pre, post, comb = ops.mix(p.hc_ffn, h_TMD, cfg)
    x = ops.rms(ops.collapse(h_TMD, pre), p.ffn_norm, cfg.norm_eps)
    y, chosen = experts.moe(p.ffn, x, batch.tokens, site.ctx, batch.seq > 0)
    return ops.expand(y, h_TMD, post, comb), pool, chosen
