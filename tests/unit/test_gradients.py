"""Gradients through `forward` against finite differences in float64, and under vmap."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4 import model, mtp, ops, table, tree
from dsv4.context import Ctx
from dsv4.params import Params
from tests import tiny

F64 = torch.float64
# Window, CSA with top-k biting, HCA; hash and scored routers; the clamp reached.
CFG = tiny.short(
    "wch",
    1,
    vocab=24,
    dim=16,
    heads=2,
    head_dim=24,
    rope_dim=8,
    q_rank=12,
    o_groups=2,
    o_rank=6,
    window=4,
    csa_rate=2,
    hca_rate=4,
    index_heads=16,
    index_dim=8,
    index_topk=3,
    experts=4,
    expert_dim=8,
    swiglu_limit=1.5,
)
LENGTH = 13
# They steer a choice among whole entries or experts and nothing else.
STEERING = ("attn.indexer.", "ffn.bias")

Loss = Callable[[dict[str, Tensor]], Tensor]


def _moving(params: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(floating leaves, routing tables) by path."""
    flat = tree.paths(params)
    own = {n: t for n, t in flat.items() if t.is_floating_point()}
    return own, {n: t for n, t in flat.items() if n not in own}


def _loss(ids: Tensor, ctx: Ctx) -> tuple[Loss, dict[str, Tensor]]:
    """A smooth function of the logits of backbone and draft, and the leaves it is taken at."""
    params = tiny.params(CFG, 8, F64)
    own, fixed = _moving(params)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(2, LENGTH, CFG.vocab, generator=generator, dtype=F64)

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        p = tree.from_paths(params, {**leaves, **fixed})
        logits, drafted = mtp.forward(p, ids[None], ctx)
        both = torch.stack((logits[0], drafted[0]))
        return (torch.tanh(both / 4) * weights)[:, 1:].sum()

    return loss, own


