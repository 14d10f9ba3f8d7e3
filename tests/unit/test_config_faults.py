"""What the config says must arrive where it acts. D9: the clamp acts in both expert paths."""

import dataclasses

import pytest
import torch

from dsv4 import config_json, experts, ops, table
from dsv4.config import Config, preset
from dsv4.context import Ctx
from dsv4.params import Moe

TINY = preset("tiny")


def with_limit(limit: float) -> Config:
    """Through config.json, as a user would set it."""
    return config_json.read(config_json.write(TINY) | {"swiglu_limit": limit}).cfg


def loud(cfg: Config) -> Moe:
    """The experts of a top-k layer, with gate and up so large that every activation is clamped."""
    params = table.init(cfg, torch.Generator().manual_seed(0), torch.float64)
    p = params.layers[-1].ffn
    big = {"w1": p.w1 * 1e6, "w3": p.w3 * 1e6}
    shared = dataclasses.replace(p.shared, w1=p.shared.w1 * 1e6, w3=p.shared.w3 * 1e6)
    return dataclasses.replace(p, **big, shared=shared)


@pytest.mark.parametrize("tokens", [1, 40], ids=["few rows", "many rows"])
def test_d9_routed_and_shared_experts_are_clamped(tokens: int) -> None:
    x = torch.randn(tokens, TINY.dim, dtype=torch.float64)
    ids = torch.zeros(tokens, dtype=torch.int64)
    out = {}
    for limit in (1.0, 10.0, 1e12):
        cfg = with_limit(limit)
        p = loud(cfg)
        y, _ = experts.moe(p, x, ids, Ctx(cfg))
        shared = experts.shared(p.shared, x, limit)
        # |silu(g)| <= limit and |u| <= limit, so an activation is at most limit squared.
        assert shared.abs().max() <= limit**2 * p.shared.w2.abs().sum(1).max()
        routed = cfg.route_scale * limit**2 * p.w2.abs().sum(-1).max()
        assert (y - shared).abs().max() <= routed
        out[limit] = y - shared, shared
    for one, ten, free in zip(*out.values(), strict=True):
        assert not torch.allclose(one, ten)
        assert not torch.allclose(ten, free)
        assert free.abs().max() > 1e3 * ten.abs().max()


def test_d9_the_gate_is_clamped_from_above_only() -> None:
    g = torch.tensor([-50.0, -1.0, 20.0])
    u = torch.tensor([-20.0, 20.0, 3.0])
    a = ops.activate(g, u, 10.0)
    want = torch.nn.functional.silu(torch.tensor([-50.0, -1.0, 10.0])) * torch.tensor([-10, 10, 3])
    torch.testing.assert_close(a, want)
