"""Frequencies, which layer has which, and the rotation. Spec section 3.3."""

import math

import pytest
import torch

from dsv4 import config, rope
from dsv4.config import Kind, Rope, Yarn
from tests import reference, tiny

COMPRESS = Rope(theta=160000.0, yarn=Yarn(factor=16.0))
PLAIN = Rope(theta=10000.0)


def test_yarn_check_values() -> None:
    """The values that section 3.3 gives for the released models."""
    f = rope.frequencies(COMPRESS, 64)
    given = {
        0: 1.0,
        1: 0.687656022,
        16: 2.265625e-3,
        20: 2.96977778e-4,
        24: 1.953125e-5,
        31: 5.68052904e-7,
    }
    for i, value in given.items():
        assert f[i].item() == pytest.approx(value, rel=5e-7), i
    assert f.dtype == torch.float32


def test_yarn_ramp_runs_from_dim_15_to_dim_25() -> None:
    """lo = 15 and hi = 25: unchanged up to 15, a sixteenth from 25 on, strictly between inside."""
    ratio = rope.frequencies(COMPRESS, 64) / rope.frequencies(Rope(theta=160000.0), 64)
    assert torch.equal(ratio[:16], torch.ones(16))
    assert torch.equal(ratio[25:], torch.full((7,), 1 / 16))
    expected = 1 - (torch.arange(16, 25) - 15) / 10 * (15 / 16)
    torch.testing.assert_close(ratio[16:25], expected, rtol=1e-6, atol=0)


def test_frequencies_equal_float64() -> None:
    """Both tables against the formulas in float64, at two ulps of float32."""
    cfg = config.preset("flash")
    for ours, exact in (
        (rope.frequencies(COMPRESS, 64), reference.scaled_frequencies(cfg)),
        (rope.frequencies(PLAIN, 64), reference.frequencies(10000.0, 64)),
        (
            rope.frequencies(tiny.config("c").plans[0].rope, 16),
            reference.scaled_frequencies(tiny.config("c")),
        ),
    ):
        torch.testing.assert_close(ours.double(), exact, rtol=2.4e-7, atol=0)


def test_yarn_with_an_empty_ramp() -> None:
    """hi = lo: the ramp is a step and nothing divides by zero."""
    yarn = Yarn(factor=4.0, beta_fast=1.0, beta_slow=1.0, original=64)
    f = rope.frequencies(Rope(theta=1e4, yarn=yarn), 4)
    assert f.isfinite().all()


@pytest.mark.parametrize("name", ["flash", "pro", "tiny"])
def test_each_layer_has_its_own_table(name: str) -> None:
    """Case A4, and E6 (two rope bases): plain theta 10000 without a compressor, else 160000 + YaRN.

    The kinds are written out by hand from section 1.2.
    """
    cfg = config.preset(name)
    by_hand = {
        "flash": "ww" + "ch" * 20 + "c",
        "pro": "hh" + "ch" * 29 + "c",
        "tiny": "wchcc",
    }[name]
    position = torch.tensor([cfg.max_positions - 1])
    for letter, plan in zip(by_hand, cfg.plans, strict=True):
        if letter == "w":
            assert plan.rope == Rope(theta=10000.0, yarn=None)
            exact = reference.frequencies(10000.0, cfg.rope_dim)
        else:
            assert plan.rope.theta == 160000.0
            assert plan.rope.yarn is not None
            exact = reference.scaled_frequencies(cfg)
        cos, sin = rope.angles(position, plan.rope, cfg.rope_dim, torch.float64)
        angle = position.double() * exact
        # The float32 frequency of a 1M position is the only error: t * f * 2^-23.
        bound = position.item() * exact * 2.4e-7 + 1e-12
        assert ((cos[0] - angle.cos()).abs() <= bound).all()
        assert ((sin[0] - angle.sin()).abs() <= bound).all()
    assert cfg.mtp_plan.rope == Rope(theta=10000.0, yarn=None)
    assert cfg.mtp_plan.kind is Kind.WINDOW


def test_rotation_equals_the_formula() -> None:
    """Interleaved pairs of the last dims only, against the reference's loops."""
    f = rope.frequencies(COMPRESS, 16)
    x = torch.randn(5, 3, 24, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 1000, 1048575])
    cos, sin = rope.angles(positions, COMPRESS, 16, torch.float64)
    ours = rope.rotate(x, cos[:, None], sin[:, None])
    for t, row, out in zip(positions.tolist(), x, ours, strict=True):
        torch.testing.assert_close(out, reference.rope(row, t, f.double()), rtol=1e-12, atol=1e-12)
    assert torch.equal(ours[..., :8], x[..., :8])
    assert not torch.allclose(ours[1:, :, 8:], x[1:, :, 8:])


def test_one_pair_by_hand() -> None:
    """(1, 0) at position 1 with f_0 = 1 becomes (cos 1, sin 1): neighbours form the pair."""
    cos, sin = rope.angles(torch.tensor([1]), PLAIN, 4, torch.float64)
    y = rope.rotate(torch.tensor([[9.0, 1.0, 0.0, 0.0, 1.0]], dtype=torch.float64), cos, sin)[0]
    f1 = 1e4**-0.5
    want = [9.0, math.cos(1), math.sin(1), -math.sin(f1), math.cos(f1)]
    torch.testing.assert_close(y, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_inverse_takes_the_rotation_back() -> None:
    x = torch.randn(6, 2, 24, dtype=torch.float64)
    cos, sin = rope.angles(torch.arange(6) * 31, PLAIN, 16, torch.float64)
    there = rope.rotate(x, cos[:, None], sin[:, None])
    back = rope.rotate(there, cos[:, None], sin[:, None], inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-12, atol=1e-12)
    assert (there - x)[1:].abs().max() > 0.1


def test_bfloat16_rows_are_turned_with_float32_angles() -> None:
    """One rounding, at the end: cos and sin are never bfloat16."""
    x = torch.randn(64, 16).bfloat16()
    cos, sin = rope.angles(torch.arange(64) + 5000, PLAIN, 16, torch.float32)
    ours = rope.rotate(x, cos, sin)
    assert ours.dtype == torch.bfloat16
    exact = rope.rotate(x.double(), cos.double(), sin.double())
    torch.testing.assert_close(ours.double(), exact, rtol=2.0**-8, atol=1e-6)
    rounded = rope.rotate(x, cos.bfloat16().float(), sin.bfloat16().float())
    assert (ours != rounded).float().mean() > 0.1
