"""Parity with transformers' DeepseekV4ForCausalLM in float32: whole models, then every block.

Tolerances are stated at a logit magnitude of 5 and scaled to the magnitude seen. Two float32
implementations may pick different experts or entries where the k-th and the next score are closer
than their rounding. Such prompts are left out by measurement (`_decided`), not by tolerance: in a
float64 run every gap is at least four times the largest float32 error of the same scores.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from dsv4 import experts, layer, mhc, model, route
from dsv4.config import Config, Yarn
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.site import Site, turn
from tests import tiny

LENGTHS = (1, 3, 4, 5, 37, 127, 128, 129, 130, 131, 263, 391)
BOUND = 2e-5  # at magnitude 5

CONFIGS = {
    "0-0-4-128-4": tiny.config("wwchc", 2),
    "128-128-4-128-4": tiny.config("hhchc", 3),
    "0-4-128-4-128": tiny.config("wchch", 0, index_topk=16, index_heads=24, route_scale=2.5),
    "4-0-128-4": tiny.config(
        "cwhc",
        1,
        window=32,
        index_topk=32,
        index_heads=32,
        streams=3,
        experts=9,
        topk=3,
        yarn=Yarn(factor=16.0, original=64),
        max_positions=1024,
    ),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One set of weights in both implementations, and in float64 in ours."""

    cfg: Config
    theirs: DeepseekV4ForCausalLM
    ours: Params
    exact: Params


def _pair(cfg: Config, seed: int) -> Pair:
    """The head is scaled so that the largest logit of a long prompt is 5."""
    params = tiny.params(cfg, seed)
    with torch.no_grad():
        top = model.forward(params, tiny.tokens(cfg, 2, 200), Ctx(cfg)).abs().max()
    params = dataclasses.replace(params, head=params.head * (5 / top))
    return Pair(cfg, tiny.hf_model(cfg, params), params, tiny.cast(params, torch.float64))


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest) -> Pair:
    return _pair(CONFIGS[request.param], 3)


def _scores(params: Params, cfg: Config, tokens: Tensor) -> list[tuple[Tensor, int]]:
    watch = tiny.Watch()
    with torch.no_grad():
        model.forward(params, tokens, Ctx(cfg, ops=watch.ops))
    return watch.seen


def _near_ties(pair: Pair, tokens: Tensor) -> int:
    """How many decisions of a prompt are within four float32 errors of a tie."""
    count = 0
    rough, exact = (_scores(p, pair.cfg, tokens) for p in (pair.ours, pair.exact))
    for (s32, _), (s64, k) in zip(rough, exact, strict=True):
        off = (s32 - s64).abs()
        error = torch.where(s64.isfinite(), off, 0).max()
        count += int((tiny.gaps(s64, k) <= 4 * error).sum())
    return count


def _decided(pair: Pair, num_seqs: int, length: int) -> Tensor:
    """The first random prompt none of whose decisions is a near tie. Few are skipped."""
    for seed in range(25):
        tokens = tiny.tokens(pair.cfg, num_seqs, length, seed * 1000 + length)
        if _near_ties(pair, tokens) == 0:
            return tokens
    raise AssertionError("25 prompts in a row hold a near tie: the float32 errors are too large")


