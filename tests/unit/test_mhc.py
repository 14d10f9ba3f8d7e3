"""Hyper-connections. Spec section 4 and pitfalls 1 to 3 of section 18."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dsv4 import mhc
from dsv4.params import Hyper
from tests import reference, tiny

CFG = tiny.config("w", 1)
F64 = torch.float64


def _made() -> tuple[Hyper, Tensor]:
    p = tiny.params(CFG, 2, F64).layers[0].hc_attn
    return p, torch.randn(7, CFG.streams, CFG.dim, dtype=F64)


def test_sinkhorn_vector() -> None:
    """The vector of section 4.3."""
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0])
    a = sign[:, None] * torch.arange(16.0).reshape(4, 4) / 8
    row = torch.tensor([0.2037, 0.2344, 0.2656, 0.2963])
    ours = mhc.sinkhorn(a[None], 20, 1e-6)[0]
    torch.testing.assert_close(
        ours, torch.stack((row, row.flip(0), row, row.flip(0))), rtol=0, atol=5e-5
    )


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_equals_the_text(iterations: int) -> None:
    a = torch.randn(9, 4, 4, dtype=F64) * 3
    ours = mhc.sinkhorn(a, iterations, 1e-6)
    for got, logits in zip(ours, a, strict=True):
        torch.testing.assert_close(got, reference.sinkhorn(logits, iterations, 1e-6))


def test_sinkhorn_normalises_columns_first() -> None:
    """Case E6 (order of the Sinkhorn steps), pitfall 3: 1 column step, then rows and columns."""
    a = torch.randn(4, 4, dtype=F64) * 4
    one = mhc.sinkhorn(a[None], 1, 1e-6)[0]
    torch.testing.assert_close(one.sum(0), torch.ones(4, dtype=F64), rtol=0, atol=1e-5)
    assert (one.sum(1) - 1).abs().max() > 0.05  # rows are not
    last = mhc.sinkhorn(a[None], 20, 1e-6)[0]
    assert (last.sum(0) - 1).abs().max() < (last.sum(1) - 1).abs().max()


def test_sinkhorn_of_extreme_logits_is_finite() -> None:
    """hc_eps keeps entries that underflow in the softmax from dividing zero by zero."""
    a = torch.tensor([[400.0, 0.0, -400.0, 0.0]] * 4)
    out = mhc.sinkhorn(a[None], 20, 1e-6)
    assert out.isfinite().all()
    assert out.min() > 0


def test_mix_equals_the_text() -> None:
    p, h = _made()
    pre, post, comb = mhc.mix(p, h, CFG)
    for t in range(h.shape[0]):
        for got, want in zip((pre[t], post[t], comb[t]), reference.mix(p, h[t], CFG), strict=True):
            torch.testing.assert_close(got, want)


def test_the_statistic_spans_all_streams() -> None:
    """Pitfall 2: stream-major, one mean over all M * D values, not one per stream."""
    p, h = _made()
    h = h * torch.tensor([1.0, 4.0, 0.1, 2.0], dtype=F64)[:, None]
    pre, _, _ = mhc.mix(p, h, CFG)
    x = h.flatten(1)
    per_stream = (h / h.square().mean(-1, keepdim=True).sqrt()).flatten(1)
    dim_major = h.transpose(1, 2).flatten(1)
    n = CFG.streams

    def first(flat: Tensor, scale: Tensor) -> Tensor:
        return torch.sigmoid((flat @ p.fn[:n].t()) * scale * p.scale[0] + p.base[:n]) + CFG.hc_eps

    own = (x.square().mean(-1, keepdim=True) + CFG.norm_eps).rsqrt()
    torch.testing.assert_close(pre, first(x, own))
    assert (pre - first(per_stream, torch.ones_like(own))).abs().max() > 0.05
    assert (pre - first(dim_major, own)).abs().max() > 0.05


def test_only_pre_has_the_epsilon() -> None:
    p, h = _made()
    p = dataclasses.replace(p, base=torch.full_like(p.base, -200.0))
    pre, post, _ = mhc.mix(p, h, CFG)
    torch.testing.assert_close(pre, torch.full_like(pre, CFG.hc_eps), rtol=1e-9, atol=0)
    assert post.max() < 1e-60


def test_expand_sums_over_the_first_index() -> None:
    """Pitfall 1: h'_j takes comb[i, j] h_i; the transpose passes shape checks and is wrong."""
    p, h = _made()
    _, post, comb = mhc.mix(p, h, CFG)
    y = torch.randn(h.shape[0], CFG.dim, dtype=F64)
    ours = mhc.expand(y, h, post, comb)
    for t in range(h.shape[0]):
        torch.testing.assert_close(ours[t], reference.expand(y[t], h[t], post[t], comb[t]))
    wrong = mhc.expand(y, h, post, comb.transpose(1, 2))
    assert (ours - wrong).abs().max() > 0.1


def test_the_residual_is_only_what_comb_mixes() -> None:
    """There is no plain `+ x`: with a zero sublayer and comb = 0 nothing is left."""
    _, h = _made()
    zero = torch.zeros(h.shape[0], CFG.dim, dtype=F64)
    none = torch.zeros(h.shape[0], 4, 4, dtype=F64)
    assert mhc.expand(zero, h, torch.ones(h.shape[0], 4, dtype=F64), none).abs().max() == 0


def test_bfloat16_streams_are_rounded_once() -> None:
    """The weighted sums run in float32: one bfloat16 rounding away from exact."""
    p, h = _made()
    p32 = Hyper(fn=p.fn.float(), base=p.base.float(), scale=p.scale.float())
    low = h.bfloat16()
    pre, post, comb = mhc.mix(p32, low, CFG)
    assert pre.dtype == post.dtype == comb.dtype == torch.float32
    u = mhc.collapse(low, pre)
    exact = torch.einsum("tm,tmd->td", pre.double(), low.double())
    torch.testing.assert_close(u.double(), exact, rtol=2.0**-8, atol=1e-6)
    y = torch.randn(h.shape[0], CFG.dim).bfloat16()
    new = mhc.expand(y, low, post, comb)
    exact = mhc.expand(y.double(), low.double(), post.double(), comb.double())
    torch.testing.assert_close(new.double(), exact, rtol=2.0**-8, atol=1e-5)
