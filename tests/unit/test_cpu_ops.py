"""The CPU kernels against the plain operators: values, edges, batch invariance, captures.

Tolerances: e = 2^-24 is half a float32 ulp. A float32 sum of n terms errs by at most n e times the
sum of their sizes, whatever the order, so products are held to n e (sum of |x| |w|) of the exact
value, element by element. Rounding to bfloat16 adds 2^-8 of what is rounded.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from compiler.cpu_layout import lay_out, prepare, rows_of
from compiler.segments import experts_by_segment
from dsv4 import ops, table, tree
from dsv4.mesh import P
from dsv4.ops import Experts, Ops
from dsv4.table import Leaf
from tests import tiny

BF16, F32 = torch.bfloat16, torch.float32
E = 2.0**-24
pytestmark = pytest.mark.compiled


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def panels(w: Tensor, *, role: str = "model", model: torch.dtype | None = None) -> Tensor:
    leaf = Leaf(shape=tuple(w.shape), axes=P(), official="", hf="", role=role, operand=True)
    return lay_out(leaf, w, model or w.dtype)


# Layout.


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(32, 6), (3, 16, 10)])
def test_panels_hold_the_weight(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = draw(*shape, dtype=dtype)
    laid = panels(w)
    assert laid.dim() == w.dim() + 2
    assert laid.is_contiguous()
    assert torch.equal(rows_of(laid), w)


@pytest.mark.parametrize("shape", [(24, 6), (16, 7)])
def test_weights_that_do_not_fill_panels_stay(shape: tuple[int, int]) -> None:
    w = draw(*shape)
    assert panels(w) is w


def test_wide_weights_are_narrowed_only_where_nothing_is_lost() -> None:
    exact = draw(16, 4).float()
    assert panels(exact, role="wide", model=BF16).dtype == BF16
    assert panels(exact, role="wide", model=F32).dtype == F32
    exact[3, 1] += 1e-6
    kept = panels(exact, role="wide", model=BF16)
    assert kept.dtype == F32
    assert torch.equal(rows_of(kept), exact)


def test_only_declared_operands_are_laid_out() -> None:
    """Every tensor that an operator alone reads changes; the others are the very same."""
    cfg = tiny.short(mtp=1, dim=64)
    params = tiny.params(cfg, dtype=BF16)
    laid, spec = tree.paths(prepare(params, cfg)), tree.paths(table.spec(cfg))
    for name, t in tree.paths(params).items():
        if not spec[name].operand:
            assert laid[name] is t, name
        elif t.shape[-2] % 16 == 0:
            assert laid[name].dim() == t.dim() + 2, name
    declared = {n.rsplit(".", 1)[-1] for n, leaf in spec.items() if leaf.operand}
    assert declared == {
        "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "wgate", "weights_proj", "gate", "w1", "w3", "w2",
        "head", "e_proj", "h_proj",
    }  # fmt: skip


# Products.


def sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The exact product and the sum of its terms' sizes."""
    x, w = x.double(), w.double()
    return ops.linear(x, w), ops.linear(x.abs(), w.abs())


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 33])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_products_are_float32_sums(fast: Ops, tokens: int, dtype: torch.dtype) -> None:
    for n in (16, 32, 48, 64, 80, 208):
        x, w = draw(tokens, 70, dtype=dtype), draw(n, 70, seed=1, dtype=dtype)
        exact, size = sums(x, w)
        got = fast.linear_wide(x, panels(w))
        assert got.dtype == F32
        assert ((got - exact).abs() <= 70 * E * size).all()
        once = fast.linear(x, panels(w))
        assert once.dtype == dtype
        assert torch.equal(once, got.to(dtype))


def test_grouped_products(fast: Ops) -> None:
    x, w = draw(9, 3, 40), draw(3, 32, 40, seed=1)
    exact, size = sums(x, w)
    got = fast.linear_wide(x, panels(w))
    assert got.shape == (9, 3, 32)
    assert ((got - exact).abs() <= 40 * E * size).all()
    assert torch.equal(fast.linear(x, panels(w)), got.to(BF16))


