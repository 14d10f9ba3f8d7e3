"""The NPU's lowerings mean what the plain operators mean, and are declared as the vendor has them.

Numbers are those of the stand-ins on CPU: no vendor kernel runs here.
"""

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from compiler import torchair_ops, torchair_own, torchair_vendor
from dsv4 import model, ops, tree
from dsv4.context import Ctx
from tests import tiny
from tools import graph_wheel

WHEEL = graph_wheel.find()
needs_wheel = pytest.mark.skipif(WHEEL is None, reason="no files of torch_npu here")
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    library = torchair_vendor.declare()
    yield
    del library


def _draw(seed: int, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Each lowering against its plain form.


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(5, 24), (3, 4, 24)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms(dtype: torch.dtype, shape: tuple[int, ...], weighted: bool) -> None:
    x = 3 * _draw(0, *shape, dtype=dtype)
    w = 1 + _draw(1, 24, dtype=dtype) if weighted else None
    got, want = torchair_ops.rms(x, w, 1e-3), ops.PLAIN.rms(x, w, 1e-3)
    assert got.dtype == dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_activate(dtype: torch.dtype) -> None:
    g, u = 6 * _draw(0, 9, 16, dtype=dtype), 6 * _draw(1, 9, 16, dtype=dtype)
    got, want = torchair_ops.activate(g, u, 4.0), ops.activate(g, u, 4.0)
    assert got.dtype == F32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert (g > 4).any()
    assert (u < -4).any()


def test_write_rows_in_place() -> None:
    pool, values = _draw(0, 7, 4), _draw(1, 3, 4)
    values[1:] = 0
    rows = torch.tensor([5, 0, 0])
    want = ops.write_rows(pool, rows, values)
    got = torchair_ops.write_rows(pool, rows, values)
    assert got.data_ptr() == pool.data_ptr()
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 5)])
def test_read_rows(shape: tuple[int, ...]) -> None:
    pool, rows = _draw(0, 7, 4), torch.randint(7, shape)
    assert torch.equal(torchair_ops.read_rows(pool, rows), ops.read_rows(pool, rows))


def _experts(dtype: torch.dtype) -> ops.Experts:
    w1, w3, w2 = (
        _draw(i, *s, dtype=dtype) for i, s in enumerate([(8, 6, 5), (8, 6, 5), (8, 5, 6)])
    )
    return ops.Experts(w1=w1, w3=w3, w2=w2, limit=1.5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts(tokens: int, dtype: torch.dtype) -> None:
    """One token names an expert twice; some experts get no row at all in the small steps."""
    x, w = _draw(3, tokens, 5, dtype=dtype), _experts(dtype)
    slots = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(4)).topk(3, -1).indices
    slots[0, 1] = slots[0, 0]
    weights = torch.rand(tokens, 3, generator=torch.Generator().manual_seed(5))
    got, want = torchair_ops.experts(x, weights, slots, w), ops.experts(x, weights, slots, w)
    assert got.dtype == F32
    bound = 1e-5 if dtype == F32 else 2**-7
    assert (got - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@torch.no_grad()
def test_a_whole_step(kind: str) -> None:
    """The step with every NPU operator is the plain step: outputs, and pools written in place."""
    cfg = tiny.short("wch", 1, sinkhorn=3)
    params, ctx = tiny.params(cfg, 5), Ctx(cfg)
    a, b = tiny.tokens(cfg, 2, 40)
    pools = tiny.pools(cfg, 2, 6, F32)
    first = tiny.batch(cfg, [(a[:21], 0), (b[:14], 0)], pages=6, block=4)
    _, pools = model.step(params, pools, first, ctx)
    long = 1 if kind == "decode" else 9
    batch = tiny.batch(cfg, [(a[21 : 21 + long], 21), (b[14:15], 14)], pages=6, block=4, padding=3)
    want, after = model.step(params, pools, batch, ctx)
    own = tree.tmap(torch.clone, pools)
    got, written = model.step(params, own, batch, Ctx(cfg, ops=torchair_ops.NPU))
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(got.load, want.load)
    for mine, theirs, kept in zip(*map(tree.leaves, (written, after, own)), strict=True):
        assert mine.data_ptr() == kept.data_ptr()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert any((x != y).any() for x, y in zip(tree.leaves(after), tree.leaves(pools), strict=True))


# Each operator as declared.


def _arguments(name: str) -> tuple[tuple, dict]:
    rows, ints = _draw(0, 6, 8), torch.tensor([[1, 3], [0, 1], [3, 3]], dtype=torch.int32)
    return {
        "npu_rms_norm": ((rows, _draw(1, 8), 1e-6), {}),
        "npu_clipped_swiglu": (
            (rows,),
            {"dim": -1, "alpha": 1.0, "limit": 2.0, "bias": 0.0, "interleaved": False},
        ),
        "npu_scatter_nd_update": ((rows, torch.tensor([[4], [2]]), _draw(1, 2, 8)), {}),
        "npu_moe_init_routing_v2": (
            (rows[:3], ints),
            {
                "active_num": 6, "expert_num": 5, "expert_tokens_num_type": 1,
                "expert_tokens_num_flag": True, "active_expert_range": [0, 5],
            },
        ),
        "npu_moe_finalize_routing": (
            (rows, None, None, None, None, torch.tensor([5, 1, 0, 2, 4, 3], dtype=torch.int32),
             None, 0, 2),
            {},
        ),
        "grouped_matmul": ((rows, _draw(1, 3, 7, 8), torch.tensor([2, 0, 4])), {}),
        "write_after": ((rows, torch.tensor([[4], [2]]), _draw(1, 2, 8), [_draw(2, 3)]), {}),
    }[name]  # fmt: skip


NAMES = [op.name for op in torchair_vendor.VENDOR]


def _op(name: str) -> Any:
    space = torch.ops.npu if name in NAMES else torch.ops.dsv4
    return getattr(space, name).default


@pytest.mark.parametrize("name", [*NAMES, "grouped_matmul", "write_after"])
def test_shapes_are_those_of_the_plain_form(name: str) -> None:
    """Shape function against meaning, and the schema against what is mutated or aliased."""
    args, kwargs = _arguments(name)
    torch.library.opcheck(_op(name), args, kwargs, test_utils=("test_schema", "test_faketensor"))


def test_dispatch_and_combine_are_inverse() -> None:
    """Every choice of every token comes back to it: combine(dispatch(x)) = K x."""
    x = _draw(0, 7, 4)
    slots = torch.rand(7, 9).topk(3, -1).indices.to(torch.int32)
    rows, place, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x, slots, active_num=21, expert_num=9, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[0, 9],
    )  # fmt: skip
    assert counts.tolist() == [(slots == e).sum().item() for e in range(9)]
    owner = torch.repeat_interleave(torch.arange(9), counts)
    for t in range(7):
        for k in range(3):
            row = place[3 * t + k]
            assert owner[row] == slots[t, k]
            assert torch.equal(rows[row], x[t])
    by_choice = place.unflatten(0, (7, 3)).t().flatten()
    back = torch.ops.npu.npu_moe_finalize_routing(
        rows, None, None, None, None, by_choice, None, 0, 3
    )
    torch.testing.assert_close(back, 3 * x)


