"""Whole steps in float64 against the float64 transcription of the spec, roundings on and off.

The bound is that of float64 sums in another order. Where the reference was nearer to a tie than
float32 can tell (the roundings take their input in float32), the comparison would mean nothing:
each test asserts that it was not.
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsv4 import attention, compress, experts, layer, mhc, model, quant
from dsv4.config import Config
from dsv4.context import Ctx
from dsv4.norm import rms
from dsv4.site import Site, turn
from tests import reference, tiny

F64 = torch.float64
BOUND = 1e-11
CFG = tiny.short("wchc", 1, mtp=0)


def _decided(notes: reference.Notes) -> None:
    assert notes.choice > 1e-9
    assert notes.rounding > 1.2e-7  # two float32 roundings


def _stepped(
    cfg: Config, tokens: Sequence[Tensor], chunk: int, block: int, *, qat: bool = False
) -> list[Tensor]:
    """Logits of every position of several sequences, stepped side by side in chunks."""
    ctx = Ctx(cfg, qat=qat)
    params = tiny.params(cfg, 3, F64)
    pages = max(-(-len(t) // cfg.page_tokens) for t in tokens)
    pools = tiny.pools(cfg, len(tokens), pages, F64)
    out: list[list[Tensor]] = [[] for _ in tokens]
    for start in range(0, len(tokens[0]), chunk):
        chunks = [(t[start : start + chunk], start) for t in tokens]
        batch = tiny.batch(cfg, chunks, pages=pages, block=block, padding=start % 3)
        got, pools = model.step(params, pools, batch, ctx)
        for rows, piece in zip(out, got.logits.split([len(c) for c, _ in chunks]), strict=True):
            rows.append(piece)
    return [torch.cat(rows) for rows in out]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "qat"])
def text(request: pytest.FixtureRequest) -> tuple[bool, list[Tensor], list[Tensor]]:
    """qat, two prompts, and their logits by the reference."""
    tokens = [tiny.tokens(CFG, 1, 40, seed)[0] for seed in (1, 2)]
    params, run = tiny.params(CFG, 3, F64), tiny.run(CFG, qat=request.param)
    want = [reference.forward(params, ids.tolist(), run)[0] for ids in tokens]
    _decided(run.notes)
    return request.param, tokens, want


@pytest.mark.parametrize(("chunk", "block"), [(40, 64), (40, 8), (40, 2), (7, 4), (1, 1)])
def test_a_step_equals_the_text(
    text: tuple[bool, list[Tensor], list[Tensor]], chunk: int, block: int
) -> None:
    """Every layer kind, every way of reading keys, prompts whole, in chunks and token by token."""
    qat, tokens, expected = text
    ours = _stepped(CFG, tokens, chunk, block, qat=qat)
    for got, want in zip(ours, expected, strict=True):
        assert want.abs().max() > 2
        assert (got - want).abs().max() < BOUND


@pytest.mark.parametrize(("topk", "block"), [(2, 4), (2, 1), (4, 4), (10, 4), (11, 4)])
def test_every_way_of_reading_entries(topk: int, block: int) -> None:
    """10 entries: picked one by one, shared by a block under a mask, and all kept unscored."""
    cfg = dataclasses.replace(CFG, index_topk=topk)
    ways = {(2, 4): False, (2, 1): False, (4, 4): True}
    if topk < 10:
        assert attention.share_entries(block, 10, topk) is ways[topk, block]
    ids = tiny.tokens(cfg, 1, 40, 1)[0]
    run = tiny.run(cfg)
    want, _ = reference.forward(tiny.params(cfg, 3, F64), ids.tolist(), run)
    _decided(run.notes)
    (got,) = _stepped(cfg, [ids], 40, block)
    assert (got - want).abs().max() < BOUND


def test_qat_changes_the_result() -> None:
    """Both sides round: on and off differ as much as section 14.6 says, not by nothing."""
    tokens = [tiny.tokens(CFG, 1, 24, 1)[0]]
    on, off = (_stepped(CFG, tokens, 24, 8, qat=q)[0] for q in (True, False))
    assert 1e-3 < (on - off).abs().mean() < 0.3


def test_rates_4_and_128_equal_the_text() -> None:
    """Case A1: lengths 1 to 12 and 126 to 130, paged, each prefilled alone, against dense logits.

    A shorter prompt's logits are a prefix of a longer one's, so the reference runs once.
    """
    cfg = tiny.config("wch", 1)
    params, ids = tiny.params(cfg, 3, F64), tiny.tokens(cfg, 1, 130, 5)[0]
    run = tiny.run(cfg)
    want, _ = reference.forward(params, ids.tolist(), run)
    _decided(run.notes)
    for length in (*range(1, 13), *range(126, 131)):
        pools = tiny.pools(cfg, 1, 2, F64)
        batch = tiny.batch(cfg, [(ids[:length], 0)], pages=2, block=8)
        out, pools = model.step(params, pools, batch, Ctx(cfg))
        assert (out.logits - want[:length]).abs().max() < BOUND, length
        if length < 130:  # and the token after it, decoded
            batch = tiny.batch(cfg, [(ids[length : length + 1], length)], pages=2)
            out, _ = model.step(params, pools, batch, Ctx(cfg))
            assert (out.logits[0] - want[length]).abs().max() < BOUND, length


def test_float32_stays_near_float64() -> None:
    """The same model in float32: rounding errors and nothing more."""
    ids = tiny.tokens(CFG, 2, 40, 7)
    watch, rough = tiny.Watch(), tiny.params(CFG, 3)
    exact = tiny.cast(rough, F64)
    low = model.forward(rough, ids, Ctx(CFG))
    high = model.forward(exact, ids, Ctx(CFG, ops=watch.ops))
    assert min(float(tiny.gaps(s, k).min()) for s, k in watch.seen) > 1e-5
    assert low.dtype == torch.float32
    assert (low - high).abs().max() < 1e-5


# One layer at a time, from the same streams.


@pytest.mark.parametrize("qat", [False, True], ids=["plain", "qat"])
@pytest.mark.parametrize("i", range(4))
def test_a_block_equals_the_text(i: int, qat: bool) -> None:
    """Collapse, attention, experts and the block, of each kind of layer."""
    ids = tiny.tokens(CFG, 1, 40, 3)
    p, plan = tiny.params(CFG, 3, F64).layers[i], CFG.plans[i]
    ctx, run = Ctx(CFG, qat=qat), tiny.run(CFG, qat=qat)
    batch, pools = model.fresh(tiny.params(CFG, 3, F64), ids, ctx)
    angles = turn(batch.positions, (plan.rope,), CFG.rope_dim, F64)[plan.rope]
    site = Site(plan, ctx, pools.page_tokens, pools.drafts, *angles)
    h = torch.randn(40, CFG.streams, CFG.dim, dtype=F64)
    x = rms(mhc.collapse(h, mhc.mix(p.hc_attn, h, CFG)[0]), p.attn_norm, CFG.norm_eps)

    got, _ = layer.attend(p.attn, pools.layers[i], x, batch, site)
    want = reference.attention(p.attn, x, plan.kind, run)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)

    got, _ = experts.moe(p.ffn, x, batch.tokens, ctx)
    want = torch.stack(
        [reference.moe(p.ffn, v, int(t), run) for v, t in zip(x, ids[0], strict=True)]
    )
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)

    got, _, _ = layer.block(p, pools.layers[i], h, batch, site)
    want = reference.block(p, h, ids[0].tolist(), plan.kind, run)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    _decided(run.notes)


@pytest.mark.parametrize("qat", [False, True], ids=["plain", "qat"])
@pytest.mark.parametrize("which", ["csa", "hca", "index keys"])
def test_entries_equal_the_text(which: str, qat: bool) -> None:
    """Pool rows of the three compressors after a whole prompt; entry 0 has no group before it."""
    i = 2 if which == "hca" else 1
    ids = tiny.tokens(CFG, 1, 40, 3)
    params, plan = tiny.params(CFG, 3, F64), CFG.plans[i]
    ctx, run = Ctx(CFG, qat=qat), tiny.run(CFG, qat=qat)
    batch, pools = model.fresh(params, ids, ctx)
    angles = turn(batch.positions, (plan.rope,), CFG.rope_dim, F64)[plan.rope]
    site = Site(plan, ctx, pools.page_tokens, pools.drafts, *angles)
    attn, pool = params.layers[i].attn, pools.layers[i]
    indexer = which == "index keys"
    p = attn.indexer.compressor if indexer and attn.indexer else attn.compressor
    cache = pool.keys if indexer else pool.compressed
    assert p is not None
    assert cache is not None
    x = torch.randn(40, CFG.dim, dtype=F64)
    got = compress.update(p, cache, x, batch, site, keys=indexer).rows
    want = reference.entries(p, x, plan.rate, run.scaled, run, indexer=indexer)
    first = CFG.page_tokens // plan.rate  # page 0 is padding
    torch.testing.assert_close(got[first:], want, rtol=1e-11, atol=1e-11)
    assert got[:first].abs().max() == 0
    _decided(run.notes)


def test_training_rounds_what_the_text_says() -> None:
    """Window rows: fp8 without the rotary dims; index keys: all dims on fp4 values."""
    ids = tiny.tokens(CFG, 1, 24, 3)
    params, ctx = tiny.params(CFG, 3, F64), Ctx(CFG, qat=True)
    batch, pools = model.fresh(params, ids, ctx)
    _, pools = model.step(params, pools, batch, ctx)
    pool = pools.layers[1]
    assert pool.keys is not None
    assert pool.compressed is not None
    for rows in (pool.window, pool.compressed.rows):
        assert torch.equal(quant.round_kv(rows, CFG.rope_dim), rows)
        assert not torch.equal(quant.qdq_fp8(rows[:, -16:], 16), rows[:, -16:])
    assert torch.equal(quant.qdq_fp4(pool.keys.rows, 32), pool.keys.rows)


def test_qat_rounds_keys_as_keys_where_widths_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexer queries and keys are rounded alike, even if a key is as wide as a key/value row."""
    cfg = tiny.config("wc", 1, head_dim=128, rope_dim=64, index_dim=128, index_topk=2)
    rounded: list[tuple[int, ...]] = []
    real = quant.round_index
    monkeypatch.setattr(
        quant, "round_index", lambda x: (rounded.append(tuple(x.shape)), real(x))[1]
    )
    model.forward(tiny.params(cfg), tiny.tokens(cfg, 1, 32), Ctx(cfg, qat=True))
    assert rounded == [(32 // cfg.csa_rate, 128), (32, cfg.index_heads, 128)]
