"""The operators of `dsv4.ops.Ops` as C++ kernels for the CPU, opaque to a capture.

Numbers against the plain forms, in a bfloat16 model (float32 models: float32 throughout):
- `linear`, `linear_wide`: the same exact products, summed in float32 in the order of k.
- `experts`: gate and up are not rounded before the activation and w2's results not before the sum
  over k; the activation is rounded to bfloat16 once before w2, as there.
- `attend`: queries are multiplied as they are and the logits scaled, instead of scaled queries;
  probabilities are divided by their sum at the end, not before, and rounded to bfloat16 before
  they multiply values (spec 10.5: P is of the model dtype); their sum is that of the rounded ones.
- `scores`: products of queries and keys are exact, summed in float32; heads one by one.
- `rotate`: float32 as there, rounded once; products and sums may be fused.
- `mix`, `collapse`, `expand`: float32 as there; divisions as products with a reciprocal.
Results of a token do not depend on the other tokens of the step, in any of them.

Inference only: none has a gradient. Other dtypes take the plain form, weights that are not laid out
(`cpu_layout.py`) the plain `linear`.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from compiler import cpu_build
from dsv4 import mhc, ops, rope
from dsv4.config import Config
from dsv4.norm import wide
from dsv4.ops import PLAIN, Experts, Keys, Ops
from dsv4.params import Hyper

_TYPES = (torch.bfloat16, torch.float32)
_MOST_STREAMS = 8  # that fit the kernels' registers
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


def scores(iq_TIJ: Tensor, weights_TI: Tensor, keys: Keys, blocks_UZ: Tensor) -> Tensor:
    """`ops.scores` straight from the pool, for entries that some query of the block sees."""
    if iq_TIJ.dtype not in _TYPES or iq_TIJ.shape[-1] % 2:
        return ops.scores(iq_TIJ, weights_TI, keys, blocks_UZ)
    return torch.ops.dsv4_cpu.scores(
        iq_TIJ, weights_TI, keys.pool_NC, keys.rows, keys.visible_UZS, blocks_UZ
    )


def pick(scores_TE: Tensor, k: int) -> Tensor:
    """`ops.pick` by one selection per row; the same indices."""
    if scores_TE.dtype != torch.float32:
        return ops.pick(scores_TE, k)
    return torch.ops.dsv4_cpu.pick(scores_TE, k)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """`rope.rotate` in one pass. Angles that a capture computes stand in memory for all layers."""
    if x.dtype not in _TYPES or cos.dtype != torch.float32:
        return rope.rotate(x, cos, sin, inverse=inverse)
    return torch.ops.dsv4_cpu.rotate(x, cos, sin, inverse)


def mix(p: Hyper, h_TMD: Tensor, cfg: Config) -> tuple[Tensor, Tensor, Tensor]:
    """`mhc.mix`: 16 tokens side by side."""
    if h_TMD.dtype not in _TYPES or cfg.streams > _MOST_STREAMS:
        return mhc.mix(p, h_TMD, cfg)
    numbers = cfg.sinkhorn, cfg.norm_eps, cfg.hc_eps
    return torch.ops.dsv4_cpu.mix(h_TMD, p.fn, p.base, p.scale, *numbers)


def collapse(h_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """`mhc.collapse` in one pass."""
    if h_TMD.dtype not in _TYPES or h_TMD.shape[1] > _MOST_STREAMS:
        return mhc.collapse(h_TMD, pre_TM)
    return torch.ops.dsv4_cpu.collapse(h_TMD, pre_TM)


def expand(y_TD: Tensor, h_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    """`mhc.expand` in one pass."""
    if h_TMD.dtype not in _TYPES or h_TMD.shape[1] > _MOST_STREAMS:
        return mhc.expand(y_TD, h_TMD, post_TM, comb_TMM)
    return torch.ops.dsv4_cpu.expand(y_TD, h_TMD, post_TM, comb_TMM)


# Shapes, for captures.


def _scores_shape(
    q: Tensor, weights: Tensor, pool: Tensor, rows: Tensor, visible: Tensor, blocks: Tensor
) -> Tensor:
    return weights.new_empty(visible.shape)


def _pick_shape(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int64)


def _rotate_shape(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _mix_shape(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int, norm: float, hc: float
) -> tuple[Tensor, Tensor, Tensor]:
    t, n = h.shape[:2]
    pre = h.new_empty((t, n), dtype=torch.float32)
    return pre, torch.empty_like(pre), pre.new_empty((t, n, n))


def _collapse_shape(h: Tensor, pre: Tensor) -> Tensor:
    return h.new_empty((h.shape[0], h.shape[2]))


def _expand_shape(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


def _linear_shape(x: Tensor, w: Tensor, wide: bool) -> Tensor:
    n = w.shape[-4] * w.shape[-2]
    return x.new_empty((*x.shape[:-1], n), dtype=torch.float32 if wide else x.dtype)


def _experts_shape(
    x: Tensor, weights: Tensor, slots: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    return torch.empty_like(wide(x), memory_format=torch.contiguous_format)


def _attend_shape(q: Tensor, *rest: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def start(build_dir: Path) -> None:
    """Make the kernels known to this process; they are built below `build_dir` if not there.

    Raises RuntimeError if they cannot be built; `cpu_build.missing()` says so beforehand.
    """
    if cpu_build.load(build_dir):
        shapes = {
            "linear": _linear_shape,
            "experts": _experts_shape,
            "attend": _attend_shape,
            "scores": _scores_shape,
            "pick": _pick_shape,
            "rotate": _rotate_shape,
            "mix": _mix_shape,
            "collapse": _collapse_shape,
            "expand": _expand_shape,
        }
        for name, shape in shapes.items():
            torch.library.register_fake(f"{cpu_build.NAMESPACE}::{name}", shape)


def lowered(plain: Ops = PLAIN) -> Ops:
    """`plain` with the CPU kernels, which must be started before a step runs."""
    return dataclasses.replace(
        plain,
        linear=linear,
        linear_wide=linear_wide,
        experts=experts,
        attend=attend,
        scores=scores,
        pick=pick,
        rotate=rotate,
        mix=mix,
        collapse=collapse,
        expand=expand,
    )


def cpu_ops(build_dir: Path, plain: Ops = PLAIN) -> Ops:
    """`lowered`, of kernels that are started. Raises as `start`."""
    start(build_dir)
    return lowered(plain)
