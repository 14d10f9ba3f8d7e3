"""RMS norms, and the rule for the wide dtype. Spec sections 3.1 and 10.5."""

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sensitive parts: float32, or float64 in a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """`x` in the wide dtype."""
    return x.to(wide_dtype(x.dtype))


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last dim, in the wide dtype with one rounding at the end.

    `weight` is [last dim] or None for the unweighted norm. Spec section 3.1.
    """
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y.to(x.dtype)