def test_a_wide_weight_of_a_narrow_model_keeps_its_digits(fast: Ops) -> None:
    x, w = draw(3, 64), draw(16, 64, seed=1, dtype=F32)
    laid = panels(w, role="wide", model=BF16)
    exact, size = sums(x, w)
    assert ((fast.linear_wide(x, laid) - exact).abs() <= 64 * E * size).all()


def test_one_large_term_does_not_hide_the_rest(fast: Ops) -> None:
    """Signs and pairs: 2^12 - 2^12 + 1 is 1, with the large terms in one pair or in two."""
    for large in ((0, 1), (1, 2), (3, 8)):
        x = torch.zeros(1, 10, dtype=BF16)
        x[0, list(large)] = torch.tensor([4096.0, -4096.0], dtype=BF16)
        x[0, 9] = 1
        w = torch.ones(16, 10, dtype=BF16)
        assert fast.linear_wide(x, panels(w)).tolist() == [[1.0] * 16]


@pytest.mark.parametrize("wide", [False, True])
def test_a_product_depends_on_its_own_token(fast: Ops, wide: bool) -> None:
    """Bit-equal for every number of tokens: the sum of an output is one chain over k."""
    own = fast.linear_wide if wide else fast.linear
    x, w = draw(61, 128), panels(draw(112, 128, seed=1))
    together = own(x, w)
    for count in (1, 2, 3, 6, 7, 12, 13, 60):
        assert torch.equal(own(x[:count], w), together[:count]), count


def test_nan_and_infinity_stay_in_their_row(fast: Ops) -> None:
    x, w = draw(8, 32), draw(32, 32, seed=1)
    clean = fast.linear(x, panels(w))
    bad = x.clone()
    bad[2, 5], bad[4, 0], bad[6, 1] = torch.nan, torch.inf, -0.0
    got = fast.linear(bad, panels(w))
    assert got[2].isnan().all()
    assert torch.equal(got[4].isinf(), torch.ones(32, dtype=torch.bool))
    assert torch.equal(got[4] > 0, w[:, 0] > 0)
    rest = [0, 1, 3, 5, 7]
    assert torch.equal(got[rest], clean[rest])
    assert got[6].isfinite().all()


def test_no_tokens(fast: Ops) -> None:
    w = panels(draw(32, 16))
    assert fast.linear(draw(0, 16), w).shape == (0, 32)


# Experts.


def drawn(slots: int, hidden: int, dim: int, dtype: torch.dtype, limit: float = 3.0) -> Experts:
    """Weights that keep activations near 1, with some of them clamped."""
    scale = 3 * dim**-0.5
    return Experts(
        w1=(draw(slots, hidden, dim, dtype=torch.float64) * scale).to(dtype),
        w3=(draw(slots, hidden, dim, seed=1, dtype=torch.float64) * scale).to(dtype),
        w2=draw(slots, dim, hidden, seed=2, dtype=dtype),
        limit=limit,
    )


def laid_out(w: Experts) -> Experts:
    return dataclasses.replace(w, w1=panels(w.w1), w3=panels(w.w3), w2=panels(w.w2))


def double(w: Experts) -> Experts:
    return dataclasses.replace(w, w1=w.w1.double(), w3=w.w3.double(), w2=w.w2.double())


