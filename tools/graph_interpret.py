"""Run a lowered GE graph on CPU, operator by operator, and compare it with the step itself.

`python -m tools.graph_interpret --torch-npu DIR` lowers a step of a small float32 model and
prints the largest differences: what the converters emitted means what the step means, as far as GE
operators mean what is written here. Writes run as early as their data and control inputs allow,
and reads of a written pool as late, so that a write that does not wait for a read shows. Operands
of one operator must have one dtype, as in GE.

No substitute for an NPU: kernels, their dtypes and their numerics are not part of this.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compiler.torchair_ops import NPU
from compiler.torchair_own import grouped_matmul
from compiler.torchair_vendor import VENDOR
from dsv4 import model, table, tree
from dsv4.config import Config, kinds_of, preset
from dsv4.context import Ctx
from dsv4.state import init_pools
from tools import graph_scene, graph_torchair, graph_wheel

Values = list[Tensor]
PLAIN = MappingProxyType({op.ge: op.plain for op in VENDOR})


@dataclasses.dataclass(frozen=True)
class Node:
    """An operator of a GE graph with its operands; an optional one that is absent is None."""

    kind: str
    fed: list[Tensor | None]
    attrs: Any

    def tensors(self) -> list[Tensor]:
        """Operands, all present."""
        assert all(x is not None for x in self.fed), self.kind
        return [x for x in self.fed if x is not None]

    def ints(self, at: int) -> list[int]:
        """An operand as a list of whole numbers: sizes, axes."""
        x = self.fed[at]
        assert x is not None
        return x.flatten().tolist()


def _binary(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Node], Values]:
    def run(n: Node) -> Values:
        a, b = n.tensors()
        assert a.dtype == b.dtype, f"{n.kind} of {a.dtype} and {b.dtype}"
        return [fn(a, b)]

    return run


def _unary(fn: Callable[[Tensor], Tensor]) -> Callable[[Node], Values]:
    return lambda n: [fn(n.tensors()[0])]


def _reduce(fn: Callable[..., Tensor]) -> Callable[[Node], Values]:
    return lambda n: [fn(n.tensors()[0], n.ints(1), n.attrs["keep_dims"].b)]


def _matmul(n: Node) -> Values:
    a, b = n.tensors()[:2]
    assert a.dtype == b.dtype
    flags = [n.attrs[k].b for k in (("transpose_x1", "transpose_x2") if n.kind == "MatMul" else
                                    ("adj_x1", "adj_x2"))]  # fmt: skip
    a, b = (x.mT if flag else x for x, flag in zip((a, b), flags, strict=True))
    return [a @ b]


def _slice(n: Node) -> Values:
    x = n.tensors()[0]
    assert not any(n.attrs[k].i for k in ("begin_mask", "end_mask", "ellipsis_mask"))
    for begin, end, axis, step in zip(*(n.ints(i) for i in (1, 2, 3, 4)), strict=True):
        size = x.shape[axis]
        end = min(end + size if end < 0 else end, size)
        index = torch.arange(begin + size if begin < 0 else begin, end, step)
        x = x.index_select(axis, index)
    return [x]


def _gather(n: Node) -> Values:
    x, index = n.tensors()[:2]
    (axis,) = n.ints(2)
    picked = x.index_select(axis, index.flatten().long())
    axis %= x.dim()
    return [picked.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))]


def _topk(n: Node) -> Values:
    found = n.tensors()[0].topk(n.ints(1)[0], dim=n.attrs["dim"].i, largest=n.attrs["largest"].b)
    return [found.values, found.indices.int()]


def _max(n: Node) -> Values:
    found = n.tensors()[0].max(n.attrs["dimension"].i, keepdim=n.attrs["keep_dims"].b)
    return [found.indices.int(), found.values]


def _scatter_elements(n: Node) -> Values:
    x, index, updates = n.tensors()
    assert x.dtype == updates.dtype
    axis, how = n.attrs["axis"].i, n.attrs["reduction"].s.decode()
    if how == "none":
        return [x.scatter(axis, index.long(), updates)]
    assert how == "add", how
    return [x.scatter_add(axis, index.long(), updates)]


def _write(n: Node) -> Values:
    pool, index, updates = n.tensors()
    assert pool.dtype == updates.dtype
    return [pool.index_put_((index[:, 0].long(),), updates)]


def _index(n: Node) -> Values:
    x, *index = n.tensors()
    assert all(n.attrs["indices_mask"].list.i), "leading dims only"
    return [x[tuple(i.long() for i in index)]]


def _unsqueeze(n: Node) -> Values:
    (x,) = n.tensors()
    for axis in n.attrs["axes"].list.i:
        x = x.unsqueeze(axis)
    return [x]


def _split(n: Node) -> Values:
    x, sizes, (axis,) = n.tensors()[0], n.ints(1), n.ints(2)
    rest = x.shape[axis] - sum(size for size in sizes if size >= 0)  # what the one -1 stands for
    return list(x.split([rest if size < 0 else size for size in sizes], axis))


def _softmax(n: Node) -> Values:
    (axis,) = n.attrs["axes"].list.i
    return [torch.softmax(n.tensors()[0], axis)]


def _reshape(n: Node) -> Values:
    return [n.tensors()[0].reshape(n.ints(1))]


def _range(n: Node) -> Values:
    start, limit, delta = n.tensors()
    return [torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)]


def _rms(n: Node) -> Values:
    return list(PLAIN["RmsNorm"](*n.tensors(), n.attrs["epsilon"].f))


def _clipped(n: Node) -> Values:
    numbers = {k: n.attrs[k].f for k in ("alpha", "limit", "bias")}
    x = n.fed[0]
    assert x is not None
    return [PLAIN["ClippedSwiglu"](x, dim=-1, interleaved=n.attrs["interleaved"].b, **numbers)]


def _dispatch(n: Node) -> Values:
    ints = ("active_num", "expert_num", "drop_pad_mode", "expert_tokens_num_type", "quant_mode")
    given = {k: n.attrs[k].i for k in (*ints, "row_idx_type")}
    x, index = n.fed[:2]
    assert x is not None
    assert index is not None
    assert index.dtype == torch.int32
    return list(PLAIN["MoeInitRoutingV3"](
        x, index, expert_tokens_num_flag=n.attrs["expert_tokens_num_flag"].b,
        active_expert_range=list(n.attrs["active_expert_range"].list.i), **given,
    ))  # fmt: skip


def _combine(n: Node) -> Values:
    rows, index = n.fed[:2]
    assert rows is not None
    assert index is not None
    assert index.dtype == torch.int32
    assert all(x is None for x in n.fed[2:])
    mode, kept = n.attrs["drop_pad_mode"].i, n.attrs["k"].i
    return [PLAIN["MoeFinalizeRoutingV2"](rows, None, None, None, None, index, None, mode, kept)]


def _grouped(n: Node) -> Values:
    rows, weight, counts = n.fed[0], n.fed[1], n.fed[7]
    assert rows is not None
    assert weight is not None
    assert counts is not None
    assert n.attrs["transpose_weight"].b
    assert n.attrs["group_list_type"].i == 1
    assert counts.dtype == torch.int64
    assert all(x is None or x.numel() == 0 for x in n.fed[2:7])
    return [grouped_matmul(rows, weight, counts)]


MEANING: MappingProxyType[str, Callable[[Node], Values]] = MappingProxyType({
    **{kind: _unary(fn) for kind, fn in {
        "Abs": torch.abs, "Cos": torch.cos, "Exp": torch.exp, "Log": torch.log,
        "Log1p": torch.log1p, "Neg": torch.neg, "Reciprocal": torch.reciprocal,
        "Relu": torch.relu, "Rsqrt": torch.rsqrt, "Sigmoid": torch.sigmoid, "Sin": torch.sin,
        "Identity": torch.clone, "ZerosLike": torch.zeros_like,
    }.items()},
    **{kind: _binary(fn) for kind, fn in {
        "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "RealDiv": torch.div,
        "FloorDiv": torch.floor_divide, "FloorMod": torch.remainder, "Pow": torch.pow,
        "Maximum": torch.maximum, "Equal": torch.eq, "Less": torch.lt, "LessEqual": torch.le,
        "Greater": torch.gt, "GreaterEqual": torch.ge, "LogicalAnd": torch.logical_and,
        "LogicalOr": torch.logical_or,
    }.items()},
    "ArgMaxWithValue": _max,
    "BatchMatMul": _matmul,
    "BroadcastTo": lambda n: [n.tensors()[0].expand(n.ints(1))],
    "ClipByValueV2": lambda n: [torch.clamp(*n.tensors())],
    "ClippedSwiglu": _clipped,
    "ConcatV2": lambda n: [torch.cat(n.tensors()[:-1], n.ints(-1)[0])],
    "Cumsum": lambda n: [n.tensors()[0].cumsum(n.ints(1)[0], dtype=n.tensors()[0].dtype)],
    "Fill": lambda n: [n.tensors()[1].expand(n.ints(0)).clone()],
    "GatherElements": lambda n: [n.tensors()[0].gather(n.attrs["dim"].i, n.tensors()[1].long())],
    "GatherV2": _gather,
    "GroupedMatmul": _grouped,
    "IndexByTensor": _index,
    "MatMul": lambda n: _matmul(dataclasses.replace(n, fed=n.fed[:2])),
    "MoeFinalizeRoutingV2": _combine,
    "MoeInitRoutingV3": _dispatch,
    "Pack": lambda n: [torch.stack(n.tensors(), n.attrs["axis"].i)],
    "Range": _range,
    "ReduceAny": _reduce(torch.any),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Reshape": _reshape,
    "RmsNorm": _rms,
    "ScatterElements": _scatter_elements,
    "ScatterNdUpdate": _write,
    "SelectV2": lambda n: [torch.where(*n.tensors())],
    "SoftmaxV2": _softmax,
    "SplitV": _split,
    "StridedSliceV2": _slice,
    "Sxpy": lambda n: [n.tensors()[0] - n.tensors()[1] * n.tensors()[2]],
    "TopKV2": _topk,
    "Transpose": lambda n: [n.tensors()[0].permute(n.ints(1))],
    "Unsqueeze": _unsqueeze,
})  # fmt: skip


class Machine:
    """Runs one GE graph over real tensors, writing into those that the graph writes."""

    def __init__(self, done: graph_torchair.Conversion) -> None:
        """Read the graph and torchair's numbering of dtypes."""
        ge = sys.modules["torchair.ge._ge_graph"]
        known = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool]
        known += [torch.uint8, torch.int8, torch.float64]
        self._casts = {int(ge.torch_type_to_ge_type(t)): t for t in known}
        self._protos = {int(ge.torch_type_to_ge_proto_type(t)): t for t in known}
        self._casts[10] = torch.int64  # DT_UINT64, of an empty optional input
        self._ops = list(done.graphs[0].graph.op)

    def _const(self, value: Any) -> Tensor:
        dtype, shape = self._protos[value.desc.dtype], list(value.desc.shape.dim)
        data = bytearray(value.data)
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(shape).clone()

    def _run(self, op: Any, values: dict[str, Values], inputs: Sequence[Tensor]) -> Values:
        if op.type == "Data":
            return [inputs[int(op.name.removeprefix("arg").removesuffix("_1"))]]
        if op.type == "Const":
            return [self._const(op.attr["value"].t)]
        fed: list[Tensor | None] = []
        for source in op.input:
            name, _, at = source.partition(":")
            if at != "-1":
                fed.append(values[name][int(at)] if source else None)
        if op.type == "Cast":
            assert fed[0] is not None
            return [fed[0].to(self._casts[op.attr["dst_type"].i])]
        if op.type == "NetOutput":
            return [x for x in fed if x is not None]
        return MEANING[op.type](Node(op.type, fed, op.attr))

    def run(self, inputs: Sequence[Tensor], *, control: bool = True) -> Values:
        """The graph's outputs, in torchair's order. `control`: whether control edges are obeyed."""
        needs = {
            op.name: {s.split(":")[0] for s in op.input if s and (control or s[-3:] != ":-1")}
            for op in self._ops
        }
        pools = {op.input[0] for op in self._ops if op.type == "ScatterNdUpdate"}
        values: dict[str, Values] = {}
        waiting, out = self._ops, []
        while waiting:
            ready = [op for op in waiting if needs[op.name] <= values.keys()]
            assert ready, "the graph has a cycle"
            writes = [op for op in ready if op.type == "ScatterNdUpdate"]
            others = [op for op in ready if not pools & set(op.input)]
            now = writes or others or ready
            for op in now:
                values[op.name] = out = self._run(op, values, inputs)
            done = {op.name for op in now}
            waiting = [op for op in waiting if op.name not in done]
        return out


