"""Sampling: the generator, the filters, the distribution."""

import itertools

import pytest
import torch
from torch import Tensor

from dsv4 import tree
from dsv4.sample import (
    ACCEPTANCE,
    DRAFTED,
    TOKEN,
    Draw,
    greedy,
    gumbel,
    kept,
    logprobs,
    philox,
    probabilities,
    sample,
    uniform,
    words,
)

V = 37


def logits(rows: int = 1, vocab: int = V, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draw(rows: int, temperature: float = 1.0, seed: int = 0, **filters: float | int) -> Draw:
    """Row y draws the token at position y."""
    made = {
        name: torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in filters.items()
    }
    return Draw(
        temperature=torch.full((rows,), temperature),
        seed=torch.full((rows,), seed),
        position=torch.arange(rows),
        **made,
    )


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]
) -> None:
    """Random123's known answers for philox4x32-10."""
    got = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(w) for w in got) == want


def test_words_are_uniform() -> None:
    """Chi-square over 256 cells of every byte, and of sums along seed, position and index."""
    seeds = torch.arange(20).repeat_interleave(20) * 977
    w = words(seeds, torch.arange(20).repeat(20), 1001)
    assert w.shape == (400, 1001)
    assert int(w.min()) >= 0
    assert int(w.max()) < 2**32
    for shift in (0, 8, 16, 24):
        cells = torch.bincount(((w >> shift) & 255).flatten(), minlength=256).double()
        expected = w.numel() / 256
        chi = ((cells - expected).square() / expected).sum()
        assert 150 < float(chi) < 370  # 255 degrees of freedom: 5 sigma
    u = w.double() / 2**32 - 0.5
    for dim in (0, 1):
        spread = u.mean(dim) * (12 * u.shape[dim]) ** 0.5
        assert float(spread.abs().max()) < 5
    # Neighbours along the index, the position and the seed are unrelated.
    for lag in (u[:, 1:] * u[:, :-1], u[1:] * u[:-1], u[20:] * u[:-20]):
        assert abs(float(lag.mean())) * 12 * lag.numel() ** 0.5 < 5


def test_words_depend_on_the_whole_seed_and_position() -> None:
    seeds = torch.tensor([0, 1, 1 << 32, 0, 0, 1 << 62])
    positions = torch.tensor([0, 0, 0, 1, 1 << 33, 0])
    rows = words(seeds, positions, 8)
    for a, b in itertools.combinations(rows, 2):
        assert not torch.equal(a, b)


def test_streams() -> None:
    """Stream 0 is what it was before there were streams; the others have nothing to do with it."""
    seeds, positions = torch.tensor([5, 1 << 40]), torch.tensor([3, 1 << 33])
    rows = words(seeds, positions, 50_000)
    assert rows[0, :4].tolist() == [4153837766, 2275000204, 27700342, 3082478567]
    assert rows[1, -4:].tolist() == [3495175316, 3423682636, 3824380219, 1699283101]
    assert torch.equal(rows, words(seeds, positions, 50_000, stream=TOKEN))
    found = [rows, *(words(seeds, positions, 50_000, stream=s) for s in (DRAFTED, ACCEPTANCE))]
    for a, b in itertools.combinations(found, 2):
        assert not (a == b).any()
        product = (a.double() / 2**32 - 0.5) * (b.double() / 2**32 - 0.5)
        assert abs(float(product.mean())) * 12 * product.numel() ** 0.5 < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_inside(dtype: torch.dtype) -> None:
    u = uniform(torch.tensor([0, 1, 2**31, 2**32 - 1]), dtype)
    assert u.dtype == dtype
    assert float(u.min()) > 0
    assert float(u.max()) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite(dtype: torch.dtype) -> None:
    g = gumbel(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]), dtype)
    assert g.isfinite().all()
    assert float(g[0]) == pytest.approx(22.87, abs=0.01)
    assert g[0] > g[2] > g[4] > -4


