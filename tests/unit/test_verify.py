"""Verification of drafts: what is returned, how it is distributed, how often drafts stand."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4 import sample, tree, verify
from dsv4.sample import Draw

V = 10
N = 20_000
FILTERS = ({}, {"top_k": 6}, {"top_p": 0.8}, {"top_k": 8, "top_p": 0.9, "min_p": 0.02})


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draw(
    rows: int,
    position: int = 5,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **filters: float | int,
) -> Draw:
    """Row y has seed y; all draw the token at `position`."""
    made = {
        name: torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else dtype)
        for name, value in filters.items()
    }
    return Draw(
        temperature=torch.full((rows,), temperature, dtype=dtype),
        seed=torch.arange(rows),
        position=torch.full((rows,), position),
        **made,
    )


def at(d: Draw, index: Tensor) -> Draw:
    return tree.tmap(lambda v: v[index], d)


def none(rows: int) -> Tensor:
    return torch.full((rows,), -1)


def chi(cells: Tensor, p: Tensor) -> float:
    """Standard deviations by which Pearson's statistic exceeds its degrees of freedom.

    Cells that expect fewer than 5 count as one; any count where p is 0 is infinite.
    """
    counts, expected = torch.bincount(cells, minlength=len(p)).double(), p * len(cells)
    if counts[p == 0].sum() > 0:
        return torch.inf
    few = expected < 5
    counts = torch.cat([counts[~few], counts[few].sum()[None]])
    expected = torch.cat([expected[~few], expected[few].sum()[None]])
    some = expected > 0
    dof = int(some.sum()) - 1
    return float(((counts - expected).square() / expected)[some].sum() - dof) / (2 * dof) ** 0.5


@dataclasses.dataclass(frozen=True)
class Language:
    """Two successive tokens: logits of the first, and of the second after each first."""

    first: Tensor  # [V]
    second: Tensor  # [V, V]

    def joint(self, temperature: float, **filters: float | int) -> Tensor:
        """Exact probabilities of both tokens, in float64. [V * V]"""

        def p(x: Tensor) -> Tensor:
            kind = torch.float64
            return sample.probabilities(x.double(), draw(len(x), 0, temperature, kind, **filters))

        return (p(self.first[None])[0][:, None] * p(self.second)).flatten()


TARGET = Language(logits(V, seed=1), logits(V, V, seed=2))
DRAFT = Language(TARGET.first + 0.6 * logits(V, seed=3), TARGET.second + 0.6 * logits(V, V, seed=4))


def by_ratio(rows: Tensor, drafts: Tensor, q: Tensor, d: Draw) -> Tensor:
    return verify.by_ratio(rows, drafts, q, d)


def from_target(rows: Tensor, drafts: Tensor, q: Tensor, d: Draw) -> Tensor:
    """The classic wrong rule: after a rejection the token comes from p, not from max(p - q, 0)."""
    found = verify.by_ratio(rows, drafts, q, d)
    return torch.where(found == drafts, drafts, sample.sample(rows, d))


def greedy_draft(rows: Tensor, d: Draw) -> tuple[Tensor, Tensor]:
    """Wrong: drafts of highest probability, said to be drawn (C5)."""
    return sample.greedy(rows), verify.propose(rows, d)[1]


def one_hot_draft(rows: Tensor, d: Draw) -> tuple[Tensor, Tensor]:
    """Right: drafts of highest probability, and q says so."""
    best = sample.greedy(rows)
    return best, F.one_hot(best, V).float()


def drafted_pairs(rule, propose, **settings: float | int) -> Tensor:
    """N pairs of tokens by speculation with two drafts, then one or none for what is left. [N]"""
    d0, d1 = draw(N, 5, **settings), draw(N, 6, **settings)
    draft0, q0 = propose(DRAFT.first.expand(N, -1), d0)
    draft1, q1 = propose(DRAFT.second[draft0], d1)
    token0 = rule(TARGET.first.expand(N, -1), draft0, q0, d0)
    token1 = rule(TARGET.second[draft0], draft1, q1, d1)
    # The same position once more, with the same words; odd rows are not drafted for again.
    draft1, q1 = propose(DRAFT.second[token0], d1)
    draft1 = torch.where(torch.arange(N) % 2 == 1, -1, draft1)
    again = rule(TARGET.second[token0], draft1, q1, d1)
    return token0 * V + torch.where(token0 == draft0, token1, again)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("propose", [verify.propose, one_hot_draft])
def test_ratio_has_the_targets_distribution(propose, filters: dict) -> None:
    """C5: chi-square over the joint of two tokens, also where q is one-hot."""
    got = drafted_pairs(by_ratio, propose, temperature=0.8, **filters)
    assert chi(got, TARGET.joint(0.8, **filters)) < 5


def test_the_test_of_the_distribution_can_fail() -> None:
    """C5: wrong rules are far off, so that the test above says something."""
    want = TARGET.joint(0.8)
    assert chi(drafted_pairs(from_target, verify.propose, temperature=0.8), want) > 50
    assert chi(drafted_pairs(by_ratio, greedy_draft, temperature=0.8), want) > 50
    assert chi(drafted_pairs(by_ratio, verify.propose, temperature=1.0), want) > 50


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_coupled_is_undrafted_decoding(filters: dict) -> None:
    """C5: token for token, and so by chi-square over the joint of two tokens."""
    d0, d1 = draw(N, 5, 0.8, **filters), draw(N, 6, 0.8, **filters)
    plain0 = sample.sample(TARGET.first.expand(N, -1), d0)
    plain1 = sample.sample(TARGET.second[plain0], d1)
    want = TARGET.joint(0.8, **filters)
    assert chi(plain0 * V + plain1, want) < 5

    draft0 = sample.sample(DRAFT.first.expand(N, -1), d0)
    token0 = sample.sample(TARGET.first.expand(N, -1), d0)
    token1 = sample.sample(TARGET.second[draft0], d1)  # the row after the draft
    again = sample.sample(TARGET.second[token0], d1)  # or the next step's
    assert 0.1 < float((token0 == draft0).float().mean()) < 0.95
    assert torch.equal(token0, plain0)
    assert torch.equal(torch.where(token0 == draft0, token1, again), plain1)
    # Noise of another position is another distribution: here both tokens share one.
    wrong = sample.sample(TARGET.second[plain0], d0)
    assert chi(plain0 * V + wrong, want) > 50


def within(found: Tensor, p: float | Tensor) -> bool:
    """Whether the share of true entries is p, to 4 standard deviations."""
    p = float(p)
    return abs(float(found.float().mean()) - p) <= 4 * (p * (1 - p) / len(found)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.3, 0.8, 2.0])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_acceptance_is_what_theory_says(
    filters: dict, temperature: float, dtype: torch.dtype
) -> None:
    """C5: sum min(p, q) by ratio; coupled the known formula, inside its bounds."""
    d = draw(N, 7, temperature, dtype, **filters)
    x, y = TARGET.first.to(dtype).expand(N, -1), DRAFT.first.to(dtype).expand(N, -1)
    drafts, q = verify.propose(y, d)
    p = sample.probabilities(x, d)[0].double()
    overlap = torch.minimum(p, q[0].double()).sum()
    assert within(verify.by_ratio(x, drafts, q, d) == drafts, overlap)

    ratios = torch.maximum(p / p[:, None], q[0] / q[0].double()[:, None])
    both = (p > 0) & (q[0] > 0)
    coupled = (1 / ratios.sum(-1))[both].sum()
    far = 1 - overlap
    assert (1 - far) / (1 + far) - 1e-6 <= coupled <= overlap + 1e-6
    assert within(sample.sample(x, d) == sample.sample(y, d), coupled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_always_agree(dtype: torch.dtype) -> None:
    for temperature in (0.0, 1e-38, 1e-3, 1.0, 1e38):
        d = draw(3000, 1, temperature, dtype)
        x = logits(3000, V, dtype=dtype)
        drafts, q = verify.propose(x, d)
        assert torch.equal(verify.by_ratio(x, drafts, q, d), drafts)


def test_disjoint_supports_never_agree() -> None:
    x, y = logits(3000, V), logits(3000, V, seed=1)
    x[:, V // 2 :], y[:, : V // 2] = -torch.inf, -torch.inf
    d = draw(3000)
    drafts, q = verify.propose(y, d)
    got = verify.by_ratio(x, drafts, q, d)
    assert int(drafts.min()) >= V // 2
    assert int(got.max()) < V // 2
    # p - q is p: the very token that plain sampling draws.
    assert torch.equal(got, sample.sample(x, d))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-3, 1.0, 1e4, 1e38])
def test_a_token_is_always_one_that_the_target_allows(
    temperature: float, dtype: torch.dtype
) -> None:
    """C4: adversarial drafts over masked vocabularies; never NaN, never an unset row's id."""
    n = 4000
    x = logits(n, V, dtype=dtype) * torch.logspace(-6, 6, n)[:, None]
    x = torch.where(logits(n, V, seed=1) > 1, -torch.inf, x)
    x[:, 0] = -torch.inf  # what an unset row would give
    x[:, 1] = 0
    d = draw(n, 3, temperature, dtype, top_p=0.9)
    p = sample.probabilities(x, d)
    drafts = torch.arange(n) % (V + 1) - 1
    certain = F.one_hot(drafts.clamp(min=0), V).to(dtype)
    for q in (
        certain,
        torch.full((n, V), 1 / V, dtype=dtype),
        p,  # not what these drafts were drawn from
        p * (1 + 1e-6),  # q above p everywhere: no residual
        p + torch.finfo(dtype).tiny,
        torch.zeros(n, V, dtype=dtype),
    ):
        got = verify.by_ratio(x, drafts, q, d)
        assert p.gather(-1, got[:, None]).gt(0).all()
        same = (got == drafts) & (drafts >= 0)
        assert p[same].gather(-1, drafts[same, None]).gt(0).all()
    if temperature == 0:
        assert torch.equal(got, sample.greedy(x))


