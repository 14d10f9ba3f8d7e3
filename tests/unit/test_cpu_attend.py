"""The CPU attention kernel against the plain operator."""

import pytest
import torch
from torch import Tensor

from dsv4 import ops
from dsv4.ops import Keys, Ops

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.compiled


class Scene:
    """Random queries in blocks, a window pool and (own: per query) compressed keys."""

    def __init__(self, u: int, z: int, heads: int, width: int, *, far: int = 24, own: bool = False,
                 near: int = 21, dtype: torch.dtype = BF16, seed: int = 0) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        tokens = u * z

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=F64).to(dtype)

        def rows(*shape: int) -> Tensor:
            return torch.randint(0, 90, shape, generator=g)

        self.q = normal(tokens, heads, width)
        pools = normal(90, width), normal(90, width)
        place = torch.randperm(tokens, generator=g)
        self.spots = (torch.argsort(place).reshape(u, z), place)
        self.near = Keys(pools[0], rows(u, near), torch.rand(u, z, near, generator=g) < 0.7)
        shape = (u, z, far) if own else (u, far)
        self.far = (
            Keys(pools[1], rows(*shape), torch.rand(u, z, far, generator=g) < 0.7) if far else None
        )
        self.sink = torch.randn(heads, generator=g)

    def run(self, lowered: Ops) -> Tensor:
        return lowered.attend(self.q, self.near, self.far, self.sink, self.spots)

    def exact(self) -> Tensor:
        near, far = (
            k and Keys(k.pool_NC.double(), k.rows, k.visible_UZS) for k in (self.near, self.far)
        )
        return ops.attend(self.q.double(), near, far, self.sink.double(), self.spots)

    def magnitudes(self) -> Tensor:
        """As `exact`, with the size of every value: what errors of the probabilities act on."""
        blocks, place = self.spots
        q = self.q.double()[blocks] * self.q.shape[-1] ** -0.5
        rows, logits = [], []
        for k in (self.near, self.far):
            if k is not None:
                r = k.pool_NC.double()[k.rows]
                rows.append((r if r.dim() == 4 else r[:, None]).expand(*blocks.shape, -1, -1))
                dots = torch.einsum("uzhc,uzsc->uzhs", q, rows[-1])
                logits.append(dots.masked_fill(~k.visible_UZS[:, :, None], -torch.inf))
        sink = self.sink.double()[:, None].expand(*blocks.shape, -1, 1)
        p = torch.cat((*logits, sink), dim=-1).softmax(-1)[..., :-1]
        o = torch.einsum("uzhs,uzsc->uzhc", p, torch.cat(rows, dim=2).abs())
        return o.flatten(0, 1)[place]

    def bound(self, exact: Tensor) -> Tensor:
        """Errors of a bfloat16 result: its rounding, that of each probability both in the sum of
        the values and in its row's sum (u = 2^-8 each, u^2 and more besides), and float32's."""
        u = 2**-8
        size = 2 * u * (1 + 2 * u) * self.magnitudes()
        return u * (exact.abs() + size) + size + 4e-6 * exact.abs().max()