def test_noise_is_gumbel() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    g = gumbel(words(zero, zero, 200_000), torch.float32)
    assert float(g.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(g.var()) == pytest.approx(1.6449, abs=0.03)


@pytest.mark.parametrize("filters", [{}, {"top_k": 6}, {"top_p": 0.8, "top_k": 30}])
def test_distribution(filters: dict) -> None:
    """Chi-square of 20,000 draws against the filtered softmax."""
    n, t = 20_000, 0.8
    x = logits(vocab=12)
    got = sample(x.expand(n, -1), draw(n, t, seed=7, **filters))
    p = torch.softmax(x[0].double() / t, dim=0)
    order = p.argsort(descending=True)
    keep = torch.zeros(12, dtype=torch.bool)
    keep[order[: filters.get("top_k", 12)]] = True
    p = torch.where(keep, p, 0) / p[keep].sum()
    if "top_p" in filters:
        before = p[order].cumsum(0) - p[order]
        p = torch.where(before[order.argsort()] < filters["top_p"], p, 0)
        p = p / p.sum()
    counts = torch.bincount(got, minlength=12).double()
    assert counts[p == 0].sum() == 0
    some = p > 0
    chi = ((counts - n * p).square() / (n * p))[some].sum()
    dof = int(some.sum()) - 1
    assert float(chi) < dof + 5 * (2 * dof) ** 0.5


def test_a_row_does_not_see_its_batch() -> None:
    """Nor its place in it, nor the filters of other rows."""
    x = logits(9)
    full = Draw(
        temperature=torch.tensor([0.0, 0.5, 1, 2, 0, 1, 1, 3, 1]),
        seed=torch.arange(9) * 31,
        position=torch.arange(9) * 7,
        top_k=torch.tensor([0, 3, 0, 0, 1, 0, 5, 0, 0]),
        top_p=torch.tensor([1.0, 1, 1, 0.5, 1, 1, 1, 0.9, 1]),
        min_p=torch.tensor([0.0, 0, 0, 0, 0, 0.2, 0, 0, 0]),
    )
    want = sample(x, full)
    order = torch.tensor([4, 8, 0, 2, 6, 1, 3, 7, 5])

    def take(d: Draw, index: Tensor) -> Draw:
        return tree.tmap(lambda v: v[index], d)

    assert torch.equal(sample(x[order], take(full, order)), want[order])
    for y in range(9):
        assert sample(x[y : y + 1], take(full, torch.tensor([y]))) == want[y]
    for y in (0, 2, 8):  # no filter at all is the same as filters that keep everything
        alone = Draw(
            temperature=full.temperature[y : y + 1],
            seed=full.seed[y : y + 1],
            position=full.position[y : y + 1],
        )
        assert sample(x[y : y + 1], alone) == want[y]


def test_greedy() -> None:
    x = logits(50)
    assert torch.equal(greedy(x), x.argmax(-1))
    assert torch.equal(sample(x, draw(50, 0.0)), greedy(x))
    assert torch.equal(sample(x, draw(50, 1.0, top_k=1)), greedy(x))
    assert torch.equal(sample(x, draw(50, 1.0, top_p=1e-9)), greedy(x))
    assert torch.equal(sample(x, draw(50, 1.0, min_p=1.0)), greedy(x))
    tied = torch.zeros(50, V)
    assert sample(tied, draw(50, 1.0, top_k=1)).eq(0).all()
    assert sample(tied, draw(50, 0.0)).eq(0).all()


@pytest.mark.parametrize("t", [1e-38, 1e-4, 1e4, 1e38])
def test_extreme_temperatures(t: float) -> None:
    x = logits(200) * 100
    got = sample(x, draw(200, t))
    if t < 1:
        assert torch.equal(got, greedy(x))
    else:
        assert len(got.unique()) > V / 2


def test_ties_go_to_the_lower_index() -> None:
    """Exactly k, and exactly the smallest set, also among equal logits."""
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    n = 2000
    assert set(sample(x.expand(n, -1), draw(n, top_k=2)).tolist()) == {1, 2}
    # Three entries of about 0.28 each: two of them reach 0.5.
    assert set(sample(x.expand(n, -1), draw(n, top_p=0.5)).tolist()) == {1, 2}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_is_the_smallest_set(p: float) -> None:
    x = logits(40).sort(-1, descending=True).values
    keep = kept(x, draw(40, top_p=p))
    mass = torch.softmax(x, -1)
    for row, m in zip(keep, mass, strict=True):
        n = int(row.sum())
        assert row[:n].all()
        assert float(m[:n].sum()) >= p - 1e-6
        assert n == 1 or float(m[: n - 1].sum()) < p + 1e-6


def test_min_p() -> None:
    x = logits(40).sort(-1, descending=True).values
    keep = kept(x, draw(40, min_p=0.1))
    mass = torch.softmax(x, -1)
    assert torch.equal(keep, mass >= 0.1 * mass[:, :1])


def test_logprobs_are_the_models() -> None:
    x = logits(5).bfloat16()
    tokens = torch.tensor([3, 1, 4, 1, 5])
    own, top, index = logprobs(x, tokens, 4)
    want = torch.log_softmax(x.float(), -1)
    assert own.dtype == torch.float32
    assert torch.equal(own, want[torch.arange(5), tokens])
    assert torch.equal(top, want.gather(-1, index))
    assert torch.equal(index[:, 0], greedy(x.float()))
    assert logprobs(x, tokens, 0)[1].shape == (5, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_probabilities(dtype: torch.dtype) -> None:
    """Against the filters written out in float64, row by row."""
    x = logits(6).to(dtype)
    kinds = torch.float64 if dtype == torch.float64 else torch.float32
    d = Draw(
        temperature=torch.tensor([0, 0.5, 1, 2, 1, 1], dtype=kinds),
        seed=torch.zeros(6, dtype=torch.int64),
        position=torch.arange(6),
        top_k=torch.tensor([0, 0, 5, 0, 0, 1]),
        top_p=torch.tensor([1, 1, 1, 0.7, 1, 1], dtype=kinds),
        min_p=torch.tensor([0, 0, 0, 0, 0.1, 0], dtype=kinds),
    )
    got = probabilities(x, d)
    assert got.dtype == kinds
    want = torch.zeros(6, V, dtype=torch.float64)
    for y, t in enumerate(d.temperature.tolist()):
        p = torch.softmax(x[y].double() / (t or 1), -1)
        order = p.argsort(descending=True, stable=True)
        n = 1 if t == 0 else int(d.top_k[y]) or V
        if d.top_p[y] < 1:
            n = int((p[order].cumsum(-1) < float(d.top_p[y])).sum()) + 1
        if d.min_p[y] > 0:
            n = int((p >= float(d.min_p[y]) * p.max()).sum())
        want[y, order[:n]] = p[order[:n]] / p[order[:n]].sum()
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
    for y in (0, 5):
        assert torch.equal(got[y], torch.nn.functional.one_hot(greedy(x)[y], V).to(kinds))


def test_probabilities_do_not_see_the_filters_of_other_rows() -> None:
    x = logits(8)
    plain, filtered = draw(8, 0.7), draw(8, 0.7, top_k=0, top_p=1.0, min_p=0.0)
    assert torch.equal(probabilities(x, plain), probabilities(x, filtered))
    alone = tree.tmap(lambda v: v[3:4], plain)
    assert torch.equal(probabilities(x[3:4], alone)[0], probabilities(x, plain)[3])


@pytest.mark.parametrize("t", [0.0, 1e-38, 1.0, 1e38, torch.inf])
def test_masked_vocabulary(t: float) -> None:
    """Logits of -inf are never drawn and have probability 0, at any temperature."""
    x = logits(300)
    x[:, 5:] = -torch.inf
    x[:, 0] = -torch.inf
    for filters in ({}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 0.0}):
        d = draw(300, t, **filters)
        p = probabilities(x, d)
        assert p.isfinite().all()
        assert p[:, 0].eq(0).all()
        assert p[:, 5:].eq(0).all()
        torch.testing.assert_close(p.sum(-1), torch.ones(300))
        assert set(sample(x, d).tolist()) <= {1, 2, 3, 4}