Gaps = dict[str, float]


def compare(cfg: Config, bucket: graph_scene.Bucket, wheel: graph_wheel.Wheel) -> tuple[Gaps, Gaps]:
    """Largest difference of outputs and pools, each relative to the largest value of its kind.

    Against the plain step in eager mode, from the same random pools. The second are those of the
    pools when control edges are not obeyed: reads of a pool then come after its write.
    """
    seed = torch.Generator().manual_seed(0)
    params = table.init(cfg, seed)
    zeroed = init_pools(cfg, graph_scene.sizes(cfg, bucket), torch.float32)
    pools = tree.tmap(lambda t: torch.randn(t.shape, generator=seed), zeroed)
    batch, before = graph_scene.batch(cfg, bucket), tree.tmap(torch.clone, pools)
    ctx = Ctx(cfg, ops=NPU)
    done, _ = graph_torchair.convert(
        lambda p, pools, b: model.step(p, pools, b, ctx), (params, pools, batch), wheel
    )
    if done.errors:
        raise ValueError(f"operators without a converter: {done.errors}")
    assert done.captured is not None
    with torch.no_grad():
        machine, careless = Machine(done), [x.clone() for x in done.feeds]
        outputs = machine.run(done.feeds)
        machine.run(careless, control=False)
        want, after = model.step(params, before, batch, Ctx(cfg))
    at = done.graphs[0]._fx_outputs_mapping
    gaps, loose = {}, {}
    for i, (name, value) in enumerate(tree.paths(want).items()):
        gaps[name] = _gap(outputs[at[i]], value)
    written = {f"pools.{name}": value for name, value in tree.paths(after).items()}
    for name, mine, other in zip(done.captured.inputs, done.feeds, careless, strict=True):
        if name in written:
            gaps[name], loose[name] = _gap(mine, written[name]), _gap(other, written[name])
    return gaps, loose