def test_the_plain_forms_refuse_what_they_do_not_mean() -> None:
    with pytest.raises(NotImplementedError, match="interleaved"):
        torch.ops.npu.npu_clipped_swiglu(_draw(0, 2, 4))
    args, kwargs = _arguments("npu_moe_init_routing_v2")
    with pytest.raises(NotImplementedError, match="row_idx_type"):
        torch.ops.npu.npu_moe_init_routing_v2(*args, **kwargs, row_idx_type=1)


def test_nothing_is_declared_twice() -> None:
    assert torchair_vendor.declare() is None


@needs_wheel
def test_schemas_are_the_wheel_s() -> None:
    assert WHEEL is not None
    theirs = set(WHEEL.schemas())
    assert len(theirs) > 300
    for op in torchair_vendor.VENDOR:
        assert op.schema in theirs, op.name


def _vendor_shapes(wheel: graph_wheel.Wheel, name: str) -> Callable[..., Any]:
    """The vendor's own shape function, run from its source with its constants stood in for."""
    kinds = types.SimpleNamespace(int4=285, hifloat8=290, float4_e2m1fn_x2=296)
    space: dict[str, Any] = {"torch": torch, "math": math, "torch_npu": kinds}
    source = wheel.shapes_of(name)
    exec(source, space)
    return space[source.split("def ", 1)[1].split("(", 1)[0]]


@needs_wheel
@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_the_wheel_s(name: str) -> None:
    assert WHEEL is not None
    args, kwargs = _arguments(name)
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
    theirs = _vendor_shapes(WHEEL, name)(*meta, **kwargs)
    (op,) = [op for op in torchair_vendor.VENDOR if op.name == name]
    ours = op.shapes(*meta, **kwargs)
    pairs = zip(*([r] if isinstance(r, Tensor) else r for r in (ours, theirs)), strict=True)
    for mine, other in pairs:
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)


# The order of reads and writes.


def _compiled(fn: Callable[..., Any], seen: list[GraphModule]) -> Callable[..., Any]:
    """`fn` as a flat graph after our pass, run on CPU."""

    def keep(flat: GraphModule, _: list) -> Callable[..., Any]:
        torchair_own.order_writes(flat)
        seen.append(flat)
        return flat.forward

    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, dynamic=False, backend=backend)


def _exchange(pool: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    old = torchair_ops.read_rows(pool, torch.tensor([1, 2]))
    new = torchair_ops.write_rows(pool, torch.tensor([2, 3]), values)
    return old, torchair_ops.read_rows(new, torch.tensor([2])), new


@torch.no_grad()
def test_a_write_waits_for_the_reads_before_it() -> None:
    pool, values, seen = _draw(0, 5, 3), _draw(1, 2, 3), []
    before = pool.clone()
    old, again, new = _compiled(_exchange, seen)(pool, values)
    assert torch.equal(old, before[[1, 2]])
    assert torch.equal(again[0], values[0])
    assert new.data_ptr() == pool.data_ptr()
    assert torch.equal(pool[2:4], values)
    (write,) = seen[0].graph.find_nodes(
        op="call_function", target=torch.ops.dsv4.write_after.default
    )
    (read,) = write.args[3]
    assert read.target is torch.ops.aten.embedding.default
    assert read.args[0] is write.args[0]


@torch.no_grad()
def test_a_write_without_reads_before_it_stays_the_vendor_s() -> None:
    pool, values, seen = _draw(0, 5, 3), _draw(1, 2, 3), []
    _compiled(lambda p, v: torchair_ops.write_rows(p, torch.tensor([2, 3]), v), seen)(pool, values)
    assert torch.equal(pool[2:4], values)
    targets = [node.target for node in seen[0].graph.nodes]
    assert torch.ops.npu.npu_scatter_nd_update.default in targets
    assert torch.ops.dsv4.write_after.default not in targets


@torch.no_grad()
def test_other_reads_of_a_written_pool_are_refused() -> None:
    def fn(pool: Tensor, values: Tensor) -> Tensor:
        old = pool.sum()
        torchair_ops.write_rows(pool, torch.tensor([2, 3]), values)
        return old

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="read pools with"):
        _compiled(fn, [])(_draw(0, 5, 3), _draw(1, 2, 3))