def test_a_draft_without_probability_is_rejected() -> None:
    """Also one that q says it never drew."""
    x = logits(500, V)
    x[:, 3] = -torch.inf
    drafts, d = torch.full((500,), 3), draw(500)
    q = sample.probabilities(logits(500, V), d)
    for told in (q, torch.zeros(500, V), F.one_hot(drafts, V).float()):
        assert not (verify.by_ratio(x, drafts, told, d) == drafts).any()


def test_rounding_never_makes_a_rejected_draft_the_token() -> None:
    """A draft is the token exactly as often as it is accepted, though no residual is left."""
    d = draw(N)
    x = logits(1, V).expand(N, -1)
    p = sample.probabilities(x, d)
    drafts = sample.sample(x, dataclasses.replace(d, stream=sample.DRAFTED))
    q = p * 2  # no distribution: a residual of 0 everywhere, and half of the drafts rejected
    got = verify.by_ratio(x, drafts, q, d)
    assert within(got == drafts, 0.5)
    only = torch.full((N, V), -torch.inf)  # p allows the draft alone
    only[:, 4] = 0
    fours = torch.full((N,), 4)
    assert torch.equal(verify.by_ratio(only, fours, F.one_hot(fours, V) * 2.0, d), fours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_rows_without_a_draft_are_sampled(filters: dict, dtype: torch.dtype) -> None:
    """C4: bit by bit as `sample`; their q is not read, even if it was never written."""
    x = logits(2000, V).to(dtype)
    d = draw(2000, 9, 0.9, **filters)
    unset = torch.full((2000, V), torch.nan, dtype=torch.float64)
    assert torch.equal(verify.by_ratio(x, none(2000), unset, d), sample.sample(x, d))
    drafts, q = verify.propose(x.flip(0), d)
    some = torch.arange(2000) % 3 == 0
    mixed = torch.where(some[:, None], q.double(), unset)
    got = verify.by_ratio(x, torch.where(some, drafts, -1), mixed, d)
    assert torch.equal(got[~some], sample.sample(x, d)[~some])
    assert torch.equal(got[some], verify.by_ratio(x, drafts, q, d)[some])


def test_temperature_zero_is_greedy() -> None:
    """C4: the greedy token for right, wrong and missing drafts; a right one is accepted."""
    x = logits(300, V)
    x[:50, 2] = x[:50, 7] = 9  # ties: the lower index
    d, best = draw(300, temperature=0.0), x.argmax(-1)
    assert best[:50].eq(2).all()
    drafts, q = verify.propose(x, d)
    assert torch.equal(drafts, best)
    assert torch.equal(q, F.one_hot(best, V).float())
    for given in (best, (best + 1) % V, none(300)):
        told = F.one_hot(given.clamp(min=0), V).float()
        assert torch.equal(verify.by_ratio(x, given, told, d), best)
        assert torch.equal(verify.by_ratio(x, given, torch.full((300, V), 1 / V), d), best)


def test_a_row_does_not_see_the_others() -> None:
    """Nor its place, nor whether others have filters, drafts or temperature 0."""
    n = 12
    x, y = logits(n, V), logits(n, V, seed=1)
    d = Draw(
        temperature=torch.tensor([0.0, 0.5, 1, 2] * 3),
        seed=torch.arange(n) * 31,
        position=torch.arange(n) * 7,
        top_k=torch.tensor([0, 3, 0, 0, 1, 0] * 2),
        top_p=torch.tensor([1.0, 1, 0.7, 1] * 3),
        min_p=torch.tensor([0.0, 0, 0, 0, 0, 0.2] * 2),
    )
    drafts, q = verify.propose(y, d)
    drafts = torch.where(torch.arange(n) % 4 == 3, -1, drafts)
    want = verify.by_ratio(x, drafts, q, d)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        verify.by_ratio(x[order], drafts[order], q[order], at(d, order)), want[order]
    )
    for i in range(n):
        row = torch.tensor([i])
        assert verify.by_ratio(x[row], drafts[row], q[row], at(d, row)) == want[i]
        alone, alone_q = verify.propose(y[row], at(d, row))
        assert torch.equal(alone_q[0], q[i])
        assert drafts[i] in (-1, alone[0])
    for i in (0, 3, 8):  # no filter at all is the same as filters that keep everything
        row = torch.tensor([i])
        bare = dataclasses.replace(at(d, row), top_k=None, top_p=None, min_p=None)
        assert verify.by_ratio(x[row], drafts[row], q[row], bare) == want[i]


