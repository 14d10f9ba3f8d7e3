"""Parameters in the released checkpoints' formats. Spec sections 14.1 to 14.3.

The inverse of `dsv4.quant.dequantise_*`: what those give back is exactly representable, so that
quantising it again changes nothing. Scales are powers of two, as their e8m0 bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.quant import e2m1, pow2ceil

FP8_TILE = 128  # values per side of a tile that shares a scale
FP4_BLOCK = 32  # values of a row that share a scale


def _exponents(amax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The smallest power of two that brings `amax` to at most `largest`, and its e8m0 byte."""
    if not torch.isfinite(amax).all():
        raise ValueError(
            "it holds NaN or infinity, which fp8 and fp4 cannot store; save without quantise"
        )
    scale = pow2ceil((amax / largest).clamp(min=2.0**-126))
    _, exponent = torch.frexp(scale)  # scale = 0.5 * 2^exponent
    return scale, (exponent + 126).to(torch.uint8)


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] as e4m3 of the same shape, and e8m0 bytes, one per 128x128 tile."""
    rows, cols = weight.shape
    n = FP8_TILE
    padded = F.pad(weight.float(), (0, -cols % n, 0, -rows % n))
    tiles = padded.unflatten(1, (-1, n)).unflatten(0, (-1, n))  # [rows / n, n, cols / n, n]
    scale, stored = _exponents(tiles.abs().amax((1, 3)), 448.0)
    values = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    flat = values.flatten(2).flatten(0, 1)
    return flat[:rows, :cols].contiguous(), stored


def to_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] as packed e2m1 int8 [out, in / 2], and e8m0 bytes, one per 32 values of a row.

    Raises ValueError if `in` is not a multiple of 32.
    """
    if weight.shape[1] % FP4_BLOCK:
        raise ValueError(
            f"rows of {weight.shape[1]} values cannot be stored as fp4: a multiple of {FP4_BLOCK} "
            "is needed"
        )
    blocks = weight.float().unflatten(1, (-1, FP4_BLOCK))
    scale, stored = _exponents(blocks.abs().amax(-1), 6.0)
    values = e2m1(blocks / scale[..., None]).flatten(1)
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    codes = torch.bucketize(values.abs(), magnitudes) + 8 * torch.signbit(values).long()
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.to(torch.uint8).view(torch.int8), stored
