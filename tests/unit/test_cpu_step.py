"""A whole step on the CPU kernels: one graph, any number of threads, as near as the plain form."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from compiler.cpu_layout import prepare
from dsv4 import model, ops
from dsv4.context import Ctx
from dsv4.ops import Ops
from tests import tiny

BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.compiled


@torch.no_grad()
def test_a_step_on_the_kernels_is_one_graph(fast: Ops) -> None:
    """Captured whole, with the kernels as opaque nodes, and equal to eager."""
    cfg = tiny.short("wch", 1, sinkhorn=2)
    params = prepare(tiny.params(cfg, 5, BF16), cfg)
    ctx, pools = Ctx(cfg, ops=fast), tiny.pools(cfg, 1, 6, BF16)
    (ids,) = tiny.tokens(cfg, 1, 9)
    batch = tiny.batch(cfg, [(ids, 0)], pages=6, block=4)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.step, fullgraph=True, dynamic=False, backend=counter)
    got, _ = compiled(params, pools, batch, ctx)
    want, _ = model.step(params, pools, batch, ctx)
    assert torch.equal(got.logits, want.logits)
    assert counter.frame_count == 1
    called = {str(n.target) for n in counter.graphs[0].graph.nodes}
    assert {f"dsv4_cpu.{n}" for n in ("linear", "experts", "attend")} <= called


@torch.no_grad()
def test_threads_do_not_change_a_bit(fast: Ops) -> None:
    """Logits of steps on 1, 2 and 3 threads: all kernels, split in different ways."""
    cfg = tiny.short("wchc", 1, sinkhorn=3)
    params = prepare(tiny.params(cfg, 3, BF16), cfg)
    (ids,) = tiny.tokens(cfg, 1, 40)
    before, made = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            made.append(logits_of(cfg, params, fast, ids))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@pytest.mark.parametrize("dtype", [BF16, F32])
@torch.no_grad()
def test_a_model_on_the_kernels(fast: Ops, dtype: torch.dtype) -> None:
    """A prompt in chunks and then token by token, against the plain operators.

    float32: 2e-5 of the largest logit, some hundred ulp after four layers. bfloat16: a token is no
    further from the float64 model of the same weights than the plain form is, within 1.5. That is
    the median of 160 tokens of 4 models: where a rounding changes which expert or entry is chosen,
    in either form, a token is off by 100 times as much, which happens to one in ten.
    """
    mine, theirs, size = [], [], 0.0
    for seed in range(4):
        cfg = tiny.short("wchc", 1, sinkhorn=3)
        params = tiny.params(cfg, seed, dtype)
        (ids,) = tiny.tokens(cfg, 1, 40)
        exact = logits_of(cfg, tiny.cast(params, torch.float64), ops.PLAIN, ids)
        got = logits_of(cfg, prepare(params, cfg), fast, ids)
        size = max(size, exact.abs().max().item())
        if dtype == F32:
            assert (got - exact).abs().max() <= 2e-5 * exact.abs().max()
            continue
        mine.append((got - exact).square().mean(-1))
        theirs.append((logits_of(cfg, params, ops.PLAIN, ids) - exact).square().mean(-1))
    if dtype == BF16:
        own, plain = torch.cat(mine), torch.cat(theirs)
        assert own.median() <= 1.5 * plain.median()
        assert (own > 20 * plain.median()).double().mean() <= 0.1
        assert own.mean().sqrt() <= 0.1 * size
        assert own.max().sqrt() <= 0.2 * size


def logits_of(cfg, params, lowered: Ops, ids: Tensor) -> Tensor:
    """Logits of every position: 24 tokens in one chunk, then one by one."""
    ctx, pools = Ctx(cfg, ops=lowered), tiny.pools(cfg, 1, 6, params.embed.dtype)
    steps = [(ids[:24], 0), *((ids[i : i + 1], i) for i in range(24, 40))]
    out = []
    for part, start in steps:
        batch = tiny.batch(cfg, [(part, start)], pages=6, block=4 if len(part) > 1 else 1)
        made, pools = model.step(params, pools, batch, ctx)
        out.append(made.logits)
    return torch.cat(out)
