"""Stored formats bit by bit, and training's roundings. Spec sections 3.2 and 14; case E8."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4 import quant
from tests import reference

F64 = torch.float64
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _fp4(code: int) -> float:
    """e2m1 from its bits: sign, two exponent bits (bias 1), one mantissa bit."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if code & 8 else value


def _fp8(code: int) -> float:
    """e4m3fn from its bits: sign, four exponent bits (bias 7), three mantissa bits, no infinity."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if code & 128 else value


# Stored formats.


def test_fp4_codes_and_nibble_order() -> None:
    """All 256 bytes: the low nibble is the even column (pitfall 17)."""
    packed = torch.arange(256, dtype=torch.uint8).view(torch.int8).reshape(1, 256)
    ours = quant.dequantise_fp4(packed, torch.ones(1, 16))[0]
    want = [v for b in range(256) for v in (_fp4(b & 15), _fp4(b >> 4))]
    assert ours.tolist() == want
    assert math.copysign(1, ours[2 * 8].item()) == -1  # code 8 is -0


def test_fp4_scales_cover_32_columns() -> None:
    codes = torch.full((2, 32), 0x22, dtype=torch.int8)  # 1.0, 1.0
    scale = torch.tensor([[1.0, 2.0], [0.25, 8.0]])
    ours = quant.dequantise_fp4(codes, scale)
    assert ours.shape == (2, 64)
    assert torch.equal(ours, scale.repeat_interleave(32, 1))


def test_fp4_experts_keep_both_values_of_a_byte() -> None:
    """Case E8: [out, in / 2] bytes are [out, in] weights; stacked shapes come out whole."""
    out, wide = 48, 96
    b = torch.randint(-128, 128, (out, wide // 2), dtype=torch.int8)
    w = quant.dequantise_fp4(b, torch.ones(out, wide // 32))
    assert w.shape == (out, wide)
    assert w.dtype == torch.float32
    assert set(w.abs().unique().tolist()) == set(MAGNITUDES)


def test_fp8_codes() -> None:
    """All 256 codes, NaN at 0x7F and 0xFF only."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128)
    ours = quant.dequantise_fp8(codes, torch.ones(1, 1)).flatten().tolist()
    for code, value in enumerate(ours):
        want = _fp8(code)
        assert value == want or (math.isnan(value) and math.isnan(want)), code
    assert sum(math.isnan(v) for v in ours) == 2


