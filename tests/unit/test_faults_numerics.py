"""Faults that others met (themes A, E and G of the log of reports), one test per case.

Cases with a test elsewhere: A1 test_values, A4 (table) test_rope, A8 and E9 parity, E1 E3 E4
test_route, E8 test_quant, E6 (Sinkhorn) test_mhc, E6 (clamp) test_ops, G4 test_capture.
"""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4 import attention, collectives, config_json, layer, model, mtp, state, tree
from dsv4.batch import Batch
from dsv4.config import Config, preset
from dsv4.context import Ctx
from dsv4.mesh import Mesh
from dsv4.params import Attention
from dsv4.site import Site, turn
from tests import reference, tiny

F64 = torch.float64
MIXES = {"wchc": 1, "hhc": 2, "cw": 0, "hw": 0}


def _prefilled(cfg: Config, ids: Tensor, pages: int) -> tuple[Tensor, state.Pools]:
    params = tiny.params(cfg, 3, F64)
    pools = tiny.pools(cfg, 1, pages, F64)
    batch = tiny.batch(cfg, [(ids, 0)], pages=pages, block=8)
    out, pools = model.step(params, pools, batch, Ctx(cfg))
    return out.logits, pools


# A. Chunks, decode, rope.


@pytest.mark.parametrize("kinds", list(MIXES))
def test_a3_decode_equals_prefilling_again(kinds: str) -> None:
    """Case A3: 64 tokens one at a time, 8 windows, each against a new prefill of the prefix."""
    cfg = tiny.short(kinds, MIXES[kinds], mtp=0)
    params, ids = tiny.params(cfg, 3, F64), tiny.tokens(cfg, 1, 67, 1)[0]
    pages = -(-67 // cfg.page_tokens)
    _, pools = _prefilled(cfg, ids[:3], pages)
    for n in range(3, 67):
        batch = tiny.batch(cfg, [(ids[n : n + 1], n)], pages=pages)
        out, pools = model.step(params, pools, batch, Ctx(cfg))
        want = model.forward(params, ids[None, : n + 1], Ctx(cfg))[0, -1]
        torch.testing.assert_close(out.logits[0], want, rtol=0, atol=1e-11, msg=str(n))


def test_a4_a_wrong_rope_shows_within_four_windows() -> None:
    """Case A4: theta 10000 on compressed layers, no YaRN there, or YaRN everywhere: all visible."""
    cfg = tiny.short("wch", 1, mtp=0)
    params, ids = tiny.params(cfg, 3, F64), tiny.tokens(cfg, 1, 4 * cfg.window, 1)
    got = model.forward(params, ids, Ctx(cfg))[0]
    run = tiny.run(cfg)
    want, _ = reference.forward(params, ids[0].tolist(), run)
    assert (got - want).abs().max() < 1e-11
    bare = reference.frequencies(cfg.compress_theta, cfg.rope_dim)
    for wrong in (
        dataclasses.replace(run, scaled=run.plain),
        dataclasses.replace(run, scaled=bare),
        dataclasses.replace(run, plain=run.scaled),
    ):
        other, _ = reference.forward(params, ids[0].tolist(), wrong)
        assert (got - other).abs().max() > 0.01


@pytest.mark.parametrize("axis", ["dp", "tp", "ep", "sp"])
def test_a9_a11_a12_a13_a17_a_split_is_refused(axis: str) -> None:
    """Cases A9, A11, A12, A13, A17: wrong text under tensor, expert or sequence splits.

    No split exists yet: a mesh that asks for one is refused by name, never run as if it were one.
    """
    sizes = tuple(2 if a == axis else 1 for a in Mesh().axes)
    with pytest.raises(ValueError, match=f"'{axis}' has size 2"):
        Ctx(tiny.short("w", 0, mtp=0), mesh=Mesh(sizes=sizes))
    with pytest.raises(ValueError, match=f"'{axis}' has size 2"):
        collectives.psum(torch.ones(1), axis, Mesh(sizes=sizes))


def test_a10_drafting_leaves_the_backbone_alone() -> None:
    """Case A10: characters lost with drafts on. Drafting writes the draft's own pool only."""
    cfg = tiny.short("wch", 1)
    params, ids = tiny.params(cfg, 3, F64), tiny.tokens(cfg, 1, 20, 1)
    batch, pools = model.fresh(params, ids, Ctx(cfg))
    out, pools = model.step(params, pools, batch, Ctx(cfg))
    before = tree.tmap(torch.clone, pools)
    _, after = mtp.draft(params, pools, out.hidden.roll(1, 0), batch, Ctx(cfg))
    for a, b, c in zip(
        tree.leaves(before.layers),
        tree.leaves(after.layers),
        tree.leaves(pools.layers),
        strict=True,
    ):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert before.mtp is not None
    assert after.mtp is not None
    assert not torch.equal(before.mtp.window, after.mtp.window)


def test_a16_a_long_greedy_run_stays_on_the_dense_path() -> None:
    """Case A16: foreign tokens deep inside a long stream. 200 greedy tokens, 25 windows, by cache;
    then one dense pass over the result must have chosen each of them."""
    cfg = tiny.short("wchc", 1, mtp=0)
    params = tiny.params(cfg, 3, F64)
    ids = tiny.tokens(cfg, 1, 5, 9)[0].tolist()
    logits, pools = _prefilled(cfg, torch.tensor(ids), 26)
    rows = [logits[-1]]
    ids.append(int(logits[-1].argmax()))
    while len(ids) < 205:
        batch = tiny.batch(cfg, [(torch.tensor(ids[-1:]), len(ids) - 1)], pages=26)
        out, pools = model.step(params, pools, batch, Ctx(cfg))
        rows.append(out.logits[0])
        ids.append(int(out.logits[0].argmax()))
    dense = model.forward(params, torch.tensor([ids]), Ctx(cfg))[0, 4:-1]
    torch.testing.assert_close(torch.stack(rows), dense, rtol=0, atol=1e-10)
    assert dense.argmax(-1).tolist() == ids[5:]
    assert len(set(ids[5:])) > 10  # not stuck on a few tokens


@pytest.mark.parametrize("block", [1, 4])
def test_a18_stale_memory_reaches_nothing(block: int) -> None:
    """Case A18 (the poison test): every pool row but page 0 and slot 0 starts as NaN, bit for bit
    the same logits, and no NaN is left among the rows that hold the sequence."""
    cfg = tiny.short("wchc", 1)
    ctx, params = Ctx(cfg), tiny.params(cfg, 3)
    ids = tiny.tokens(cfg, 1, 37, 1)[0]

    def run(pools: state.Pools) -> list[Tensor]:
        out = []
        for start, stop in ((0, 3), (3, 18), (18, 19), (19, 36), (36, 37)):
            batch = tiny.batch(cfg, [(ids[start:stop], start)], pages=6, block=block, padding=2)
            got, pools = model.step(params, pools, batch, ctx)
            drafted, pools = mtp.draft(params, pools, got.hidden, batch, ctx)
            out += [got.logits, drafted.logits]
        return out

    clean = tiny.pools(cfg, 1, 6, torch.float32)
    spec = tree.paths(state.pool_spec(cfg, state.PoolSizes(
        history_pages=7, window_pages=7, slots=2, page_tokens=cfg.page_tokens
    )))  # fmt: skip
    poisoned = {}
    for name, pool in tree.paths(clean).items():
        keep = pool.shape[0] // (2 if spec[name].kind == "open inputs" else 7)
        poisoned[name] = torch.full_like(pool, torch.nan)
        poisoned[name][:keep] = 0
    for a, b in zip(run(clean), run(tree.from_paths(clean, poisoned)), strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


# E. Router, experts, attention: E2 and the traps of E6.


@pytest.mark.parametrize("value", ["sigmoid", "softmax", "sqrtsoftplus2", "", 1])
@pytest.mark.parametrize("field", ["scoring_func", "score_func"])
def test_e2_an_unknown_score_function_is_refused(field: str, value: object) -> None:
    """Case E2: a router without sqrt-softplus picked other experts in silence."""
    raw = dict(config_json.write(preset("flash")))
    for name in ("scoring_func", "score_func"):
        raw.pop(name, None)
    assert config_json.read(raw | {field: "sqrtsoftplus"}).cfg == preset("flash")
    with pytest.raises(ValueError, match=rf"{field}.*sqrtsoftplus"):
        config_json.read(raw | {field: value})


@dataclasses.dataclass(frozen=True)
class Stage:
    """One attention layer with its input: 6 tokens from position `start`."""

    p: Attention
    x: Tensor
    batch: Batch
    site: Site
    pool: state.LayerPool


def _stage(kinds: str = "w", start: int = 0) -> Stage:
    """Keys exist from `start` on, so that only positions differ between two starts."""
    cfg = tiny.short(kinds, 0, mtp=0)
    params = tiny.params(cfg, 3, F64)
    batch = tiny.batch(cfg, [(torch.arange(6), start)], pages=4, block=4, page_tokens=8)
    plan = cfg.plans[0]
    angles = turn(batch.positions, (plan.rope,), cfg.rope_dim, F64)[plan.rope]
    pools = tiny.pools(cfg, 1, 4, F64, page_tokens=8)
    site = Site(plan, Ctx(cfg), pools.page_tokens, pools.drafts, *angles, first_key=start)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, cfg.dim, generator=generator, dtype=F64)
    return Stage(params.layers[0].attn, x, batch, site, pools.layers[0])


def _attended(s: Stage, p: Attention | None = None) -> Tensor:
    """Attention output of the sublayer."""
    return layer.attend(p or s.p, s.pool, s.x, s.batch, s.site)[0]


def test_e6_queries_are_normed_per_head_after_wq_b() -> None:
    """Case E6 (per-head norm of Q): unit mean square per head; a head's scale has no effect."""
    s = _stage()
    heads, width = s.site.ctx.cfg.heads, s.site.ctx.cfg.head_dim
    _, q, _ = attention.project(s.p, s.x, s.site)
    torch.testing.assert_close(
        q.square().mean(-1), torch.ones(6, heads, dtype=F64), rtol=1e-5, atol=0
    )
    factor = torch.tensor([1.0, 7.0, 0.3, 2.0], dtype=F64).repeat_interleave(width)[:, None]
    loud = dataclasses.replace(s.p, wq_b=s.p.wq_b * factor)
    torch.testing.assert_close(_attended(s, loud), _attended(s), rtol=1e-4, atol=1e-5)
    # Per head, not over all heads: one norm over H * D would keep the ratios.
    _, q_loud, _ = attention.project(loud, s.x, s.site)
    torch.testing.assert_close(q_loud, q, rtol=1e-4, atol=1e-5)


def test_e6_the_output_is_rotated_back() -> None:
    """Case E6 (inverse rope on the attention output): only then does the output depend on
    distances alone, so that moving all positions by 17 changes nothing."""
    here, there = _stage(start=0), _stage(start=17)
    got = [_attended(s) for s in (here, there)]
    torch.testing.assert_close(got[0], got[1], rtol=0, atol=1e-6)  # float32 frequencies
    assert got[0].abs().max() > 0.1

    def unturned(s: Stage) -> Tensor:
        still = dataclasses.replace(s.site, cos=torch.ones_like(s.site.cos), sin=s.site.sin * 0)
        _, q, kv = attention.project(s.p, s.x, s.site)
        pool = dataclasses.replace(s.pool, window=s.pool.window.clone())
        row = s.batch.window[1, s.batch.positions // s.site.page_tokens] * s.site.page_tokens
        pool.window[row + s.batch.positions % s.site.page_tokens] = kv
        return attention.attend(s.p, q, pool, None, s.batch, still)

    assert (unturned(here) - unturned(there)).abs().max() > 0.05


@pytest.mark.parametrize("kinds", ["w", "c"])
def test_e6_scale_and_sink_by_hand(kinds: str) -> None:
    """Case E6 (plain head_dim ** -0.5, sink column), pitfall 10: at position 0 there is one key.

    o = kv e^s / (e^s + e^sink), s = q . kv / sqrt(D), with or without YaRN, sink unscaled.
    """
    s = _stage(kinds)
    _, q, kv = attention.project(s.p, s.x, s.site)
    score = q[0] @ kv[0] * s.site.ctx.cfg.head_dim**-0.5
    share = score.exp() / (score.exp() + s.p.attn_sink.exp())
    assert share.min() < 0.9
    want = attention.output(s.p, (share[:, None] * kv[0])[None], s.site)
    torch.testing.assert_close(_attended(s)[:1], want, rtol=1e-12, atol=1e-12)
    mscale = 0.1 * torch.log(torch.tensor(16.0, dtype=F64)) + 1
    scaled = (score * mscale**2).exp()
    assert (scaled / (scaled + s.p.attn_sink.exp()) - share).abs().max() > 1e-3


@pytest.mark.parametrize("sink", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_e6_sinks_far_out_stay_finite(sink: float) -> None:
    """A sink far below drops out of the denominator; one far above takes everything."""
    s = _stage("c")
    p = dataclasses.replace(s.p, attn_sink=torch.full_like(s.p.attn_sink, sink))
    y = _attended(s, p)
    assert y.isfinite().all()
    _, _, kv = attention.project(s.p, s.x, s.site)
    if sink <= -30:
        own = attention.output(p, kv[:1].expand(s.site.ctx.cfg.heads, -1)[None], s.site)
        torch.testing.assert_close(y[:1], own, rtol=1e-9, atol=1e-9)
    if sink >= 30:
        assert y.abs().max() < 1e-6


def test_e6_groups_are_consecutive_heads() -> None:
    """Grouped output: heads 0, 1 form group 0. A swap across groups changes the result, and a swap
    of the two groups with their weights does not."""
    s = _stage()
    o = torch.randn(6, 4, 80, dtype=F64)
    y = attention.output(s.p, o, s.site)
    swapped = attention.output(s.p, o[:, [2, 1, 0, 3]], s.site)
    assert (y - swapped).abs().max() > 0.1
    rank = s.site.ctx.cfg.o_rank
    p = dataclasses.replace(
        s.p,
        wo_a=s.p.wo_a.flip(0),
        wo_b=torch.cat((s.p.wo_b[:, rank:], s.p.wo_b[:, :rank]), dim=1),
    )
    torch.testing.assert_close(attention.output(p, o[:, [2, 3, 0, 1]], s.site), y)


@pytest.mark.parametrize("kinds", ["wchc", "hcw"])
def test_e3_a_bfloat16_model_keeps_float32_where_it_matters(kinds: str) -> None:
    """Case E3 (softmax): router, hyper-connections, compressors, sinks and logits are float32 in a
    bfloat16 model, and attention over bfloat16 keys is one rounding away from exact."""
    cfg = tiny.short(kinds, 1)
    params = tiny.params(cfg, 3, torch.bfloat16)
    for name, t in tree.paths(params).items():
        wide = (".hc_", ".gate", ".bias", ".ape", ".wgate", "compressor.wkv", "attn_sink")
        if any(w in f".{name}" for w in wide) or name == "head":
            assert t.dtype == torch.float32, name
    ids = tiny.tokens(cfg, 1, 24, 1)
    assert model.forward(params, ids, Ctx(cfg)).dtype == torch.float32
    batch, pools = model.fresh(params, ids, Ctx(cfg), 8)
    plan = cfg.mtp_plan
    cos, sin = turn(batch.positions, (plan.rope,), cfg.rope_dim, torch.float32)[plan.rope]
    site = Site(plan, Ctx(cfg), pools.page_tokens, pools.drafts, cos, sin)
    assert pools.mtp is not None
    window = torch.randn_like(pools.mtp.window)
    window[: site.page_tokens] = 0
    pool = dataclasses.replace(pools.mtp, window=window)
    q = (torch.randn(24, cfg.heads, cfg.head_dim) * 2).bfloat16()
    assert params.mtp is not None
    p = params.mtp.block.attn
    got = attention.attend(p, q, pool, None, batch, site)
    exact = attention.attend(
        dataclasses.replace(p, attn_sink=p.attn_sink.double()),
        q.double(),
        dataclasses.replace(pool, window=window.double()),
        None,
        batch,
        dataclasses.replace(site, cos=cos.double(), sin=sin.double()),
    )
    assert got.dtype == torch.bfloat16
    # Half an ulp of both members of a pair before it is rotated back, and half an ulp after.
    assert (got.double() - exact).abs().max() < (2**0.5 + 1) * 2.0**-9 * exact.abs().max()


# G. What transformers met.


@pytest.mark.parametrize("kinds", ["w", "c", "h", "wchc"])
def test_g1_a_later_token_changes_nothing_earlier(kinds: str) -> None:
    """Case G1: window, CSA with top-k biting, HCA, and all together; at every boundary."""
    cfg = tiny.short(kinds, 0, mtp=0)
    params, ids = tiny.params(cfg, 3, F64), tiny.tokens(cfg, 1, 44, 1)
    before = model.forward(params, ids, Ctx(cfg))[0]
    for t in (0, 2, 3, 4, 7, 8, 22, 23, 31, 42):
        other = ids.clone()
        other[0, t + 1 :] = (other[0, t + 1 :] + 7) % cfg.vocab
        after = model.forward(params, other, Ctx(cfg))[0]
        assert (after[: t + 1] - before[: t + 1]).abs().max() < 1e-12, t
        assert (after[t + 1 :] - before[t + 1 :]).abs().amax(-1).min() > 1e-3, t


@pytest.mark.parametrize(("kinds", "reach"), [("w", 8), ("c", 44), ("h", 44)])
def test_g1_an_earlier_token_does_reach_as_far_as_it_should(kinds: str, reach: int) -> None:
    """The other side of G1: one layer sees `window` tokens back and, compressed, the whole past.

    Otherwise a mask that hides too much would pass.
    """
    cfg = tiny.short(kinds, 0, mtp=0, index_topk=11)
    params, ids = tiny.params(cfg, 3, F64), tiny.tokens(cfg, 1, 44, 1)
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % cfg.vocab
    diff = (model.forward(params, ids, Ctx(cfg)) - model.forward(params, other, Ctx(cfg)))[0]
    changed = diff.abs().amax(-1)
    assert changed[:reach].min() > 1e-9
    if reach < 44:
        assert changed[reach:].max() == 0


def test_g3_the_reference_stands_alone() -> None:
    """Case G3: the float64 reference uses no code of ours, nor of transformers: names only."""
    source = Path(reference.__file__).read_text(encoding="utf-8")
    modules = set()
    for n in ast.walk(ast.parse(source)):
        if isinstance(n, ast.Import):
            modules |= {a.name for a in n.names}
        elif isinstance(n, ast.ImportFrom):
            modules.add(n.module)
    assert modules == {"dataclasses", "math", "torch", "dsv4.config", "dsv4.params"}
