"""The lightning indexer: scores, visibility, choice. Spec section 7."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dsv4 import index, layer, model, ops, quant
from dsv4.batch import Batch
from dsv4.context import Ctx
from dsv4.params import Attention
from dsv4.site import Site, turn
from dsv4.state import LayerPool
from tests import reference, tiny

F64 = torch.float64
CFG = tiny.short("c", 0, mtp=0)
LENGTH = 44


@dataclasses.dataclass(frozen=True)
class Stage:
    """A CSA layer whose caches hold a whole prompt."""

    p: Attention
    pool: LayerPool
    x: Tensor
    qr: Tensor
    batch: Batch
    site: Site


def _stage(ctx: Ctx, block: int = 4) -> Stage:
    params = tiny.params(CFG, 6, F64)
    ids = tiny.tokens(CFG, 1, LENGTH)
    batch, pools = model.fresh(params, ids, ctx, block)
    plan = CFG.plans[0]
    angles = turn(batch.positions, (plan.rope,), CFG.rope_dim, F64)[plan.rope]
    site = Site(plan, ctx, pools.page_tokens, pools.drafts, *angles)
    p = params.layers[0].attn
    x = torch.randn(LENGTH, CFG.dim, dtype=F64)
    _, pool = layer.attend(p, pools.layers[0], x, batch, site)
    qr = reference.rms(x @ p.wq_a.t(), p.q_norm, CFG.norm_eps)
    return Stage(p, pool, x, qr, batch, site)


def _kept(s: Stage) -> list[list[int]]:
    """Visible picks of every position, by the code under test."""
    assert s.p.indexer is not None
    assert s.pool.keys is not None
    picks = index.select(s.p.indexer, s.pool.keys, s.x, s.qr, s.batch, s.site)
    assert picks is not None
    flat = picks.flatten(0, 1)[s.batch.place]
    return [[e for e in row.tolist() if e < (t + 1) // CFG.csa_rate] for t, row in enumerate(flat)]


@pytest.mark.parametrize("qat", [False, True], ids=["plain", "qat"])
@pytest.mark.parametrize("block", [1, 4, 64])
def test_the_choice_equals_the_text(block: int, qat: bool) -> None:
    """Each query's entries, as a set; never one whose group is not complete."""
    s = _stage(Ctx(CFG, qat=qat), block)
    run = tiny.run(CFG, qat=qat)
    assert s.p.indexer is not None
    keys = reference.entries(
        s.p.indexer.compressor, s.x, CFG.csa_rate, run.scaled, run, indexer=True
    )
    kept = _kept(s)
    for t, entries in enumerate(kept):
        want = reference.selected(s.p, s.x[t], s.qr[t], keys, t, run)
        assert entries == sorted(want), t
        assert len(entries) == min(CFG.index_topk, (t + 1) // CFG.csa_rate)
    assert run.notes.choice > 1e-9
    assert kept[-1] != list(range(CFG.index_topk))  # not simply the oldest
    assert kept[-1] != list(range(LENGTH // 4 - CFG.index_topk, LENGTH // 4))  # nor the newest


def _scores(iq: Tensor, w: Tensor, keys_UEJ: Tensor, batch: Batch) -> Tensor:
    """Scores of the same entries for every query of a block, all visible."""
    rows = torch.arange(keys_UEJ[..., 0].numel()).reshape(keys_UEJ.shape[:2])
    visible = torch.ones(*batch.blocks.shape, rows.shape[1], dtype=torch.bool)
    return ops.scores(iq, w, ops.Keys(keys_UEJ.flatten(0, 1), rows, visible), batch.blocks)


def test_scores_by_hand() -> None:
    """relu before the weight, which may be negative; the sum is over heads."""
    s = _stage(Ctx(CFG), 4)
    iq = torch.zeros(LENGTH, CFG.index_heads, CFG.index_dim, dtype=F64)
    iq[:, 0, 0], iq[:, 9, 1] = 2.0, 1.0
    w = torch.zeros(LENGTH, CFG.index_heads, dtype=F64)
    w[:, 0], w[:, 9] = -3.0, 0.5
    keys = torch.zeros(11, 3, CFG.index_dim, dtype=F64)
    keys[:, 0, 0], keys[:, 1, 1], keys[:, 2, 0] = 1.0, 4.0, -1.0
    got = _scores(iq, w, keys, s.batch)
    assert got.shape == (11, 4, 3)
    # -3 relu(2), 0.5 relu(4), -3 relu(-2)
    assert torch.equal(got[0, 0], torch.tensor([-6.0, 2.0, 0.0], dtype=F64))
    assert torch.equal(got, got[:1, :1].expand_as(got))


def test_visibility_is_by_the_end_of_the_group() -> None:
    """Pitfall 6: entry j is there for position t iff j < (t + 1) // r."""
    s = _stage(Ctx(CFG), 4)
    rows, visible = index.entry_rows(s.batch, s.site.page_tokens // 4, 4)
    flat = visible.flatten(0, 1)[s.batch.place]
    for t in range(LENGTH):
        assert flat[t].tolist() == [j < (t + 1) // 4 for j in range(flat.shape[1])]
    assert (rows[0] == torch.where(torch.arange(rows.shape[1]) < 1, rows[0], 0)).all()


def test_hidden_entries_are_never_kept_though_they_score_best() -> None:
    """Pitfall 13, case G1: negative scores lose against hidden zeros only if those are masked.

    All head weights are made negative, so that every visible score is at most 0.
    """
    s = _stage(Ctx(CFG), 4)
    assert s.p.indexer is not None
    w = s.x.new_zeros(CFG.index_heads, CFG.dim)
    w[:, 0] = -1.0
    x = s.x.clone()
    x[:, 0] = 3.0
    p = dataclasses.replace(s.p, indexer=dataclasses.replace(s.p.indexer, weights_proj=w))
    kept = _kept(dataclasses.replace(s, p=p, x=x))
    for t, entries in enumerate(kept):
        assert len(entries) == min(CFG.index_topk, (t + 1) // CFG.csa_rate), t


def test_without_more_entries_than_top_k_nothing_is_scored() -> None:
    s = _stage(Ctx(dataclasses.replace(CFG, index_topk=12)), 4)
    assert s.p.indexer is not None
    assert s.pool.keys is not None
    assert index.select(s.p.indexer, s.pool.keys, s.x, s.qr, s.batch, s.site) is None


def test_no_norm_per_head_in_the_indexer() -> None:
    """Pitfall 9: queries scale with wq_b, and so do scores; a per-head norm would undo it."""
    s = _stage(Ctx(CFG))
    assert s.p.indexer is not None
    loud = dataclasses.replace(s.p.indexer, wq_b=s.p.indexer.wq_b * 3)
    q, w = index.queries(s.p.indexer, s.x, s.qr, s.site)
    q3, w3 = index.queries(loud, s.x, s.qr, s.site)
    torch.testing.assert_close(q3, 3 * q)
    assert torch.equal(w, w3)
    norms = q.square().mean(-1)
    assert norms.std() > 0.05


def test_hadamard_leaves_unrounded_scores() -> None:
    """Orthogonal: with the transform on both sides and no fp4 the scores are the same."""
    s = _stage(Ctx(CFG))
    assert s.p.indexer is not None
    q, w = index.queries(s.p.indexer, s.x, s.qr, s.site)
    keys = torch.randn(11, 5, CFG.index_dim, dtype=F64)
    plain = _scores(q, w, keys, s.batch)
    turned = _scores(quant.hadamard(q), w, quant.hadamard(keys), s.batch)
    torch.testing.assert_close(plain, turned, rtol=0, atol=1e-12)
