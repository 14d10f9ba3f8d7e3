"""Rotary position embedding on the last dims, interleaved pairs. Spec section 3.3.

Angles, cos and sin are computed in the wide dtype and never rounded to the model dtype.
"""

import math

import torch
from torch import Tensor

from dsv4.config import Rope
from dsv4.norm import wide


def frequencies(rope: Rope, dim: int, device: torch.device | None = None) -> Tensor:
    """Inverse frequencies [dim / 2], float32; with YaRN interpolation where the rope has it."""
    even = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    f = 1.0 / (rope.theta ** (even / dim))
    yarn = rope.yarn
    if yarn is None:
        return f

    def turns_to_dim(turns: float) -> float:
        return dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    lo = max(math.floor(turns_to_dim(yarn.beta_fast)), 0)
    hi = min(math.ceil(turns_to_dim(yarn.beta_slow)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32, device=device)
    ramp = ((index - lo) / (hi - lo if hi > lo else 0.001)).clamp(0, 1)
    return f / yarn.factor * ramp + f * (1 - ramp)


def angles(positions: Tensor, rope: Rope, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each positions.shape + [dim / 2], in `dtype` (the wide dtype)."""
    a = positions[..., None].to(dtype) * frequencies(rope, dim, positions.device).to(dtype)
    return a.cos(), a.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2 * cos.shape[-1] dims of `x`; cos and sin broadcast against its pairs.

    `inverse` rotates back: the attention output is taken back at the query position (section 5).
    """
    n = 2 * cos.shape[-1]
    rest, turned = x[..., :-n], wide(x[..., -n:]).unflatten(-1, (-1, 2))
    a, b = turned[..., 0], turned[..., 1]
    if inverse:
        sin = -sin
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((rest, pairs.flatten(-2).to(x.dtype)), dim=-1)