def _gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


# Small enough to interpret, with every kind of layer, both routers and an active indexer.
SMALL = dataclasses.replace(
    preset("tiny"), kinds=kinds_of("wch"), hash_layers=(True, False, False), mtp=0, sinkhorn=2
)


def main(argv: Sequence[str]) -> int:
    """Print the differences; 1 if one is above `--bound`, else 0."""
    p = argparse.ArgumentParser(prog="python -m tools.graph_interpret")
    p.add_argument("--bucket", choices=sorted(graph_scene.BUCKETS), default="mixed")
    p.add_argument("--torch-npu", type=Path, metavar="DIR", help="an unpacked torch_npu")
    p.add_argument("--bound", type=float, default=1e-4, help="of a relative difference")
    given = p.parse_args(argv)
    wheel = graph_wheel.find(given.torch_npu)
    why = graph_wheel.why_not(wheel)
    if why is not None or wheel is None:
        p.error(f"there is no GE graph: {why}")
    gaps, loose = compare(SMALL, graph_scene.BUCKETS[given.bucket], wheel)
    print("\n".join(f"{name:36} {gap:.1e}" for name, gap in gaps.items()))
    worst = max(gaps.values())
    print(f"largest relative difference of {len(gaps)} tensors: {worst:.1e}")
    print(f"and of pools if control edges are not obeyed: {max(loose.values()):.1e}")
    return 1 if worst > given.bound else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
