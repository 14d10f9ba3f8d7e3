"""The plain operators against loops: top-k, paged writes, the clamped activation, experts."""

import pytest
import torch

from dsv4 import ops
from tests import reference

F64 = torch.float64


@pytest.mark.parametrize("k", [1, 3, 8])
def test_pick_takes_the_largest_ascending(k: int) -> None:
    scores = torch.randn(50, 8)
    want = scores.topk(k, dim=-1).indices.sort(-1).values
    assert torch.equal(ops.pick(scores, k), want)


def test_pick_gives_ties_to_the_lower_index() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0], [0.0] * 6, [-1, -2, -1, -1, -2, -1]])
    assert ops.pick(scores, 3).tolist() == [[0, 1, 3], [0, 1, 2], [0, 2, 3]]


def test_pick_with_fewer_finite_scores_than_k() -> None:
    """Entries that do not exist yet score -inf: they fill the list after the rest, lowest first."""
    inf = float("inf")
    scores = torch.tensor([[-inf, -inf, 3.0, -inf, -5.0], [-inf] * 5])
    assert ops.pick(scores, 3).tolist() == [[0, 2, 4], [0, 1, 2]]


def test_pick_depends_on_its_row_alone() -> None:
    scores = torch.randint(0, 4, (64, 33)).float()
    together = ops.pick(scores, 7)
    alone = torch.stack([ops.pick(row[None], 7)[0] for row in scores])
    assert torch.equal(together, alone)


def test_write_rows_leaves_its_argument() -> None:
    pool = torch.arange(12.0).reshape(4, 3)
    before = pool.clone()
    values = torch.tensor([[7.0] * 3, [0.0] * 3, [0.0] * 3])
    new = ops.write_rows(pool, torch.tensor([2, 0, 0]), values)
    assert torch.equal(pool, before)
    assert torch.equal(new[2], torch.full((3,), 7.0))
    assert torch.equal(new[[1, 3]], before[[1, 3]])
    assert new[0].abs().max() == 0


def test_the_gate_is_clamped_from_above_only() -> None:
    """Case E6 (clamp), pitfall 11: silu(min(g, L)) * clamp(u, -L, L)."""
    limit = 2.0
    g = torch.tensor([-30.0, -3.0, 1.0, 2.0, 50.0], dtype=F64)
    u = torch.tensor([1.0, -7.0, 7.0, 2.0, -1.0], dtype=F64)
    silu = torch.nn.functional.silu
    want = torch.stack(
        [
            silu(g[0]) * 1,
            silu(g[1]) * -2,
            silu(g[2]) * 2,
            silu(g[3]) * 2,
            silu(torch.tensor(2.0, dtype=F64)) * -1,
        ]
    )
    torch.testing.assert_close(ops.activate(g, u, limit), want)
    two_sided = silu(g.clamp(-limit, limit)) * u.clamp(-limit, limit)
    assert (two_sided - want).abs().max() > 0.1


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 40])
@pytest.mark.parametrize("limit", [0.7, 10.0])
def test_experts_equal_a_loop(num_tokens: int, limit: float) -> None:
    """Both forms, gathered for few rows and dense for many; the clamp active and not."""
    w = ops.Experts(
        w1=torch.randn(8, 6, 5, dtype=F64),
        w3=torch.randn(8, 6, 5, dtype=F64),
        w2=torch.randn(8, 5, 6, dtype=F64),
        limit=limit,
    )
    x = torch.randn(num_tokens, 5, dtype=F64)
    slots = torch.stack([torch.randperm(8)[:3] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 3, dtype=F64)
    want = torch.zeros(num_tokens, 5, dtype=F64)
    for t in range(num_tokens):
        for i, weight in zip(slots[t].tolist(), weights[t].tolist(), strict=True):
            want[t] += reference.expert(x[t], w.w1[i], w.w3[i], w.w2[i], limit, weight)
    torch.testing.assert_close(ops.experts(x, weights, slots, w), want, rtol=1e-12, atol=1e-12)


def test_an_expert_chosen_twice_counts_twice() -> None:
    """A hash table may name one expert in two places; both forms add its weights."""
    w = ops.Experts(
        w1=torch.randn(4, 3, 5, dtype=F64),
        w3=torch.randn(4, 3, 5, dtype=F64),
        w2=torch.randn(4, 5, 3, dtype=F64),
        limit=10.0,
    )
    x = torch.randn(6, 5, dtype=F64)
    slots = torch.tensor([[2, 2]] * 6)
    weights = torch.rand(6, 2, dtype=F64)
    many = ops.experts(x, weights, slots, w)
    few = torch.cat(
        [ops.experts(x[t : t + 1], weights[t : t + 1], slots[t : t + 1], w) for t in range(6)]
    )
    torch.testing.assert_close(many, few, rtol=1e-12, atol=1e-12)
    once = ops.experts(x, weights.sum(-1, keepdim=True), slots[:, :1], w)
    torch.testing.assert_close(many, once, rtol=1e-12, atol=1e-12)


def test_experts_of_a_bfloat16_model_round_once_each_way() -> None:
    """The weight multiplies before w2, the activation is rounded once, the sum is float32."""
    shape = (8, 16, 32)
    w = ops.Experts(
        w1=(torch.randn(shape) * 0.2).bfloat16(),
        w3=(torch.randn(shape) * 0.2).bfloat16(),
        w2=(torch.randn(8, 32, 16) * 0.2).bfloat16(),
        limit=10.0,
    )
    x = torch.randn(9, 32).bfloat16()
    slots = torch.stack([torch.randperm(8)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    y = ops.experts(x, weights, slots, w)
    assert y.dtype == torch.float32
    exact = ops.experts(
        x.double(),
        weights.double(),
        slots,
        ops.Experts(w1=w.w1.double(), w3=w.w3.double(), w2=w.w2.double(), limit=10.0),
    )
    assert (y - exact).abs().max() < 0.02 * exact.abs().max()
