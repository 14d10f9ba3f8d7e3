"""`step` as one captured graph. Proof 7 of issue 2; cases G4 and K6."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dsv4 import model, mtp, tree
from dsv4.batch import Batch, StepOut
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools
from tests import tiny

# Few Sinkhorn iterations: they are unrolled, and the time of a capture is that of its nodes.
CFG = tiny.short("wch", 1, sinkhorn=2)
PAGES = 6


@dataclasses.dataclass(frozen=True)
class Scene:
    """A step that is about to happen: two sequences some way in."""

    params: Params
    pools: Pools
    batch: Batch
    ctx: Ctx


def _scene(kind: str, *, qat: bool = False, dtype: torch.dtype = torch.float32) -> Scene:
    """`decode`: one token each. `mixed`: a chunk of 9, a single token, and padding."""
    ctx, params = Ctx(CFG, qat=qat), tiny.params(CFG, 5, dtype)
    a, b = tiny.tokens(CFG, 2, 40)
    pools = tiny.pools(CFG, 2, PAGES, dtype)
    batch = tiny.batch(CFG, [(a[:21], 0), (b[:14], 0)], pages=PAGES, block=4)
    with torch.no_grad():
        _, pools = model.step(params, pools, batch, ctx)
    chunks = (
        [(a[21:22], 21), (b[14:15], 14)] if kind == "decode" else [(a[21:30], 21), (b[14:15], 14)]
    )
    block, padding = (1, 0) if kind == "decode" else (4, 3)
    batch = tiny.batch(CFG, chunks, pages=PAGES, block=block, padding=padding)
    return Scene(params, pools, batch, ctx)


def _equal(got: tuple[StepOut, Pools], want: tuple[StepOut, Pools]) -> None:
    for (name, a), b in zip(tree.paths(got).items(), tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, name
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)


@pytest.fixture(autouse=True)
def _forget() -> None:
    """Shapes seen by one test must not become symbols of the next."""
    torch._dynamo.reset()


@pytest.mark.parametrize(("kind", "qat"), [("decode", True), ("mixed", False)])
@torch.no_grad()
def test_a_step_is_one_graph(kind: str, qat: bool) -> None:
    s = _scene(kind, qat=qat)
    want = model.step(s.params, s.pools, s.batch, s.ctx)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.step, fullgraph=True, dynamic=False, backend=counter)
    _equal(compiled(s.params, s.pools, s.batch, s.ctx), want)
    assert counter.frame_count == 1
    assert want[0].logits.abs().max() > 1


@torch.no_grad()
def test_no_graph_break_is_found() -> None:
    """By Dynamo's own account, not only by the absence of an error."""
    s = _scene("mixed")
    report = torch._dynamo.explain(model.step)(s.params, s.pools, s.batch, s.ctx)
    assert report.graph_count == 1
    assert report.graph_break_count == 0, report.break_reasons


@torch.no_grad()
def test_the_draft_is_one_graph() -> None:
    s = _scene("mixed")
    out, pools = model.step(s.params, s.pools, s.batch, s.ctx)
    want = mtp.draft(s.params, pools, out.hidden, s.batch, s.ctx)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mtp.draft, fullgraph=True, dynamic=False, backend=counter)
    _equal(compiled(s.params, pools, out.hidden, s.batch, s.ctx), want)
    assert counter.frame_count == 1


@torch.no_grad()
def test_fixed_shapes_replay_one_graph() -> None:
    """Case G4: caches of fixed shape. One capture decodes across group, page and window borders.

    Equal to eager at each of 16 steps, and nothing is compiled after the first.
    """
    s = _scene("decode")
    a, b = tiny.tokens(CFG, 2, 40)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.step, fullgraph=True, dynamic=False, backend=counter)
    ours = theirs = s.pools
    for i in range(16):
        chunks = [(a[21 + i : 22 + i], 21 + i), (b[14 + i : 15 + i], 14 + i)]
        batch = tiny.batch(CFG, chunks, pages=PAGES)
        want, theirs = model.step(s.params, theirs, batch, s.ctx)
        got, ours = compiled(s.params, ours, batch, s.ctx)
        _equal((got, ours), (want, theirs))
    assert counter.frame_count == 1


def test_a_captured_gradient_equals_eager() -> None:
    """Forward and backward captured together, through autograd."""
    s = _scene("mixed", dtype=torch.float64)
    like = s.params

    def gradient(step: object) -> list[Tensor]:
        own = tree.tmap(lambda t: t.clone().requires_grad_() if t.is_floating_point() else t, like)
        out, _ = step(own, s.pools, s.batch, s.ctx)  # type: ignore[operator]
        used = [own.embed, own.layers[1].attn.wkv, own.layers[2].ffn.w2, own.layers[0].hc_attn.fn]
        return list(torch.autograd.grad(out.logits.square().mean(), used))

    eager = gradient(model.step)
    captured = gradient(
        torch.compile(model.step, fullgraph=True, dynamic=False, backend="aot_eager")
    )
    for a, b in zip(captured, eager, strict=True):
        assert b.abs().max() > 1e-6
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
