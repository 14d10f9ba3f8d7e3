"""The draft module against a float64 transcription of spec section 11; case C6."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dsv4 import config, model, mtp, table
from dsv4.config import Config, Kind, Rope, Router
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools
from tests import reference, tiny

F64 = torch.float64
CFG = tiny.short("chw", 1)  # no window layer first: the draft shares no plan with layer 0
LENGTH, PAGES = 30, 5


def _backbone(params: Params, ids: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor, Pools]:
    pools = tiny.pools(ctx.cfg, 1, PAGES, params.embed.dtype)
    batch = tiny.batch(ctx.cfg, [(ids, 0)], pages=PAGES, block=4)
    out, pools = model.step(params, pools, batch, ctx)
    return out.logits, out.hidden, pools


def _drafted(
    params: Params, pools: Pools, streams: Tensor, ids: Tensor, start: int, ctx: Ctx
) -> tuple[Tensor, Tensor, Pools]:
    """`ids` stand at `start` ..; `streams` are those of the positions before each."""
    batch = tiny.batch(ctx.cfg, [(ids, start)], pages=PAGES, block=4)
    out, pools = mtp.draft(params, pools, streams, batch, ctx)
    return out.logits, out.hidden, pools


@pytest.mark.parametrize("qat", [False, True], ids=["plain", "qat"])
def test_logits_equal_the_text(qat: bool) -> None:
    """From the backbone's streams, in one chunk; position p pairs h_p with the token at p + 1."""
    params, ids = tiny.params(CFG, 4, F64), tiny.tokens(CFG, 1, LENGTH, 2)[0]
    ctx, run = Ctx(CFG, qat=qat), tiny.run(CFG, qat=qat)
    _, hidden, pools = _backbone(params, ids, ctx)
    got, own, _ = _drafted(params, pools, hidden[:-1], ids[1:], 1, ctx)
    _, h = reference.forward(params, ids.tolist(), run)
    want, streams = reference.draft(params, h[:-1], ids[1:].tolist(), run)
    assert run.notes.choice > 1e-9
    assert run.notes.rounding > 1.2e-7
    assert want.abs().max() > 2
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    torch.testing.assert_close(own, streams, rtol=0, atol=1e-11)
    logits, drafted = mtp.forward(params, ids[None], ctx)
    torch.testing.assert_close(drafted[0, 1:], want, rtol=0, atol=1e-11)
    torch.testing.assert_close(logits, model.forward(params, ids[None], ctx), rtol=0, atol=1e-12)


def test_drafting_from_its_own_streams() -> None:
    """Two more drafts, each from the module's own streams and the token drafted before it.

    True tokens come in three chunks, then single tokens, the window turning over.
    """
    params, ids = tiny.params(CFG, 4, F64), tiny.tokens(CFG, 1, LENGTH, 2)[0]
    ctx, run = Ctx(CFG), tiny.run(CFG)
    _, hidden, pools = _backbone(params, ids, ctx)
    got, own, at = torch.empty(0), torch.empty(0), 1
    for stop in (4, 11, LENGTH):
        got, own, pools = _drafted(params, pools, hidden[at - 1 : stop - 1], ids[at:stop], at, ctx)
        at = stop
    _, h = reference.forward(params, ids.tolist(), run)
    tokens, inputs = ids[1:].tolist(), h[:-1]
    drafted = []
    for step in range(3):
        want, streams = reference.draft(params, inputs, tokens, run)
        torch.testing.assert_close(got[-1], want[-1], rtol=0, atol=1e-11)
        token = int(got[-1].argmax())
        assert token == int(want[-1].argmax())
        drafted.append(token)
        tokens, inputs = [*tokens, token], torch.cat((inputs, streams[-1:]))
        got, own, pools = _drafted(
            params, pools, own[-1:], torch.tensor([token]), LENGTH + step, ctx
        )
    assert len(set(drafted)) > 1


def test_provisional_rows_are_overwritten() -> None:
    """After a rejected draft the next round writes the same rows, as if there had been none."""
    params, ids = tiny.params(CFG, 4, F64), tiny.tokens(CFG, 1, LENGTH, 2)[0]
    ctx = Ctx(CFG)
    _, hidden, pools = _backbone(params, ids, ctx)
    _, own, clean = _drafted(params, pools, hidden[:18], ids[1:19], 1, ctx)
    _, _, dirty = _drafted(params, clean, own[-1:], torch.tensor([9]), 19, ctx)
    want, _, _ = _drafted(params, clean, hidden[18:-1], ids[19:], 19, ctx)
    got, _, _ = _drafted(params, dirty, hidden[18:-1], ids[19:], 19, ctx)
    assert torch.equal(got, want)


