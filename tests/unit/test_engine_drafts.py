"""Drafts change nothing but the number of steps: tokens, logprobs and state are the serial ones."""

import pytest
import torch

from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.request import Limits, Request, Sampling
from tests.fake_model import Model
from tests.real_model import CFG, engine, prompt, real, slots, told, watched

NEW = 12


def requests(count: int) -> list[Request]:
    """Greedy and sampled in turn, of lengths around page ends (8) and windows."""
    lengths = (7, 8, 9, 1, 15, 16, 17, 3, 5, 12, 23, 24)
    drawn = (Sampling(), Sampling(temperature=1.0, seed=7), Sampling(temperature=0.8, top_k=9))
    return [
        Request(
            prompt=prompt(n, seed=n),
            sampling=drawn[i % len(drawn)],
            limits=Limits(max_new_tokens=NEW),
            logprobs=2,
        )
        for i, n in enumerate(lengths[:count])
    ]


def corrected(made: Model, answers: dict[int, list[int]], box: list[Engine]) -> Model:
    """Drafts of the known answers, wrong at some positions."""

    def oracle(slot: int, position: int) -> int | None:
        request = slots(box[0])[slot]
        at = position - len(request.prompt)
        answer = answers[request.id]
        if not 0 <= at < len(answer):
            return None
        return (answer[at] + ((position * 7 + request.id) % 9 == 0)) % made.cfg.vocab

    return told(made, oracle)


@pytest.fixture(scope="module")
def plain() -> list[Request]:
    """The twelve without drafts, one at a time."""
    e = engine(real(), 1)
    return [e.generate([r])[0] for r in requests(12)]


def assert_same(got: list[Request], want: list[Request]) -> None:
    """Tokens equal, logprobs of the target to rounding."""
    for a, b in zip(got, want, strict=True):
        assert a.output == b.output
        assert len(a.scores) == len(a.output)
        for x, y in zip(a.scores, b.scores, strict=True):
            assert x.token == pytest.approx(y.token, rel=1e-9)
            assert [t for t, _ in x.top] == [t for t, _ in y.top]


@pytest.mark.parametrize("depth", range(1, 9))
def test_c1_c15_drafting_equals_plain_decoding_at_every_depth(
    depth: int, plain: list[Request]
) -> None:
    """C1, C11, C15: depths 1 to 8, one request and twelve; greedy, and sampled by one seed.

    Drafts are right up to chance positions, so that most counts from 0 to the depth are seen.
    """
    for count in (1, 12):
        box: list[Engine] = []
        made = corrected(real(), {i: r.output for i, r in enumerate(plain)}, box)
        e = engine(made, count, drafts=Drafts(depth=depth, adaptive=False))
        box.append(e)
        seen = watched(e)
        assert_same(e.generate(requests(count)), plain[:count])
        e.audit()
        assert e.acceptance is not None
        assert e.acceptance.accepted[0] > 0
    accepted = {
        len(r.sampled) - 1
        for p, ran in seen
        for w, r in zip(p.work, ran, strict=True)
        if len(w.drafts) == depth
    }
    assert {0, 1} <= accepted
    assert len(accepted) > depth / 2


def test_the_modules_own_drafts_equal_plain_decoding(plain: list[Request]) -> None:
    """No oracle; prompts cut; pools so small that requests are preempted with drafts."""
    e = engine(real(), 2, tokens=40, chunk=5, drafts=Drafts(depth=3, window=4, rest=4), cache=False)
    assert_same(e.generate(requests(12)), plain)
    e.audit()


def test_the_ratio_rule_ends_where_it_must() -> None:
    """Greedy rows are those of plain decoding under this rule too."""
    want = engine(real(), 1).generate(requests(4))
    made = requests(4)
    engine(real(), 4, drafts=Drafts(depth=2, rule="ratio")).generate(made)
    for i in (0, 3):
        assert made[i].output == want[i].output
    assert all(len(r.output) == NEW for r in made)


# State.


def rows(e: Engine, request: Request) -> dict[str, torch.Tensor]:
    """All valid rows of a running request: what later steps may read, at their exact bits."""
    parcel, page = e.export(request), e._cache.pages.page_tokens
    held = request.held
    assert held is not None
    first = max(e._cache.pages.alive(held.length), held.window_start)
    valid = {}
    for name, pool in parcel.rows.items():
        kind = name.rsplit(".", 1)[-1]
        if kind == "window":
            begin = int(name.startswith("mtp") and first == 0)  # no streams before token 0
            valid[name] = pool[begin : held.length - first * page]
        elif kind in ("header", "streams"):  # of full pages alone
            unit = pool.shape[0] // (-(-held.length // page) - first)
            valid[name] = pool[: unit * (held.length // page - first)]
        else:
            valid[name] = pool
    return valid


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_c2_c9_state_after_partial_acceptance_is_the_serial_state(accepted: int) -> None:
    """C2: 0 .. 3 of 3 accepted, over page and group ends: every row of every pool bit-equal.

    Compressed entries, indexer keys, open inputs, overlap headers, window keys, and the draft
    module's keys and streams.
    """
    drafts = Drafts(depth=3, adaptive=False)
    asked = {"prompt": prompt(13), "limits": Limits(max_new_tokens=30)}
    serial: dict[int, dict[str, torch.Tensor]] = {}
    e = engine(real(), 1, exact=True, drafts=drafts)
    plain = e.add(Request(**asked, drafting=False))
    while not e.idle:
        e.step()
        if plain.held is not None:
            serial[plain.computed] = rows(e, plain)

    def oracle(_: int, position: int) -> int | None:
        at = position - len(plain.prompt)
        wrong = (at - 1) % (accepted + 1) == accepted
        return (plain.output[at] + wrong) % CFG.vocab if at < len(plain.output) else None

    e = engine(told(real(), oracle), 1, exact=True, drafts=drafts)
    seen = watched(e)
    request = e.add(Request(**asked))
    compared = 0
    while not e.idle:
        e.step()
        if request.held is None:
            break
        want = serial[request.computed]
        for name, got in rows(e, request).items():
            assert torch.equal(got, want[name]), (name, request.computed)
        compared += 1
    assert request.output == plain.output
    assert compared >= 29 // (accepted + 1)
    counts = [len(r.sampled) - 1 for p, (r,) in seen if len(p.work[0].drafts) == 3]
    assert set(counts) == {accepted}


def test_logprobs_of_accepted_tokens_are_the_targets(plain: list[Request]) -> None:
    """From the row that verified each token, not from the draft module's distribution."""
    want = plain[0]
    made = told(real(), lambda _, p: want.output[p - 7] if p - 7 < NEW else None)
    e = engine(made, 1, drafts=Drafts(depth=4, adaptive=False))
    (got,) = e.generate(requests(1))
    assert e.acceptance is not None
    assert e.acceptance.shares[:2] == (1.0, 1.0)
    assert_same([got], [want])
