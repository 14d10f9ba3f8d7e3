"""The CPU kernel of the rotary embedding against the plain form."""

import pytest
import torch
from torch import Tensor

from dsv4 import rope
from dsv4.ops import Ops

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.compiled


def scene(
    shape: tuple[int, ...], turned: int, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T, .., C], and cos and sin [T, 1 .., turned / 2] of any angles."""
    g = torch.Generator().manual_seed(turned)
    a = torch.rand(shape[0], *[1] * (len(shape) - 2), turned // 2, generator=g) * 6.3
    return torch.randn(shape, generator=g).to(dtype), a.cos(), a.sin()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("shape", "turned"),
    [((5, 3, 80), 64), ((37, 128), 64), ((4, 2, 33), 10), ((1, 1, 6), 6), ((3, 7), 2),
     ((2, 3, 4, 40), 18), ((9, 4, 21), 20)],
    ids=str,
)  # fmt: skip
def test_against_float64(
    fast: Ops, shape: tuple[int, ...], turned: int, dtype: torch.dtype, inverse: bool
) -> None:
    """One rounding, and two float32 products and their sum before it. Other dims are the same."""
    x, cos, sin = scene(shape, turned, dtype)
    got = fast.rotate(x, cos, sin, inverse=inverse)
    exact = rope.rotate(x.double(), cos.double(), sin.double(), inverse=inverse)
    assert got.dtype == dtype
    assert torch.equal(got[..., : shape[-1] - turned], x[..., : shape[-1] - turned])
    unit = 2.0**-8 if dtype == BF16 else 2.0**-24
    assert ((got - exact).abs() <= unit * exact.abs() + 2**-23 * x.abs().max()).all()


def test_a_token_does_not_depend_on_the_others(fast: Ops) -> None:
    """Bit-equal alone and beside a token of NaN; enough tokens for every thread."""
    x, cos, sin = scene((300, 8, 96), 64)
    together = fast.rotate(x, cos, sin)
    for t in (0, 151, 299):
        part = slice(t, t + 1)
        assert torch.equal(fast.rotate(x[part], cos[part], sin[part])[0], together[t])
    bad = x.clone()
    bad[7, 3] = torch.nan
    got = fast.rotate(bad, cos, sin)
    assert got[7, 3].isnan().all()
    got[7, 3] = together[7, 3]
    assert torch.equal(got, together)


def test_rows_anywhere_in_memory(fast: Ops) -> None:
    """Strided rows and angles, rows that start at odd addresses, no rows at all."""
    x, cos, sin = scene((6, 4, 48), 32)
    want = fast.rotate(x, cos, sin)
    assert torch.equal(fast.rotate(x.transpose(0, 1).contiguous().transpose(0, 1), cos, sin), want)
    odd = torch.empty(x.numel() + 1, dtype=BF16)[1:].view(x.shape).copy_(x)
    assert torch.equal(fast.rotate(odd, cos.expand(-1, -1, -1), sin), want)
    assert fast.rotate(x[:0], cos[:0], sin[:0]).shape == (0, 4, 48)
    both = torch.stack((cos, sin), dim=-1)
    assert torch.equal(fast.rotate(x, both[..., 0], both[..., 1]), want)


def test_angles_that_do_not_fit_are_refused(fast: Ops) -> None:
    x, cos, sin = scene((4, 4, 16), 8)
    for wrong in (cos[:2], cos[:, 0], cos.expand(-1, 3, -1), cos.repeat(1, 1, 3)):
        with pytest.raises(RuntimeError, match="do not fit rows"):
            fast.rotate(x, wrong, wrong)
    with pytest.raises(RuntimeError, match="do not fit rows"):
        fast.rotate(x, cos, sin[..., :2])


def test_float64_takes_the_plain_form(fast: Ops) -> None:
    x, cos, sin = (t.double() for t in scene((3, 2, 16), 8))
    assert torch.equal(fast.rotate(x, cos, sin), rope.rotate(x, cos, sin))


def test_torch_accepts_the_operator(fast: Ops) -> None:
    """Schema, shape function and dispatch, as torch checks them itself."""
    args = (*scene((5, 3, 40), 16), True)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.dsv4_cpu.rotate.default, args, {}, test_utils=tests)