def test_the_draft_has_its_own_plan() -> None:
    """Case C6: window kind, plain theta without YaRN, top-k router, own parameters, whatever the
    backbone's layers are; and the config object is not touched by building and running."""
    cfg = tiny.short("cc", 2)
    before, copy = dataclasses.asdict(cfg), dataclasses.replace(cfg)
    plan = cfg.mtp_plan
    assert plan.kind is Kind.WINDOW
    assert plan.rate == 0
    assert plan.router is Router.TOPK
    assert plan.rope == Rope(theta=cfg.rope_theta, yarn=None)
    assert all(p.rope.yarn is not None for p in cfg.plans)
    spec = table.spec(cfg)
    assert spec.mtp is not None
    assert spec.mtp.block.attn.compressor is None
    assert spec.mtp.block.ffn.bias is not None
    assert spec.mtp.block.ffn.tid2eid is None
    params = table.init(cfg, torch.Generator().manual_seed(0), F64)
    mtp.forward(params, tiny.tokens(cfg, 1, 9), Ctx(cfg))
    assert dataclasses.asdict(cfg) == before
    assert cfg == copy
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.yarn = None  # type: ignore[misc]


def test_yarn_on_the_draft_would_show() -> None:
    """The fault of C6 itself: with the backbone's scaled table the logits are others."""
    params, ids = tiny.params(CFG, 4, F64), tiny.tokens(CFG, 1, LENGTH, 2)[0]
    run = tiny.run(CFG)
    _, h = reference.forward(params, ids.tolist(), run)
    want, _ = reference.draft(params, h[:-1], ids[1:].tolist(), run)
    faulty = dataclasses.replace(run, plain=run.scaled)
    wrong, _ = reference.draft(params, h[:-1], ids[1:].tolist(), faulty)
    assert (want - wrong).abs().max() > 0.01


def test_the_draft_reads_the_streams_before_the_collapse() -> None:
    """Pitfall 12: four streams, normed one by one; equal streams would give other logits."""
    params, ids = tiny.params(CFG, 4, F64), tiny.tokens(CFG, 1, 12, 2)[0]
    ctx = Ctx(CFG)
    _, hidden, pools = _backbone(params, ids, ctx)
    assert hidden.shape == (12, CFG.streams, CFG.dim)
    got, _, _ = _drafted(params, pools, hidden[:-1], ids[1:], 1, ctx)
    same = hidden.mean(1, keepdim=True).expand_as(hidden)
    wrong, _, _ = _drafted(params, pools, same[:-1], ids[1:], 1, ctx)
    assert (got - wrong).abs().max() > 0.1


def test_position_0_is_no_key() -> None:
    """Nothing stands before position 0, so the module's row there is never attended to."""
    params, ids = tiny.params(CFG, 4, F64), tiny.tokens(CFG, 1, 12, 2)[0]
    ctx = Ctx(CFG)
    _, hidden, pools = _backbone(params, ids, ctx)
    want, _, _ = _drafted(params, pools, hidden[:-1], ids[1:], 1, ctx)
    noise = torch.randn(1, CFG.streams, CFG.dim, dtype=F64)
    got, _, _ = _drafted(params, pools, torch.cat((noise, hidden[:-1])), ids, 0, ctx)
    torch.testing.assert_close(got[1:], want, rtol=0, atol=1e-12)


def test_a_model_without_the_module_says_so() -> None:
    cfg: Config = dataclasses.replace(CFG, mtp=0)
    params = tiny.params(cfg, 4)
    batch, pools = model.fresh(params, tiny.tokens(cfg, 1, 4), Ctx(cfg))
    hidden = torch.zeros(4, cfg.streams, cfg.dim)
    with pytest.raises(ValueError, match="mtp = 1"):
        mtp.draft(params, pools, hidden, batch, Ctx(cfg))
    assert config.preset("flash").mtp == config.preset("pro").mtp == 1