@pytest.mark.parametrize(
    ("shape", "tiles", "tile"),
    [
        ((256, 384), (2, 3), 128),
        ((130, 100), (2, 1), 128),
        ((64, 96), (2, 3), 32),
        ((48, 64), (2, 2), 32),
    ],
)
def test_fp8_tiles(shape: tuple[int, int], tiles: tuple[int, int], tile: int) -> None:
    """W[o, i] = e4m3(weight[o, i]) * scale[o // n, i // n], with ragged last tiles."""
    w = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.exp2(torch.randint(-5, 6, tiles).float())
    ours = quant.dequantise_fp8(w, scale)
    for o, i in ((0, 0), (shape[0] - 1, shape[1] - 1), (tile - 1, 0), (shape[0] - 1, tile - 1)):
        o, i = min(o, shape[0] - 1), min(i, shape[1] - 1)
        assert ours[o, i] == w[o, i].float() * scale[o // tile, i // tile]


def test_fp8_refuses_scales_that_fit_no_tile() -> None:
    with pytest.raises(ValueError, match="3 scales for 128 values"):
        quant.dequantise_fp8(torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(3, 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_bytes(dtype: torch.dtype) -> None:
    """All 256: 2^(b - 127), subnormal at 0, NaN at 255."""
    ours = quant.e8m0(torch.arange(256, dtype=torch.uint8).view(dtype))
    assert ours.dtype == torch.float32
    assert ours[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(ours[255].item())


# Training's roundings.


def test_pow2ceil_is_exact() -> None:
    """Powers of two stay; their upper neighbours double; their lower neighbours come back."""
    for e in range(-126, 127):
        power = torch.tensor(2.0**e)
        up = torch.nextafter(power, torch.tensor(math.inf))
        down = torch.nextafter(power, torch.tensor(0.0))
        assert quant.pow2ceil(power).item() == 2.0**e
        assert quant.pow2ceil(up).item() == 2.0 ** (e + 1)
        if e > -126:  # below is subnormal
            assert quant.pow2ceil(down).item() == 2.0**e


def test_pow2ceil_of_many_values() -> None:
    v = torch.exp2(torch.rand(20000) * 200 - 100)
    out = quant.pow2ceil(v)
    assert (out >= v).all()
    assert (out / 2 < v).all()
    mantissa, _ = torch.frexp(out)
    assert (mantissa == 0.5).all()


TIES = ((0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4))


@pytest.mark.parametrize(("value", "want"), TIES)
@pytest.mark.parametrize("sign", [1, -1])
def test_fp4_ties_go_to_the_even_code(value: float, want: float, sign: int) -> None:
    """The list of section 3.2, and the neighbours of each tie on the two sides."""
    v = torch.tensor(sign * value)
    assert quant.e2m1(v).item() == sign * want
    low, high = sorted(MAGNITUDES, key=lambda m: (abs(m - value), m))[:2]
    low, high = min(low, high), max(low, high)
    assert quant.e2m1(torch.nextafter(v, torch.zeros(()))).item() == sign * low
    assert quant.e2m1(torch.nextafter(v, v * 2)).item() == sign * high


def test_fp4_values_are_their_own_rounding() -> None:
    v = torch.tensor([_fp4(c) for c in range(16)])
    assert torch.equal(quant.e2m1(v), v)
    assert quant.e2m1(torch.tensor([6.1, 100.0, -7.0])).tolist() == [6, 6, -6]


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**20])
def test_qdq_fp4_by_hand(scale: float) -> None:
    """A block whose largest value is 6 has scale 1; the ties of the list then come out."""
    block = torch.zeros(32)
    block[0] = 6.0
    block[1 : 1 + len(TIES)] = torch.tensor([v for v, _ in TIES])
    block[10] = -3.5
    want = torch.zeros(32)
    want[0], want[10] = 6.0, -4.0
    want[1 : 1 + len(TIES)] = torch.tensor([float(w) for _, w in TIES])
    assert torch.equal(quant.qdq_fp4(block * scale), want * scale)


def test_qdq_scale_rises_past_the_largest_value() -> None:
    """a = 6 has scale 1; one ulp more has scale 2, and so has everything up to 12."""
    block = torch.zeros(32)
    block[0], block[1] = 6.0, 0.5
    assert quant.qdq_fp4(block)[1] == 0.5
    block[0] = torch.nextafter(torch.tensor(6.0), torch.tensor(7.0))
    assert quant.qdq_fp4(block)[0] == 6.0
    assert quant.qdq_fp4(block)[1] == 0.0  # 0.25 of scale 2: a tie, to even
    row = torch.zeros(64)
    row[0], row[1] = 448.0, 17.0
    assert quant.qdq_fp8(row, 64)[1] == 16.0  # a tie of step 2, to even
    row[0] = 449.0
    assert quant.qdq_fp8(row, 64)[:2].tolist() == [448.0, 16.0]


@pytest.mark.parametrize(
    ("ours", "theirs", "width"),
    [
        (lambda x: quant.qdq_fp8(x, 64), lambda x, n: reference.qdq_fp8(x, 64, n), 128),
        (lambda x: quant.qdq_fp4(x, 32), reference.qdq_fp4, 128),
    ],
    ids=["fp8", "fp4"],
)
def test_qdq_equals_the_text(
    ours: Callable[[Tensor], Tensor],
    theirs: Callable[[Tensor, reference.Notes], Tensor],
    width: int,
) -> None:
    """Blocks of every size, tiny blocks at the floor of `a`, and a zero block."""
    x = torch.randn(12, width) * torch.exp2(torch.arange(12.0) * 5 - 30)[:, None]
    x[3] = 0
    x[4, : width // 2] = 1e-30
    out = ours(x)
    for got, row in zip(out, x.double(), strict=True):
        torch.testing.assert_close(got.double(), theirs(row, reference.Notes()), rtol=0, atol=0)
    assert torch.equal(ours(out), out)  # idempotent
    assert out[3].abs().max() == 0


def test_qdq_keeps_the_dtype_and_the_rotary_dims() -> None:
    x = torch.randn(3, 80).bfloat16()
    y = quant.round_kv(x, 16)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y[:, 64:], x[:, 64:])
    assert (y[:, :64] != x[:, :64]).float().mean() > 0.5


@pytest.mark.parametrize("n", [1, 2, 32, 128])
def test_hadamard_is_the_sylvester_matrix(n: int) -> None:
    """Equal to the matrix built by doubling, symmetric, orthogonal."""
    ours = quant.hadamard(torch.eye(n, dtype=F64))
    torch.testing.assert_close(ours, reference.sylvester(n) * n**-0.5, rtol=1e-14, atol=1e-15)
    assert torch.equal(ours, ours.t())
    torch.testing.assert_close(ours @ ours, torch.eye(n, dtype=F64), rtol=0, atol=1e-14)


def test_hadamard_cancels_in_a_dot_product() -> None:
    q, k = torch.randn(2, 5, 32, dtype=F64)
    torch.testing.assert_close((quant.hadamard(q) * quant.hadamard(k)).sum(-1), (q * k).sum(-1))


def test_hadamard_refuses_other_widths() -> None:
    with pytest.raises(AssertionError, match="48"):
        quant.hadamard(torch.zeros(48))


ROUNDINGS = {
    "fp8": lambda x: quant.qdq_fp8(x, 64),
    "fp4": lambda x: quant.qdq_fp4(x, 32),
}


@pytest.mark.parametrize("name", list(ROUNDINGS))
def test_gradients_pass_straight_through(name: str) -> None:
    """Under autograd, `grad`, `vmap(grad)` and `grad(vmap)` alike."""
    fn = ROUNDINGS[name]
    x, w = torch.randn(2, 4, 64)

    def one(v: Tensor, u: Tensor) -> Tensor:
        return (fn(v) * u).sum()

    leaf = x.clone().requires_grad_()
    (plain,) = torch.autograd.grad(one(leaf, w), leaf)
    assert torch.equal(plain, w)
    assert torch.equal(torch.func.grad(one)(x, w), w)
    assert torch.equal(torch.func.vmap(torch.func.grad(one))(x, w), w)
    inside = torch.func.grad(lambda v: torch.func.vmap(one)(v, w).sum())(x)
    assert torch.equal(inside, w)
    assert torch.equal(fn(leaf).detach(), fn(x))  # and cost no bit
