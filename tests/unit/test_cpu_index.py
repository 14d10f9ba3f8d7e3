"""The CPU kernels of the indexer and the router's choice against the plain operators."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4 import ops
from dsv4.ops import Keys, Ops

BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.compiled


# The choice.


@pytest.mark.parametrize(("count", "k"), [(8, 1), (8, 8), (33, 7), (256, 6), (2048, 512)])
def test_the_same_indices(fast: Ops, count: int, k: int) -> None:
    """Ties (integers), negative zeros, infinities and rows that have little else."""
    g = torch.Generator().manual_seed(count + k)
    rows = [
        torch.randn(20, count, generator=g),
        torch.randint(-2, 3, (20, count), generator=g).float(),
        torch.randint(-1, 2, (20, count), generator=g) * torch.tensor(0.0),
        torch.where(torch.rand(20, count, generator=g) < 0.9, -torch.inf, 1.0),
        torch.where(torch.rand(20, count, generator=g) < 0.5, torch.inf, -1e38),
    ]
    scores = torch.cat(rows)
    assert torch.equal(fast.pick(scores, k), ops.pick(scores, k))
    assert torch.equal(
        fast.pick(scores.reshape(4, -1, count), k).flatten(0, 1), ops.pick(scores, k)
    )


@given(
    values=st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=40), data=st.data()
)
@settings(max_examples=200, deadline=None)
def test_any_row(fast: Ops, values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    scores = torch.tensor([values])
    assert torch.equal(fast.pick(scores, k), ops.pick(scores, k))


def test_a_row_with_nan_chooses_indices_that_exist(fast: Ops) -> None:
    scores = torch.randn(5, 30)
    want = fast.pick(scores, 4)
    scores[2, :28] = torch.nan
    scores[3] = -torch.nan
    got = fast.pick(scores, 4)
    assert ((got >= 0) & (got < 30)).all()
    assert torch.equal(got[[0, 1, 4]], want[[0, 1, 4]])
    assert (got.diff(dim=-1) > 0).all()


def test_more_than_there_are_is_refused(fast: Ops) -> None:
    with pytest.raises(RuntimeError, match="pick 4 of 3"):
        fast.pick(torch.zeros(1, 3), 4)


# Scores.


def scene(u: int, z: int, heads: int, width: int, entries: int, dtype: torch.dtype, seed: int = 0):
    """Queries, weights of both signs, keys and visibility."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(u * z, heads, width, generator=g).to(dtype)
    w = torch.randn(u * z, heads, generator=g) * heads**-0.5 * width**-0.5
    pool = torch.randn(70, width, generator=g).to(dtype)
    rows = torch.randint(0, 70, (u, entries), generator=g)
    visible = torch.rand(u, z, entries, generator=g) < 0.7
    blocks = torch.randperm(u * z, generator=g).reshape(u, z)
    return q, w, Keys(pool, rows, visible), blocks


def double(q: Tensor, w: Tensor, keys: Keys, blocks: Tensor) -> Tensor:
    held = Keys(keys.pool_NC.double(), keys.rows, keys.visible_UZS)
    return ops.scores(q.double(), w.double(), held, blocks)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 16, 128, 200), (3, 4, 7, 24, 64), (2, 5, 1, 6, 65), (1, 16, 13, 32, 1)],
    ids=str,
)
def test_scores_against_float64(fast: Ops, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """2e-6: float32 sums of 128 products of size 1 / sqrt(128), over 16 heads."""
    args = scene(*shape, dtype)
    got, exact = fast.scores(*args), double(*args)
    assert got.dtype == F32
    hidden = ~args[2].visible_UZS
    assert torch.equal(got == -torch.inf, hidden)
    error = (got - exact).masked_fill(hidden, 0)
    assert error.abs().max() <= 2e-6
    assert exact.masked_fill(hidden, 0).abs().max() > 0.3


def test_a_score_depends_on_its_query_and_entry(fast: Ops) -> None:
    """Bit-equal for a query alone, over fewer entries, whoever else sees them."""
    q, w, keys, blocks = scene(2, 6, 16, 32, 100, BF16)
    together = fast.scores(q, w, keys, blocks)
    for u, z in ((0, 0), (1, 4)):
        some = slice(3, 90)
        own = Keys(
            keys.pool_NC, keys.rows[u : u + 1, some], keys.visible_UZS[u, z][None, None, some]
        )
        alone = fast.scores(q, w, own, blocks[u, z][None, None])
        assert torch.equal(alone[0, 0], together[u, z, some])


def test_bad_queries_and_keys_stay_where_they_are(fast: Ops) -> None:
    q, w, keys, blocks = scene(2, 3, 4, 32, 20, F32)
    clean = fast.scores(q, w, keys, blocks)
    q[blocks[0, 1], 2, 5] = torch.nan
    got = fast.scores(q, w, keys, blocks)
    assert (got[0, 1].isnan() == keys.visible_UZS[0, 1]).all()
    got[0, 1] = clean[0, 1]
    assert torch.equal(got, clean)


def test_an_odd_width_takes_the_plain_form(fast: Ops) -> None:
    args = scene(1, 2, 3, 5, 7, BF16)
    assert torch.equal(fast.scores(*args), ops.scores(*args))


def test_torch_accepts_the_operators(fast: Ops) -> None:
    """Schemas, shape functions and dispatch, as torch checks them itself."""
    q, w, keys, blocks = scene(2, 3, 4, 8, 20, BF16)
    args = (q, w, keys.pool_NC, keys.rows, keys.visible_UZS, blocks)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.dsv4_cpu.scores.default, args, {}, test_utils=tests)
    torch.library.opcheck(
        torch.ops.dsv4_cpu.pick.default, (torch.randn(3, 9), 4), {}, test_utils=tests
    )