@pytest.fixture(scope="module")
def taken() -> tuple[Loss, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, the leaves, the gradients; with no decision near a tie that a step could flip."""
    ids = tiny.tokens(CFG, 1, LENGTH, 2)[0]
    watch = tiny.Watch()
    watched, own = _loss(ids, Ctx(CFG, ops=watch.ops))
    watched(own)
    assert min(float(tiny.gaps(s, k).min()) for s, k in watch.seen) > 1e-4
    loss, own = _loss(ids, Ctx(CFG))
    return loss, own, torch.func.grad(loss)(own)


def _difference(loss: Loss, own: dict[str, Tensor], direction: dict[str, Tensor]) -> float:
    """Central difference along a direction, of fourth order."""
    step = 2e-5

    def at(scale: float) -> float:
        moved = {n: own[n] + scale * step * d for n, d in direction.items()}
        return float(loss({**own, **moved}))

    return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)


def _differences(loss: Loss, own: dict[str, Tensor], name: str, at: Tensor) -> Tensor:
    """Central differences in some coordinates of one leaf, evaluated side by side."""
    step, value = 2e-5, own[name]
    units = torch.nn.functional.one_hot(at, value.numel()).to(F64)
    moves = torch.cat((units, -units)).reshape(-1, *value.shape) * step
    up, down = torch.func.vmap(lambda m: loss({**own, name: value + m}))(moves).chunk(2)
    return (up - down) / (2 * step)


def _agree(got: float, want: float, scale: float) -> None:
    assert abs(got - want) <= 1e-7 * max(abs(want), scale), (got, want)


@pytest.mark.parametrize("seed", range(3))
def test_random_directions(
    taken: tuple[Loss, dict[str, Tensor], dict[str, Tensor]], seed: int
) -> None:
    loss, own, grads = taken
    generator = torch.Generator().manual_seed(seed)
    direction = {
        n: torch.randn(t.shape, generator=generator, dtype=F64) * 0.03 for n, t in own.items()
    }
    along = sum(float((grads[n] * d).sum()) for n, d in direction.items())
    assert abs(along) > 0.1
    _agree(along, _difference(loss, own, direction), 1.0)


def test_every_leaf(taken: tuple[Loss, dict[str, Tensor], dict[str, Tensor]]) -> None:
    """Of each tensor of the model the coordinate with the largest gradient, and one at random."""
    loss, own, grads = taken
    generator = torch.Generator().manual_seed(5)
    assert {n for n, _ in tree.paths(table.spec(CFG)).items()} >= set(own)
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
        if any(s in name for s in STEERING):
            assert grad.abs().max() == 0, name
            continue
        top = grad.abs().argmax()
        assert grad.flatten()[top] != 0, f"{name} has no gradient at all"
        at = torch.stack((top, torch.randint(grad.numel(), (), generator=generator)))
        want, got = grad.flatten()[at], _differences(loss, own, name, at)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8, msg=f"{name}: {got} {want}")


def test_steering_leaves_have_no_influence_nearby(
    taken: tuple[Loss, dict[str, Tensor], dict[str, Tensor]],
) -> None:
    """Zero by construction and in fact: small moves of indexer and bias leave the loss's bits."""
    loss, own, _ = taken
    steering = {n: t for n, t in own.items() if any(s in n for s in STEERING)}
    assert {n.split(".")[-1] for n in steering} >= {"wq_b", "weights_proj", "wkv", "ape", "bias"}
    moved = {n: t + 1e-7 * torch.randn_like(t) for n, t in steering.items()}
    assert float(loss({**own, **moved})) == float(loss(own))
    far = {n: t + 3 * torch.randn_like(t) for n, t in steering.items()}
    assert float(loss({**own, **far})) != float(loss(own))


def test_the_clamp_is_met() -> None:
    """Gradients above were taken with saturated gates among them, whose own gradient is 0."""
    g = torch.tensor([2.0, -2.0, 0.5], dtype=F64)
    u = torch.tensor([1.0, -3.0, 0.5], dtype=F64)
    dg, du = torch.func.grad(lambda a, b: ops.activate(a, b, 1.5).sum(), argnums=(0, 1))(g, u)
    assert dg[0] == 0
    assert dg[1] != 0
    assert du[1] == 0
    assert du[2] != 0
    params, x = tiny.params(CFG, 8, F64), torch.randn(50, CFG.dim, dtype=F64)
    gate = torch.einsum("td,xfd->txf", x, params.layers[0].ffn.w1)
    assert 0.02 < (gate > CFG.swiglu_limit).float().mean() < 0.5


# vmap.


def test_vmap_over_prompts_equals_the_loop() -> None:
    params, ids = tiny.params(CFG, 8, F64), tiny.tokens(CFG, 4, LENGTH, 6)

    def one(t: Tensor) -> Tensor:
        return model.forward(params, t[None], Ctx(CFG))[0]

    looped = torch.stack([one(t) for t in ids])
    torch.testing.assert_close(torch.func.vmap(one)(ids), looped, rtol=0, atol=1e-12)
    batched = model.forward(params, ids, Ctx(CFG))
    torch.testing.assert_close(batched, looped, rtol=0, atol=1e-12)


def test_vmap_over_models_equals_the_loop() -> None:
    """An ensemble: parameters stacked leaf by leaf, one prompt."""
    models = [tiny.params(CFG, seed, F64) for seed in (1, 2, 3)]
    stacked = tree.tmap(lambda *t: torch.stack(t), *models)
    ids = tiny.tokens(CFG, 2, LENGTH, 6)

    def one(p: Params) -> Tensor:
        return model.forward(p, ids, Ctx(CFG))

    looped = torch.stack([one(p) for p in models])
    torch.testing.assert_close(torch.func.vmap(one)(stacked), looped, rtol=0, atol=1e-12)


@pytest.mark.parametrize("qat", [False, True], ids=["plain", "qat"])
def test_gradients_of_each_prompt_equal_the_loop(qat: bool) -> None:
    """grad under vmap, and grad of a vmapped loss: with roundings on, straight through in both."""
    cfg = CFG if not qat else dataclasses.replace(CFG, head_dim=72, index_dim=32)
    params, ids = tiny.params(cfg, 8, F64), tiny.tokens(cfg, 3, LENGTH, 6)
    own, fixed = _moving(params)
    ctx = Ctx(cfg, qat=qat)

    def loss(leaves: dict[str, Tensor], t: Tensor) -> Tensor:
        p = tree.from_paths(params, {**leaves, **fixed})
        logits = model.forward(p, t[None], ctx)[0]
        return torch.nn.functional.cross_entropy(logits[:-1], t[1:])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(own, ids)
    loop = [torch.func.grad(loss)(own, t) for t in ids]
    mean = torch.func.grad(lambda p: torch.func.vmap(loss, in_dims=(None, 0))(p, ids).mean())(own)
    for name in own:
        want = torch.stack([g[name] for g in loop])
        torch.testing.assert_close(each[name], want, rtol=0, atol=1e-11, msg=name)
        torch.testing.assert_close(mean[name], want.mean(0), rtol=0, atol=1e-11, msg=name)


def test_a_step_of_gradient_descent_lowers_the_loss() -> None:
    """Also under plain autograd, whose gradient equals torch.func's."""
    params, ids = tiny.params(CFG, 8, F64), tiny.tokens(CFG, 2, LENGTH, 6)
    own, fixed = _moving(params)

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        logits = model.forward(tree.from_paths(params, {**leaves, **fixed}), ids, Ctx(CFG))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    grads = torch.func.grad(loss)(own)
    leaves = {n: t.clone().requires_grad_() for n, t in own.items()}
    plain = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True)
    for (name, want), got in zip(grads.items(), plain, strict=True):
        if got is None:
            assert want.abs().max() == 0, name
        else:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-13, msg=name)
    before = float(loss(own))
    after = float(loss({n: t - 0.05 * grads[n] for n, t in own.items()}))
    assert after < before - 1e-3