def routed(tokens: int, slots: int, kept: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, slots, generator=g).topk(kept, -1).indices
    return torch.rand(tokens, kept, generator=g), chosen


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize(
    ("hidden", "dim"), [(32, 64), (48, 80), (21, 30), (7, 5), (33, 17)], ids=str
)
def test_experts_of_float32(fast: Ops, tokens: int, hidden: int, dim: int) -> None:
    """Against float64: 1e-6 of the largest value is 16 ulp; sums have up to 80 terms."""
    w = drawn(9, hidden, dim, F32)
    x, (weights, slots) = draw(tokens, dim, seed=3, dtype=F32), routed(tokens, 9, 3)
    exact = ops.experts(x.double(), weights.double(), slots, double(w))
    got = fast.experts(x, weights, slots, w)
    assert got.dtype == F32
    assert (got - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize(("hidden", "dim"), [(32, 64), (48, 80), (21, 30), (7, 5)], ids=str)
def test_experts_of_bfloat16_are_nearer_than_the_plain_form(
    fast: Ops, tokens: int, hidden: int, dim: int
) -> None:
    """One rounding (the activation's) where the plain form has four.

    So the error of a sum is at most 2^-8 of the sum of its terms' sizes, and float32's.
    """
    w = drawn(9, hidden, dim, BF16)
    x, (weights, slots) = draw(tokens, dim, seed=3), routed(tokens, 9, 3)
    exact = ops.experts(x.double(), weights.double(), slots, double(w))
    mine = (fast.experts(x, weights, slots, w) - exact).abs()
    plain = (experts_by_segment(x, weights, slots, w) - exact).abs()
    size = torch.zeros_like(exact)
    for k in range(3):
        own = [t[slots[:, k]] for t in (double(w).w1, double(w).w3, double(w).w2)]
        g, u = (torch.einsum("td,tfd->tf", x.double(), t) for t in own[:2])
        a = weights.double()[:, k, None] * ops.activate(g, u, w.limit)
        size += torch.einsum("tf,tdf->td", a.abs(), own[2].abs())
    assert (mine <= (2**-8 + 1e-6) * size).all()
    assert mine.square().mean() < plain.square().mean()


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_laid_out_experts_are_the_same_bits(fast: Ops, tokens: int, dtype: torch.dtype) -> None:
    """Both forms: panels made on the way, and panels made at load."""
    w = drawn(8, 48, 80, dtype)
    x, (weights, slots) = draw(tokens, 80, seed=3, dtype=dtype), routed(tokens, 8, 3)
    assert torch.equal(
        fast.experts(x, weights, slots, w), fast.experts(x, weights, slots, laid_out(w))
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_an_experts_row_depends_on_its_own_token(fast: Ops, dtype: torch.dtype) -> None:
    """Bit-equal whether few rows or many share an expert, in any order of tokens."""
    w = laid_out(drawn(8, 32, 64, dtype))
    x, (weights, slots) = draw(57, 64, seed=3, dtype=dtype), routed(57, 8, 3)
    together = fast.experts(x, weights, slots, w)
    for part in (slice(0, 1), slice(3, 5), slice(9, 28)):
        assert torch.equal(fast.experts(x[part], weights[part], slots[part], w), together[part])
    order = torch.randperm(57)
    assert torch.equal(fast.experts(x[order], weights[order], slots[order], w), together[order])


def test_all_tokens_to_one_expert_and_one_expert_twice(fast: Ops) -> None:
    w = drawn(8, 32, 64, F32)
    x, slots = draw(20, 64, seed=3, dtype=F32), torch.full((20, 2), 5)
    weights = torch.full((20, 2), 0.5)
    got = fast.experts(x, weights, slots, w)
    once = fast.experts(x, torch.ones(20, 1), slots[:, :1], w)
    assert torch.equal(got, once)  # halves are exact
    exact = ops.experts(x.double(), weights.double(), slots, double(w))
    assert (got - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_the_sum_runs_in_the_order_of_the_slots(fast: Ops) -> None:
    """2^26 + 1 - 2^26 in float32 is 0 in this order and 1 in another."""
    w = Experts(w1=torch.ones(3, 1, 1), w3=torch.ones(3, 1, 1), w2=torch.ones(3, 1, 1), limit=1e9)
    act = float(ops.activate(torch.ones(1), torch.ones(1), 1e9))
    big = 2.0**26
    for order, want in (((0, 1, 2), 0.0), ((0, 2, 1), 1.0)):
        weights = torch.tensor([[big, 1.0, -big]])[:, list(order)]
        slots = torch.tensor([order])
        got = fast.experts(torch.ones(1, 1), weights, slots, w)
        assert abs(float(got) / act - want) < 1e-5


def test_a_bad_token_does_not_poison_the_others(fast: Ops) -> None:
    w = drawn(4, 21, 30, BF16)
    x, (weights, slots) = draw(12, 30, seed=3), routed(12, 4, 2)
    clean = fast.experts(x, weights, slots, w)
    bad = x.clone()
    bad[5, 3], bad[7, 0] = torch.nan, torch.inf
    got, rest = fast.experts(bad, weights, slots, w), [i for i in range(12) if i not in (5, 7)]
    assert got[5].isnan().all()
    assert torch.equal(got[rest], clean[rest])
    # An infinite input saturates: gate and up are clamped, so the result is finite or a gate's NaN.
    plain = ops.experts(bad.double(), weights.double(), slots, double(w))[7]
    assert torch.equal(got[7].isnan(), plain.isnan())


@pytest.mark.parametrize("g", [-torch.inf, -200.0, -88.0, -1e-30, 0.0, 1.0, 88.0, 200.0, torch.inf])
@pytest.mark.parametrize("limit", [10.0, 1e9])
def test_the_activation_at_its_ends(fast: Ops, g: float, limit: float) -> None:
    w = Experts(
        w1=torch.full((1, 1, 1), g), w3=torch.ones(1, 1, 1), w2=torch.ones(1, 1, 1), limit=limit
    )
    one = torch.ones(1, 1)
    got = float(fast.experts(one, one, torch.zeros(1, 1, dtype=torch.int64), w))
    want = float(ops.activate(torch.tensor(g), torch.tensor(1.0), limit))
    torch.testing.assert_close(got, want, rtol=4 * E, atol=1e-37, equal_nan=True)


def test_a_slot_that_does_not_exist_is_refused(fast: Ops) -> None:
    w = drawn(4, 8, 8, F32)
    with pytest.raises(RuntimeError, match="slot 4 of 4"):
        fast.experts(draw(1, 8, dtype=F32), torch.ones(1, 1), torch.full((1, 1), 4), w)


def test_float64_takes_the_plain_form(fast: Ops) -> None:
    w = double(drawn(4, 8, 8, F32))
    x, weights = draw(2, 8, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    slots = torch.zeros(2, 1, dtype=torch.int64)
    assert torch.equal(fast.experts(x, weights, slots, w), ops.experts(x, weights, slots, w))


# Captures.


def linear_case() -> tuple[tuple, dict]:
    return (draw(5, 32), panels(draw(48, 32, seed=1)), True), {}


def experts_case() -> tuple[tuple, dict]:
    w = laid_out(drawn(8, 32, 64, BF16))
    weights, slots = routed(5, 8, 2)
    return (draw(5, 64), weights, slots, w.w1, w.w3, w.w2, 10.0), {}


def attend_case() -> tuple[tuple, dict]:
    rows, visible = torch.arange(12).reshape(2, 6), torch.rand(2, 3, 6) < 0.5
    blocks = torch.arange(6).reshape(2, 3)
    pool = draw(12, 16)
    keys = (pool, rows, visible, pool, rows[:, :0], visible[..., :0])
    return (draw(6, 2, 16), *keys, torch.zeros(2), blocks, torch.arange(6)), {}


@pytest.mark.parametrize("case", [linear_case, experts_case, attend_case])
def test_torch_accepts_the_operators(fast: Ops, case) -> None:
    """Schemas, shape functions and dispatch, as torch checks them itself."""
    op = getattr(torch.ops.dsv4_cpu, case.__name__.removesuffix("_case"))
    args, kwargs = case()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(op.default, args, kwargs, test_utils=tests)