def _close(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    """Within BOUND at magnitude 5, scaled to the magnitude of `theirs`."""
    assert ours.shape == theirs.shape
    diff, top = float((ours - theirs).abs().max()), float(theirs.abs().max())
    assert top > 0, what
    assert diff * 5 / top <= BOUND, f"{what}: {diff} at magnitude {top}"


@pytest.mark.parametrize("length", LENGTHS)
def test_logits(pair: Pair, length: int) -> None:
    """Case A8: the parity suite. Batch 1, 2 and 3 over the lengths, each batch with each config."""
    num_seqs = 1 + (LENGTHS.index(length) + list(CONFIGS.values()).index(pair.cfg)) % 3
    tokens = _decided(pair, num_seqs, length)
    with torch.no_grad():
        theirs = pair.theirs(tokens).logits
        ours = model.forward(pair.ours, tokens, Ctx(pair.cfg))
    if length >= 37:
        assert 3 < theirs.abs().max() < 8
    _close(ours, theirs, f"{num_seqs} x {length}")


@torch.no_grad()
def test_a_near_tie_is_skipped_because_it_flips() -> None:
    """A score 1e-8 above or below the next changes a token's logits in the first digits.

    This is the outlier that the rule was written for: an indexer score 6e-6 above the next, with
    float32 errors of 3e-5, moved transformers' logits by 0.25 from that token on.
    """
    cfg = tiny.config("w", 0)
    exact = tiny.params(cfg, 3, torch.float64)
    tokens = tiny.tokens(cfg, 1, 40)
    ((scores, k),) = _scores(exact, cfg, tokens)
    gap = tiny.gaps(scores, k)
    t = int(gap.argmin())
    runner_up = scores[t].topk(k + 1).indices[-1]
    logits = []
    for side in (-1e-8, 1e-8):
        ffn = exact.layers[0].ffn
        assert ffn.bias is not None
        bias = ffn.bias.clone()
        bias[runner_up] += gap[t] + side
        block = dataclasses.replace(exact.layers[0], ffn=dataclasses.replace(ffn, bias=bias))
        tied = dataclasses.replace(exact, layers=(block,))
        pair = Pair(cfg, tiny.hf_model(cfg, tied), tiny.cast(tied, torch.float32), tied)
        assert _near_ties(pair, tokens) == 1
        logits.append(model.forward(tied, tokens, Ctx(cfg))[0])
    diff = (logits[0] - logits[1]).abs().amax(-1)
    assert diff[t] > 0.05
    assert diff.sum() == diff[t]


# Blocks: transformers' modules, hooked, against our functions on the same inputs.


class Tap:
    """Records inputs and output of modules by name, over one forward."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.seen: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
        self._handles = [
            m.register_forward_hook(self._hook(name), with_kwargs=True)
            for name, m in root.named_modules()
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(_: torch.nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            self.seen[name] = (args, kwargs, out)

        return keep

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def input(self, name: str) -> Tensor:
        """The first input, tokens flat."""
        args, kwargs, _ = self.seen[name]
        return (args[0] if args else kwargs["hidden_states"]).flatten(0, 1)

    def output(self, name: str, index: int | None = None) -> Tensor:
        out = self.seen[name][2]
        return (out if index is None else out[index]).flatten(0, 1)


@pytest.fixture(scope="module")
def tapped(pair: Pair) -> tuple[Tap, Tensor]:
    tokens = _decided(pair, 2, 139)
    tap = Tap(pair.theirs)
    with torch.no_grad():
        pair.theirs(tokens)
    tap.close()
    return tap, tokens


@torch.no_grad()
def test_blocks(pair: Pair, tapped: tuple[Tap, Tensor]) -> None:
    """Every decoder layer, its attention and its experts, each from transformers' own input."""
    tap, tokens = tapped
    cfg, ctx = pair.cfg, Ctx(pair.cfg)
    batch, pools = model.fresh(pair.ours, tokens, ctx)
    tables = turn(batch.positions, tuple(p.rope for p in cfg.plans), cfg.rope_dim, torch.float32)
    for i, (p, pool, plan) in enumerate(
        zip(pair.ours.layers, pools.layers, cfg.plans, strict=True)
    ):
        name = f"model.layers.{i}"
        site = Site(plan, ctx, pools.page_tokens, pools.drafts, *tables[plan.rope])
        h, _, _ = layer.block(p, pool, tap.input(name), batch, site)
        _close(h, tap.output(name), name)
        y, _ = layer.attend(p.attn, pool, tap.input(f"{name}.self_attn"), batch, site)
        _close(y, tap.output(f"{name}.self_attn", 0), f"{name}.self_attn")
        y, _ = experts.moe(p.ffn, tap.input(f"{name}.mlp"), batch.tokens, ctx)
        _close(y, tap.output(f"{name}.mlp"), f"{name}.mlp")
        x = tap.input(f"{name}.mlp.shared_experts")
        y = experts.shared(p.ffn.shared, x, cfg.swiglu_limit)
        _close(y, tap.output(f"{name}.mlp.shared_experts"), f"{name} shared expert")


@torch.no_grad()
def test_mixing_coefficients(pair: Pair, tapped: tuple[Tap, Tensor]) -> None:
    """Both hyper-connections of every layer, and the final collapse."""
    tap, cfg = tapped[0], pair.cfg
    for i, p in enumerate(pair.ours.layers):
        for which, own in (("attn_hc", p.hc_attn), ("ffn_hc", p.hc_ffn)):
            name = f"model.layers.{i}.{which}"
            h = tap.input(name)
            pre, post, comb = mhc.mix(own, h, cfg)
            _close(post, tap.output(name, 0), f"{name} post")
            _close(comb, tap.output(name, 1), f"{name} comb")
            _close(mhc.collapse(h, pre), tap.output(name, 2), f"{name} collapsed")
    y = mhc.head(pair.ours.hc_head, tap.input("model.hc_head"), cfg)
    _close(y, tap.output("model.hc_head"), "hc_head")


@torch.no_grad()
def test_routers(pair: Pair, tapped: tuple[Tap, Tensor]) -> None:
    """The same experts for every token, hash-routed or scored, with the same weights."""
    tap, tokens = tapped
    for i, p in enumerate(pair.ours.layers):
        name = f"model.layers.{i}.mlp.gate"
        x = tap.input(name)
        weights, chosen = route.route(p.ffn, x, tokens.flatten(), Ctx(pair.cfg))
        _, theirs, indices = tap.seen[name][2]
        zeros = torch.zeros(x.shape[0], pair.cfg.experts)
        _close(zeros.scatter(1, chosen, weights), zeros.scatter(1, indices, theirs.float()), name)


def test_saturated_weights() -> None:
    """Case E9: weights with large outliers, so that clamps, sigmoids and sinks are in their tails.

    The share of saturated gates and ups is asserted, or the case would not be the one meant.
    """
    cfg = tiny.config("whc", 1, swiglu_limit=1.5)
    params = tiny.params(cfg, 5)
    loud = dataclasses.replace(params.layers[1].ffn, gate=params.layers[1].ffn.gate * 12)
    attn = params.layers[2].attn
    sinks = torch.tensor([12.0, -20.0, 0.0, 4.0])
    attn = dataclasses.replace(attn, attn_sink=sinks, q_norm=attn.q_norm * 3)
    layers = (
        params.layers[0],
        dataclasses.replace(params.layers[1], ffn=loud),
        dataclasses.replace(params.layers[2], attn=attn),
    )
    params = dataclasses.replace(params, layers=layers)
    pair = Pair(cfg, tiny.hf_model(cfg, params), params, tiny.cast(params, torch.float64))
    tokens = _decided(pair, 2, 150)
    tap = Tap(pair.theirs)
    with torch.no_grad():
        theirs = pair.theirs(tokens).logits
        ours = model.forward(params, tokens, Ctx(cfg))
    tap.close()
    x = tap.input("model.layers.1.mlp")
    gate = torch.einsum("td,xfd->txf", x, params.layers[1].ffn.w1)
    up = torch.einsum("td,xfd->txf", x, params.layers[1].ffn.w3)
    assert (gate > cfg.swiglu_limit).float().mean() > 0.05
    assert (gate < -cfg.swiglu_limit).float().mean() > 0.05  # must not be clamped
    assert (up.abs() > cfg.swiglu_limit).float().mean() > 0.1
    logits = x @ params.layers[1].ffn.gate.t()
    assert logits.max() > 20
    assert logits.min() < -20  # beyond float32's log(1 + e^z)
    _close(ours, theirs)
