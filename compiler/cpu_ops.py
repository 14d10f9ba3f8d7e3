"""The operators of `dsv4.ops.Ops` as C++ kernels for the CPU, opaque to a capture.

Numbers against the plain forms, in a bfloat16 model (float32 models: float32 throughout):
- `linear`, `linear_wide`: the same exact products, summed in float32 in the order of k.
- `experts`: gate and up are not rounded before the activation and w2's results not before the sum
  over k; the activation is rounded to bfloat16 once before w2, as there.
- `attend`: queries are multiplied as they are and the logits scaled, instead of scaled queries;
  probabilities stay float32 and are divided by their sum at the end, not before.
Results of a token do not depend on the other tokens of the step, in any of them.

Inference only: none has a gradient. Other dtypes take the plain form, weights that are not laid out
(`cpu_layout.py`) the plain `linear`.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from compiler import cpu_build
from dsv4 import ops
from dsv4.norm import wide
from dsv4.ops import PLAIN, Experts, Keys, Ops

_TYPES = (torch.bfloat16, torch.float32)
_LAID_OUT = (4, 5)  # dims of panels [.., N / 16, units, 16, per], without and with a leading dim


def linear(x: Tensor, w: Tensor) -> Tensor:
    """`ops.linear` with a weight in panels."""
    if w.dim() not in _LAID_OUT:
        return ops.linear(x, w)
    return torch.ops.dsv4_cpu.linear(x.to(w.dtype), w, False).to(x.dtype)


def linear_wide(x: Tensor, w: Tensor) -> Tensor:
    """`ops.linear_wide` with a weight in panels: bfloat16 times bfloat16 is exact in float32."""
    if w.dim() not in _LAID_OUT:
        return ops.linear_wide(x, w)
    return torch.ops.dsv4_cpu.linear(x.to(w.dtype), w, True)


def experts(x_TD: Tensor, weights_TK: Tensor, slots_TK: Tensor, w: Experts) -> Tensor:
    """`ops.experts`: pairs sorted by expert, each chosen expert's weights read once."""
    if x_TD.dtype not in _TYPES:
        return ops.experts(x_TD, weights_TK, slots_TK, w)
    return torch.ops.dsv4_cpu.experts(x_TD, weights_TK, slots_TK, w.w1, w.w3, w.w2, w.limit)


def attend(
    q_THC: Tensor, near: Keys, far: Keys | None, sink_H: Tensor, spots: tuple[Tensor, Tensor]
) -> Tensor:
    """`ops.attend` over the visible keys only, straight from the pools."""
    if q_THC.dtype not in _TYPES:
        return ops.attend(q_THC, near, far, sink_H, spots)
    if far is None:
        far = Keys(near.pool_NC, near.rows[..., :0], near.visible_UZS[..., :0])
    sources = [t for k in (near, far) for t in (k.pool_NC, k.rows, k.visible_UZS)]
    return torch.ops.dsv4_cpu.attend(q_THC, *sources, sink_H, *spots)


# Shapes, for captures.


def _linear_shape(x: Tensor, w: Tensor, wide: bool) -> Tensor:
    n = w.shape[-4] * w.shape[-2]
    return x.new_empty((*x.shape[:-1], n), dtype=torch.float32 if wide else x.dtype)


def _experts_shape(
    x: Tensor, weights: Tensor, slots: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    return torch.empty_like(wide(x), memory_format=torch.contiguous_format)


def _attend_shape(q: Tensor, *rest: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def cpu_ops(build_dir: Path, plain: Ops = PLAIN) -> Ops:
    """`plain` with the CPU kernels, which are built below `build_dir` unless they are there.

    Raises RuntimeError if they cannot be built; `cpu_build.missing()` says so beforehand.
    """
    if cpu_build.load(build_dir):
        name = cpu_build.NAMESPACE
        torch.library.register_fake(f"{name}::linear", _linear_shape)
        torch.library.register_fake(f"{name}::experts", _experts_shape)
        torch.library.register_fake(f"{name}::attend", _attend_shape)
    return dataclasses.replace(
        plain, linear=linear, linear_wide=linear_wide, experts=experts, attend=attend
    )
