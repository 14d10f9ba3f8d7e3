"""The router: scores, extremes, the bias, precision. Spec section 9; cases E1, E3, E4."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dsv4 import route
from dsv4.context import Ctx
from dsv4.params import Moe
from tests import reference, tiny

CFG = tiny.config("ww", 1, experts=8, topk=3, dim=8, o_rank=8, route_scale=2.5)
CTX = Ctx(CFG)
F64 = torch.float64


def _routers(dtype: torch.dtype = torch.float32) -> tuple[Moe, Moe]:
    """(hash, top-k) whose logits are the input itself: the gate is the identity."""
    layers = tiny.params(CFG, 4, dtype).layers
    eye = torch.eye(8, dtype=torch.promote_types(dtype, torch.float32))
    hashed, scored = (dataclasses.replace(layer.ffn, gate=eye) for layer in layers)
    return hashed, scored


def _exact(p: Moe, logits: Tensor, tokens: Tensor) -> Tensor:
    """Weights of all experts in float64, by the reference; 0 where not chosen. [T, X]"""
    run = tiny.run(CFG)
    rows = []
    for z, token in zip(logits.double(), tokens.tolist(), strict=True):
        s = reference.scores(z)
        picked = reference.chosen(p, s, token, run)
        row = torch.zeros(8, dtype=F64)
        row[picked] = s[picked] / s[picked].sum() * CFG.route_scale
        rows.append(row)
    return torch.stack(rows)


def _full(weights: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros(weights.shape[0], 8, dtype=F64).scatter(1, chosen, weights.double())


def test_sqrt_softplus_values() -> None:
    """The values of section 9."""
    z = torch.tensor([0.0, 1.0, -1.0, 5.0])
    want = torch.tensor([0.8326, 1.1460, 0.5597, 2.2376])
    torch.testing.assert_close(route.log_scores(z).exp(), want, rtol=0, atol=5e-5)


def test_log_scores_equal_float64_everywhere() -> None:
    """log sqrt(log(1 + e^z)) for z in -700 .. 700, across the branch at -15."""
    z = torch.cat(
        (
            torch.linspace(-700, 700, 1401, dtype=F64),
            torch.linspace(-15.01, -14.99, 41, dtype=F64),
        )
    )
    exact = torch.log(reference.scores(z))
    torch.testing.assert_close(route.log_scores(z), exact, rtol=1e-13, atol=1e-13)
    single = route.log_scores(z.float()).double()
    torch.testing.assert_close(
        single, torch.log(reference.scores(z.float().double())), rtol=3e-7, atol=3e-7
    )


EXTREMES = {
    "-200": [-200.0] * 8,
    "-20": [-20.0] * 8,
    "0": [0.0] * 8,
    "+90": [90.0] * 8,
    "-500": [-500.0] * 8,
    "around -200": [-200.0, -199.0, -201.5, -198.0, -203.0, -200.5, -197.25, -202.0],
    "around -500": [-500.0, -499.0, -501.5, -498.0, -503.0, -500.5, -497.25, -502.0],
    "around -16.6": [-16.0, -16.5, -16.6, -16.7, -17.0, -18.0, -15.0, -14.0],
    "around +90": [88.0, 89.0, 90.0, 91.0, 87.0, 200.0, 86.0, 1e4],
    "mixed": [-200.0, -20.0, 0.0, 90.0, -500.0, 5.0, -1.0, 30.0],
    "one alive": [-300.0] * 7 + [2.0],
}


@pytest.mark.parametrize("name", list(EXTREMES))
@pytest.mark.parametrize("kind", ["hash", "top-k", "top-k without bias"])
def test_extreme_logits(name: str, kind: str) -> None:
    """Case E1: finite, summing to route_scale, equal to float64, in float32 and with gradients."""
    hashed, scored = _routers()
    p = hashed if kind == "hash" else scored
    if kind == "top-k without bias":
        assert p.bias is not None
        p = dataclasses.replace(p, bias=torch.zeros_like(p.bias))
    logits = torch.tensor([EXTREMES[name]] * 5).requires_grad_()
    tokens = torch.arange(5) * 7
    weights, chosen = route.route(p, logits, tokens, CTX)
    assert weights.isfinite().all()
    assert weights.dtype == torch.float32
    total = weights.detach().sum(-1)
    torch.testing.assert_close(total, torch.full((5,), CFG.route_scale), rtol=1e-6, atol=0)
    if kind == "top-k without bias" and name == "around -500":
        # Float32 scores are all 0 there and any choice is a tie; its weights are exact.
        s = reference.scores(logits.detach().double()).gather(1, chosen)
        exact = _full(s / s.sum(-1, keepdim=True) * CFG.route_scale, chosen)
    else:
        exact = _exact(p, logits.detach(), tokens)
    torch.testing.assert_close(_full(weights.detach(), chosen), exact, rtol=2e-5, atol=1e-7)
    (grad,) = torch.autograd.grad(weights.square().sum(), logits)
    assert grad.isfinite().all()


def test_gradient_at_extremes_equals_float64() -> None:
    """sigma(z) / 2 softplus(z): 1/2 far below, where s is 0 in float32, and no kink at 0."""
    z = torch.tensor([-500.0, -200.0, -20.0, -14.0, 0.0, 90.0])
    (grad,) = torch.autograd.grad(route.log_scores(z.requires_grad_()).sum(), z)
    x = z.detach().double()
    exact = torch.sigmoid(x) / (2 * reference.scores(x) ** 2)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=0)


def test_the_bias_steers_the_choice_and_nothing_else() -> None:
    """Case E4: an independent golden, and a mutation: without the bias other experts are chosen."""
    _, p = _routers(F64)
    assert p.bias is not None
    logits = torch.randn(200, 8, dtype=F64)
    tokens = torch.zeros(200, dtype=torch.long)
    weights, chosen = route.route(p, logits, tokens, CTX)
    exact = _exact(p, logits, tokens)
    torch.testing.assert_close(_full(weights, chosen), exact, rtol=1e-12, atol=1e-12)
    none = dataclasses.replace(p, bias=torch.zeros_like(p.bias))
    _, unbiased = route.route(none, logits, tokens, CTX)
    assert (chosen != unbiased).any(-1).float().mean() > 0.2
    # Weights from biased scores would be others.
    s = reference.scores(logits) + p.bias
    s = s.gather(1, chosen)
    assert (weights - s / s.sum(-1, keepdim=True) * CFG.route_scale).abs().max() > 0.05


def test_a_large_bias_forces_an_expert_at_its_own_weight() -> None:
    _, p = _routers(F64)
    bias = torch.zeros(8, dtype=F64)
    bias[5] = 1e4
    logits = torch.zeros(1, 8, dtype=F64)
    logits[0, 5] = -8.0
    logits[0, 1] = 3.0
    weights, chosen = route.route(
        dataclasses.replace(p, bias=bias), logits, torch.zeros(1, dtype=torch.long), CTX
    )
    assert 5 in chosen[0].tolist()
    s = reference.scores(logits[0])
    own = s[5] / s[chosen[0]].sum() * CFG.route_scale
    torch.testing.assert_close(weights[0, chosen[0] == 5][0], own)


def test_hash_layers_choose_by_token_and_weigh_by_score() -> None:
    """Pitfall 11: the table picks, whatever the scores; the scores give the weights."""
    p, _ = _routers(F64)
    assert p.bias is None
    assert p.tid2eid is not None
    tokens = torch.arange(40)
    logits = torch.randn(40, 8, dtype=F64)
    weights, chosen = route.route(p, logits, tokens, CTX)
    assert torch.equal(chosen, p.tid2eid[tokens].long())
    _, again = route.route(p, -logits, tokens, CTX)
    assert torch.equal(chosen, again)
    exact = _exact(p, logits, tokens)
    torch.testing.assert_close(_full(weights, chosen), exact, rtol=1e-12, atol=1e-12)


def test_equal_scores_choose_the_lowest_experts() -> None:
    _, p = _routers()
    p = dataclasses.replace(p, bias=torch.zeros(8))
    _, chosen = route.route(p, torch.ones(2, 8), torch.zeros(2, dtype=torch.long), CTX)
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_bfloat16_model_routes_in_float32() -> None:
    """Case E3: no flips against float64 from the same inputs; bfloat16 logits flip some."""
    cfg = tiny.config("w", 0, experts=64, topk=6)
    p = tiny.params(cfg, 6, torch.bfloat16).layers[0].ffn
    assert p.bias is not None
    assert p.gate.dtype == p.bias.dtype == torch.float32
    x = torch.randn(2000, cfg.dim).bfloat16()
    tokens = torch.zeros(2000, dtype=torch.long)
    _, ours = route.route(p, x, tokens, Ctx(cfg))

    def pick(logits: Tensor) -> tuple[Tensor, Tensor]:
        s = reference.scores(logits.double()) + p.bias.double()
        best = s.topk(7, dim=-1)
        return best.indices[:, :6].sort(-1).values, best.values[:, 5] - best.values[:, 6]

    exact, gap = pick(x.double() @ p.gate.double().t())
    decided = gap > 1e-5
    assert decided.float().mean() > 0.99
    assert torch.equal(ours[decided], exact[decided])
    low, _ = pick((x @ p.gate.bfloat16().t()).float())
    flips = (low != exact).any(-1).float().mean()
    assert flips > 0.002, "bfloat16 logits no longer flip: the case would show nothing"
