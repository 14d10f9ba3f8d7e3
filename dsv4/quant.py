"""Rounding of training (section 3.2) and the stored formats of released checkpoints (section 14).

`qdq_*` quantise and dequantise, returning the dtype they were given. `dequantise_*` read stored
tensors. Gradients pass straight through the roundings.
"""

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between two magnitudes, ties go to the even code.
_E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def pow2ceil(v: Tensor) -> Tensor:
    """Smallest power of two that is at least v (v > 0, normal), exactly. float32."""
    mantissa, exponent = torch.frexp(v.float())
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())


def e2m1(x: Tensor) -> Tensor:
    """Nearest fp4 (e2m1) value, ties to the even code, saturating at 6. float32."""
    a = x.float().abs()
    edges = torch.tensor(_E2M1_EDGES, device=x.device)
    code = torch.bucketize(a, edges)  # edges[i-1] < a <= edges[i]: a tie stays below
    tied_up = (a == edges[1]) | (a == edges[3]) | (a == edges[5])
    values = torch.tensor(_E2M1, device=x.device)
    return values[code + tied_up.int()].copysign(x.float())


def _through(x: Tensor, y: Tensor) -> Tensor:
    # Exactly y, with the gradient of x. No test of x.requires_grad: it is False inside vmap.
    return y.to(x.dtype).detach() + (x - x.detach())


def qdq_fp8(x: Tensor, block: int) -> Tensor:
    """e4m3 with a power-of-two scale per `block` values of the last dim."""
    v = x.float().unflatten(-1, (-1, block))
    scale = pow2ceil(v.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    y = (v / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return _through(x, y.flatten(-2))


def qdq_fp4(x: Tensor, block: int = 32) -> Tensor:
    """e2m1 with a power-of-two scale per `block` values of the last dim."""
    v = x.float().unflatten(-1, (-1, block))
    scale = pow2ceil(v.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    y = e2m1((v / scale).clamp(-6, 6)) * scale
    return _through(x, y.flatten(-2))


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Sylvester-Hadamard transform of the last dim, a power of two."""
    n = x.shape[-1]
    assert n & (n - 1) == 0, f"Hadamard width {n} is not a power of two"
    y, half = x.float() if x.dtype != torch.float64 else x, 1
    while half < n:
        pairs = y.unflatten(-1, (-1, 2, half))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return (y * n**-0.5).to(x.dtype)


def round_kv(x: Tensor, rope_dim: int) -> Tensor:
    """Training's rounding of key/value rows: fp8 in blocks of 64, rotary dims kept."""
    rest = x.shape[-1] - rope_dim
    return torch.cat((qdq_fp8(x[..., :rest], 64), x[..., rest:]), dim=-1)


def round_index(x: Tensor) -> Tensor:
    """Training's rounding of indexer queries and keys: Hadamard, then fp4 in blocks of 32."""
    return qdq_fp4(hadamard(x), 32)


def e8m0(scale: Tensor) -> Tensor:
    """Stored exponents (uint8 or float8_e8m0fnu) as float32: 2^(b - 127); 255 is NaN."""
    b = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(b == 0, 0x00400000, b << 23)
    return torch.where(b == 255, torch.nan, bits.view(torch.float32))


def dequantise_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [out, in] with one float32 scale per tile, tiles found from the shapes. float32."""
    rows, cols = weight.shape
    tile_r = _tile(rows, scale.shape[0])
    tile_c = _tile(cols, scale.shape[1])
    full = scale.repeat_interleave(tile_r, 0)[:rows].repeat_interleave(tile_c, 1)[:, :cols]
    return weight.float() * full


def _tile(length: int, tiles: int) -> int:
    for tile in (128, 32):
        if -(-length // tile) == tiles:
            return tile
    raise ValueError(f"{tiles} scales for {length} values: tiles of 128 or 32 values were expected")


def dequantise_fp4(weight: Tensor, scale: Tensor) -> Tensor:
    """Packed e2m1 [out, in / 2] (low nibble first) with float32 scales [out, in / 32]. float32."""
    # One look-up gives both values of a byte: three times as fast as splitting nibbles first.
    values = torch.tensor((*_E2M1, *(-v for v in _E2M1)), device=weight.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)  # [256, 2]
    found = pairs[weight.view(torch.uint8).int()].flatten(-2)
    return (found.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)
