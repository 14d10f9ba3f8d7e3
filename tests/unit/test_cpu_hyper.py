"""The CPU kernels of the hyper-connections against the plain operators."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dsv4 import mhc
from dsv4.config import Config
from dsv4.ops import Ops
from dsv4.params import Hyper
from tests import tiny

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.compiled


def scene(
    tokens: int, dim: int = 40, streams: int = 4, dtype: torch.dtype = F32
) -> tuple[Config, Hyper, Tensor]:
    """Coefficients of size 1 before their squashing, so that nothing is near its limits."""
    cfg = tiny.config(dim=dim, streams=streams, sinkhorn=20)
    g = torch.Generator().manual_seed(tokens)
    count, width = (2 + streams) * streams, streams * dim
    fn = torch.randn(count, width, generator=g) * width**-0.5
    p = Hyper(fn=fn, base=torch.randn(count, generator=g), scale=torch.tensor([1.3, 0.7, 2.0]))
    return cfg, p, torch.randn(tokens, streams, dim, generator=g).to(dtype)


def double(p: Hyper) -> Hyper:
    return Hyper(fn=p.fn.double(), base=p.base.double(), scale=p.scale.double())


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("streams", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_mix_against_float64(fast: Ops, tokens: int, streams: int, dtype: torch.dtype) -> None:
    """2e-6: sums of up to 280 float32 terms, and 39 normalisations that forget what came before."""
    cfg, p, h = scene(tokens, 40 if streams != 7 else 37, streams, dtype)
    for got, exact in zip(fast.mix(p, h, cfg), mhc.mix(double(p), h.double(), cfg), strict=True):
        assert got.dtype == F32
        assert got.shape == exact.shape
        assert (got - exact).abs().max() <= 2e-6


@pytest.mark.parametrize("dim", [64, 37])
@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_streams_in_and_out(fast: Ops, dim: int, streams: int, dtype: torch.dtype) -> None:
    """One rounding to the dtype of the streams; before it, 9 float32 terms."""
    g = torch.Generator().manual_seed(dim)
    h = torch.randn(23, streams, dim, generator=g).to(dtype)
    y = torch.randn(23, dim, generator=g).to(dtype)
    pre, comb = torch.rand(23, streams, generator=g), torch.rand(23, streams, streams, generator=g)
    unit = 2.0**-8 if dtype == BF16 else 2.0**-24
    exact = mhc.collapse(h.double(), pre.double())
    got = fast.collapse(h, pre)
    assert got.dtype == dtype
    assert ((got - exact).abs() <= unit * exact.abs() + 9 * 2**-24 * streams * 4).all()
    exact = mhc.expand(y.double(), h.double(), pre.double(), comb.double())
    got = fast.expand(y, h, pre, comb)
    assert got.dtype == dtype
    assert ((got - exact).abs() <= unit * exact.abs() + 9 * 2**-24 * streams * 4).all()


def test_a_token_does_not_depend_on_the_others(fast: Ops) -> None:
    """Bit-equal alone, in another lane and beside a token of NaN."""
    cfg, p, h = scene(21)
    together = fast.mix(p, h, cfg)
    for t in (0, 7, 20):
        alone = fast.mix(p, h[t : t + 1], cfg)
        assert all(torch.equal(a[0], b[t]) for a, b in zip(alone, together, strict=True))
    bad = h.clone()
    bad[3, 1, 2] = torch.nan
    for a, b in zip(fast.mix(p, bad, cfg), together, strict=True):
        assert a[3].isnan().all()
        rest = [t for t in range(21) if t != 3]
        assert torch.equal(a[rest], b[rest])


def test_sharp_logits_stay_finite(fast: Ops) -> None:
    """A permutation-like matrix: exponents far apart, where zeros meet eps."""
    cfg, p, h = scene(16)
    p = dataclasses.replace(p, scale=torch.tensor([50.0, 50.0, 400.0]))
    for got, exact in zip(fast.mix(p, h, cfg), mhc.mix(double(p), h.double(), cfg), strict=True):
        assert got.isfinite().all()
        # Logits near 1,000 err by 1,000 times 2^-24 times a few; the softmax passes that on.
        assert (got - exact).abs().max() <= 2e-3


def test_strided_streams(fast: Ops) -> None:
    """The first layer's streams are one embedding, expanded."""
    cfg, p, h = scene(5)
    same = h[:, :1].expand(-1, 4, -1)
    for a, b in zip(fast.mix(p, same, cfg), fast.mix(p, same.contiguous(), cfg), strict=True):
        assert torch.equal(a, b)
    pre = torch.rand(5, 4)
    assert torch.equal(fast.collapse(same, pre), fast.collapse(same.contiguous(), pre))


def test_torch_accepts_the_operators(fast: Ops) -> None:
    """Schemas, shape functions and dispatch, as torch checks them itself."""
    cfg, p, h = scene(5, dtype=BF16)
    op = torch.ops.dsv4_cpu
    pre, comb = torch.rand(5, 4), torch.rand(5, 4, 4)
    cases = {
        op.mix: (h, p.fn, p.base, p.scale, cfg.sinkhorn, cfg.norm_eps, cfg.hc_eps),
        op.collapse: (h, pre),
        op.expand: (h[:, 0].contiguous(), h, pre, comb),
    }
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for packet, args in cases.items():
        torch.library.opcheck(packet.default, args, {}, test_utils=tests)