def test_the_stream_of_the_caller_is_not_used() -> None:
    """By either function: whoever passes a Draw for one may pass it for the other."""
    x, y, d = logits(200, V), logits(200, V, seed=1), draw(200)
    other = dataclasses.replace(d, stream=sample.ACCEPTANCE)
    drafts, q = verify.propose(y, d)
    assert torch.equal(verify.propose(y, other)[0], drafts)
    assert torch.equal(verify.by_ratio(x, drafts, q, other), verify.by_ratio(x, drafts, q, d))


@pytest.mark.parametrize(
    ("tokens", "drafts", "want"),
    [
        ([7], [], 0),
        ([7, 8], [7], 1),
        ([7, 8], [8], 0),
        ([1, 2, 3, 4], [1, 2, 3], 3),
        ([1, 2, 3, 4], [1, 9, 3], 1),
        ([9, 2, 3, 4], [1, 2, 3], 0),
        ([0, 0, 0], [0, 1], 1),
    ],
)
def test_accepted_is_the_leading_matches(tokens: list, drafts: list, want: int) -> None:
    assert verify.accepted(tokens, drafts) == want


@pytest.mark.parametrize("filters", FILTERS[::3], ids=str)
def test_one_graph(filters: dict) -> None:
    torch._dynamo.reset()
    x, y, d = logits(8, V), logits(8, V, seed=1), draw(8, **filters)
    drafts, q = verify.propose(y, d)
    want = verify.by_ratio(x, drafts, q, d)
    for fn, arguments, result in (
        (verify.propose, (y, d), (drafts, q)),
        (verify.by_ratio, (x, drafts, q, d), want),
        (sample.probabilities, (y, d), q),
    ):
        got = torch.compile(fn, fullgraph=True, dynamic=False, backend="eager")(*arguments)
        for a, b in zip(tree.leaves(got), tree.leaves(result), strict=True):
            assert torch.equal(a, b)


def test_the_vocabulary_of_the_model() -> None:
    """129,280 entries, nearly all of them far out."""
    x, y = logits(4, 129_280) * 4, logits(4, 129_280) * 4
    y += 0.2 * logits(4, 129_280, seed=1)
    for filters in ({}, {"top_p": 0.95}):
        d = draw(4, **filters)
        drafts, q = verify.propose(y, d)
        got = verify.by_ratio(x, drafts, q, d)
        p = sample.probabilities(x, d)
        torch.testing.assert_close(p.sum(-1), torch.ones(4))
        assert p.gather(-1, got[:, None]).gt(0).all()
        assert q.gather(-1, drafts[:, None]).gt(0).all()