SHAPES = [
    (1, 1, 8, 512), (5, 1, 3, 80), (2, 16, 4, 64), (3, 5, 7, 24), (1, 7, 1, 6), (2, 3, 2, 33),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_float32_against_float64(fast: Ops, shape: tuple[int, ...], own: bool) -> None:
    """4e-6 of the largest value: logits near 3 of up to 512 float32 terms, then exp."""
    s = Scene(*shape, own=own, dtype=F32)
    got, exact = s.run(fast), s.exact()
    assert got.dtype == F32
    assert (got - exact).abs().max() <= 4e-6 * exact.abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_bfloat16_rounds_probabilities_and_results(
    fast: Ops, shape: tuple[int, ...], own: bool
) -> None:
    s = Scene(*shape, own=own)
    got, exact = s.run(fast), s.exact()
    assert got.dtype == BF16
    assert ((got - exact).abs() <= s.bound(exact)).all()


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_what_rounded_probabilities_cost(fast: Ops, mean: float) -> None:
    """Relative error of 150 random keys: 1.7e-3 from the rounding of the result alone.

    Rounded probabilities bring it to 2.2e-3 where values cancel (mean 0). Where they do not, it
    stays: the row's sum is that of the rounded ones, so their common error divides out.
    """
    s = Scene(4, 8, 8, 64, near=70, far=80)
    s.near.pool_NC.add_(mean)
    s.far.pool_NC.add_(mean)
    got, exact = s.run(fast), s.exact()
    alone, both = (((o - exact).norm() / exact.norm()).item() for o in (exact.to(BF16), got))
    assert 1.5e-3 < alone < 1.8e-3
    assert both < (2.4e-3 if mean == 0 else 1.05 * alone)


def test_pairs_of_keys_add_up_one_by_one(fast: Ops) -> None:
    """Keys of equal probability 1 whose sum depends on its order: it is that of the keys."""
    values = torch.tensor([1.0, 2.0**-24, 2.0**-24, -1.0, 2.0**-20, 2.0**-40, 3.0])
    pool = torch.zeros(8, 64)
    pool[1:, :48] = values[:, None]  # whole vectors and a narrow end
    pool = pool[:, :56].to(BF16).contiguous()
    one = torch.zeros(1, dtype=torch.int64)
    for count in range(1, 8):
        keys = Keys(pool, torch.arange(1, count + 1)[None], torch.ones(1, 1, count).bool())
        got = fast.attend(torch.zeros(1, 2, 56).to(BF16), keys, None,
                          torch.full((2,), -200.0), (one[None], one))  # fmt: skip
        total = torch.zeros(())
        for v in values[:count]:
            total = total + v
        want = (total * (1 / torch.tensor(float(count)))).to(BF16)
        assert (got[..., :48] == want).all()
        assert (got[..., 48:] == 0).all()


def test_without_compressed_keys(fast: Ops) -> None:
    s = Scene(3, 4, 5, 48, far=0, dtype=F32)
    exact = s.exact()
    assert (s.run(fast) - exact).abs().max() <= 4e-6 * exact.abs().max()


def test_the_result_does_not_depend_on_the_block(fast: Ops) -> None:
    """Bit-equal: each query alone in a block of its own, with its keys own instead of shared."""
    s = Scene(2, 8, 4, 64)
    together = s.run(fast)
    blocks, _ = s.spots
    for u in range(2):
        for z in range(8):
            token = blocks[u, z]
            alone = fast.attend(
                s.q[token : token + 1],
                Keys(s.near.pool_NC, s.near.rows[u : u + 1], s.near.visible_UZS[u, z][None, None]),
                Keys(s.far.pool_NC, s.far.rows[u][None, None], s.far.visible_UZS[u, z][None, None]),
                s.sink,
                (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
            )
            assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_blocks_of_any_density(fast: Ops, share: float) -> None:
    """Few visible keys: queries one by one; many: together. Bit-equal to a block of its own."""
    s = Scene(1, 12, 2, 64, far=60)
    g = torch.Generator().manual_seed(1)
    s.far = Keys(s.far.pool_NC, s.far.rows, torch.rand(1, 12, 60, generator=g) < share)
    s.near = Keys(s.near.pool_NC, s.near.rows, torch.rand(1, 12, 21, generator=g) < share)
    together, exact = s.run(fast), s.exact()
    assert ((together - exact).abs() <= s.bound(exact)).all()
    for z in range(12):
        token = s.spots[0][0, z : z + 1]
        keys = (Keys(k.pool_NC, k.rows, k.visible_UZS[:, z : z + 1]) for k in (s.near, s.far))
        one = torch.zeros(1, dtype=torch.int64)
        alone = fast.attend(s.q[token], *keys, s.sink, (one[None], one))
        assert torch.equal(alone[0], together[token[0]])


def test_keys_that_nobody_sees_do_not_matter(fast: Ops) -> None:
    """Bit-equal under longer tables, and whatever stands in the rows, NaN included."""
    s = Scene(2, 4, 4, 64)
    before = s.run(fast)
    pool = torch.cat((s.far.pool_NC, torch.full((1, 64), torch.nan, dtype=BF16)))
    rows = torch.cat((s.far.rows, torch.full((2, 37), 90)), dim=1)
    visible = torch.cat((s.far.visible_UZS, torch.zeros(2, 4, 37, dtype=torch.bool)), dim=2)
    s.far = Keys(pool, rows, visible)
    assert torch.equal(s.run(fast), before)


def test_a_query_that_sees_nothing_is_zero(fast: Ops) -> None:
    s = Scene(1, 3, 2, 32)
    s.near.visible_UZS[0, 1] = False
    s.far.visible_UZS[0, 1] = False
    got = s.run(fast)
    token = s.spots[0][0, 1]
    assert (got[token] == 0).all()
    assert got.abs().sum() > 0
    s.near.visible_UZS[:], s.far.visible_UZS[:] = False, False
    assert (s.run(fast) == 0).all()


def test_a_bad_query_does_not_poison_the_others(fast: Ops) -> None:
    s = Scene(2, 8, 4, 64)
    clean = s.run(fast)
    s.q[3, 1, 7] = torch.nan
    got = s.run(fast)
    assert got[3, 1].isnan().all()
    got[3, 1] = clean[3, 1]
    assert torch.equal(got, clean)


def test_a_bad_key_reaches_those_who_see_it_only_across_blocks(fast: Ops) -> None:
    s = Scene(2, 1, 4, 64, own=False, far=0)
    s.near.rows[:] = torch.arange(42).reshape(2, 21)
    s.near.visible_UZS[:] = True
    clean = s.run(fast)
    s.near.pool_NC[3] = torch.nan
    got, blocks = s.run(fast), s.spots[0]
    assert got[blocks[0, 0]].isnan().all()
    assert torch.equal(got[blocks[1, 0]], clean[blocks[1, 0]])


def test_tokens_that_share_a_place(fast: Ops) -> None:
    """Padding tokens take the result of a place whose query is another token's."""
    s = Scene(2, 3, 2, 32, dtype=F32)
    blocks = torch.tensor([[0, 1, 1], [2, 2, 3]])
    place = torch.tensor([0, 1, 3, 5, 0, 2])
    s.spots = (blocks, place)
    exact = s.exact()
    got = s.run(fast)
    assert (got - exact).abs().max() <= 4e-6 * exact.abs().max()
    assert torch.equal(got[4], got[0])


def test_large_logits_and_sinks(fast: Ops) -> None:
    """The maximum is taken out: logits near 300 and a sink above or far below them."""
    s = Scene(1, 2, 4, 64, dtype=F32)
    s.q *= 100
    s.sink = torch.tensor([-1e4, 0.0, 900.0, 200.0])
    exact, got = s.exact(), s.run(fast)
    assert got.isfinite().all()
    # exp of a logit near 300: an error of 300 * 64 e in the exponent.
    assert (got - exact).abs().max() <= 300 * 64 * 2**-24 * exact.abs().max()
    assert got[:, 2].abs().max() <= 1e-30


def test_more_rows_than_fit_at_once(fast: Ops) -> None:
    s = Scene(1, 16, 7, 32, dtype=F32, near=40)
    exact = s.exact()
    assert (s.run(fast) - exact).abs().max() <= 4e-6 * exact.abs().max()


def test_rows_and_places_out_of_range_are_refused(fast: Ops) -> None:
    s = Scene(1, 2, 2, 32)
    s.near.rows[0, 0] = 90
    with pytest.raises(RuntimeError, match="not one of the pool's 90"):
        s.run(fast)
    s = Scene(1, 2, 2, 32)
    s.spots[1][0] = 2
    with pytest.raises(RuntimeError, match="place 2 of 2"):
        s.run(fast)


def test_float64_takes_the_plain_form(fast: Ops) -> None:
    s = Scene(1, 2, 2, 32, dtype=F64)
    s.sink = s.sink.double()
    assert torch.equal(s.run(fast), s.run(ops.PLAIN))
