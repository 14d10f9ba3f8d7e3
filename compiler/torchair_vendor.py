"""The vendor's operators that the NPU lowering calls, each declared once: schema, meaning, shapes.

A schema is torch_npu 2.13.0's own text (`npu_native_functions_by_codegen.yaml` in its wheel), and a
test holds them equal wherever the wheel is at hand. `plain` says what the operator computes for the
arguments that `torchair_ops.py` passes, and refuses others; `shapes` is its fake function.

Where torch_npu is loaded its own operators are used and nothing here is registered. Elsewhere
`declare` stands in for them, so that a step can be traced, its numbers checked on CPU, and its
graph handed to torchair's converters, which know these operators by name.

Letters: N rows sorted by expert; others as in the package docstring of `dsv4`.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

Ints = list[int]


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator of another library: its schema, its meaning and the GE operator it becomes."""

    schema: str  # name(arguments) -> returns
    plain: Callable[..., Any]
    shapes: Callable[..., Any]
    ge: str

    @property
    def name(self) -> str:
        """The operator's name, without namespace and overload."""
        return self.schema.split("(", 1)[0]


def _only(given: dict[str, Any], **meant: Any) -> None:
    """Refuse arguments whose meaning is not written down here."""
    other = {n: v for n, v in given.items() if n in meant and v != meant[n]}
    if other:
        raise NotImplementedError(f"the plain form knows {meant} only, not {other}")


# RMS norm.


def _rms(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x * rstd * gamma in float32 with one rounding, and rstd = 1 / sqrt(mean(x^2) + eps)."""
    x = self.float()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(self.dtype), rstd


def _rms_shapes(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    rstd = self.new_empty((*self.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(self), rstd


# Clamped SwiGLU.


def _clipped(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """a sigmoid(alpha a) (b + bias) of x = (a | b), a clamped from above, b on both sides."""
    _only({"group_index": group_index, "dim": dim, "interleaved": interleaved},
          group_index=None, dim=-1, interleaved=False)  # fmt: skip
    a, b = x.float().chunk(2, dim=-1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return (a * torch.sigmoid(alpha * a) * (b + bias)).to(x.dtype)


def _clipped_shapes(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


# Rows written by number.


def _scatter(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """`self` with `updates` at `indices[..., :]`, as a new tensor."""
    return self.index_put(indices.unbind(-1), updates)


def _scatter_shapes(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return torch.empty_like(self)


# To the experts and back.


def _dispatch(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Ints | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows sorted by expert [N, D], where each (token, choice) went [N], and rows per expert [L].

    The fourth result is undefined without `scale`; zeros here.
    """
    given = dict(locals())
    n = expert_idx.numel()
    _only(given, scale=None, offset=None, active_num=n, drop_pad_mode=0, expert_tokens_num_type=1,
          expert_tokens_num_flag=True, quant_mode=-1, active_expert_range=[0, expert_num],
          row_idx_type=0, x_dtype=None)  # fmt: skip
    flat = expert_idx.flatten().long()
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(n, device=x.device))
    counts = (flat[:, None] == torch.arange(expert_num, device=x.device)).sum(0)
    return x[order // expert_idx.shape[1]], place.int(), counts, x.new_zeros(n, dtype=torch.float32)


def _dispatch_shapes(
    x: Tensor, expert_idx: Tensor, *, expert_num: int = -1, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = expert_idx.shape[0] * expert_idx.shape[1]
    return (
        x.new_empty((n, x.shape[1])),
        x.new_empty(n, dtype=torch.int32),
        x.new_empty(expert_num, dtype=torch.int64),
        x.new_empty(n, dtype=torch.float32),
    )


def _combine(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Tensor:
    """out[t] = sum over k of rows[place[k * T + t]]: choices are outermost in `place`. [T, D]"""
    given = dict(locals())
    _only(given, skip1=None, skip2=None, bias=None, scales=None, export_for_source_row=None,
          drop_pad_mode=0)  # fmt: skip
    return expanded_permuted_rows[expanded_src_to_dst_row.long()].unflatten(0, (k, -1)).sum(0)


def _combine_shapes(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Tensor:
    rows = expanded_src_to_dst_row.shape[0] // k
    return expanded_permuted_rows.new_empty((rows, expanded_permuted_rows.shape[1]))


VENDOR = (
    Operator(
        "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        _rms,
        _rms_shapes,
        "RmsNorm",
    ),
    Operator(
        "npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, "
        "float limit=7.0, float bias=1.0, bool interleaved=True) -> Tensor",
        _clipped,
        _clipped_shapes,
        "ClippedSwiglu",
    ),
    Operator(
        "npu_scatter_nd_update(Tensor self, Tensor indices, Tensor updates) -> Tensor",
        _scatter,
        _scatter_shapes,
        "ScatterNdUpdate",
    ),
    Operator(
        "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
        "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, "
        "int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
        "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, "
        "int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
        _dispatch,
        _dispatch_shapes,
        "MoeInitRoutingV3",
    ),
    Operator(
        "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, "
        "Tensor? bias, Tensor? scales, Tensor expanded_src_to_dst_row, "
        "Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1) -> Tensor",
        _combine,
        _combine_shapes,
        "MoeFinalizeRoutingV2",
    ),
)


def declare() -> Library | None:
    """Stand in for the vendor's operators; the caller keeps the result, which undoes it when freed.

    None, and nothing is done, where torch_npu is loaded or another caller has declared them.
    """
    if "torch_npu" in sys.modules or hasattr(torch.ops.npu, VENDOR[0].name):
        return None
    library = Library("npu", "FRAGMENT")
    for op in VENDOR:
        library.define(op.schema)
        library.impl(op.name, op.plain, "CompositeExplicitAutograd")
        library.impl(op.name, op.shapes, "Meta")
    return library
