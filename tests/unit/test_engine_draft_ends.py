"""Where a request ends inside accepted drafts, and what the engine tells of its drafts.

The models count, and their drafts are as good as each test says.
"""

import logging
from collections.abc import Callable

import pytest
import torch

from runtime.drafts import ENOUGH, Drafts
from runtime.engine import Engine
from runtime.pages import fit
from runtime.request import Limits, Request, Sampling
from tests.fake_model import CFG, Model, counter, letters
from tests.real_model import watched


def perfect(_: int) -> bool:
    return True


def engine(
    drafts: Drafts | None, right: Callable[[int], bool] = perfect, requests: int = 4, **more
) -> Engine:
    depth = drafts.depth if drafts else 0
    pools = fit(CFG, [96] * requests, most=16, page_tokens=8, drafts=depth)
    settings = {"chunk": 16, "decode": letters} | more
    return Engine(counter(CFG, right), pools, drafts=drafts, **settings)


ENDS = [
    ([0], Limits(max_new_tokens=3)),
    ([0], Limits(max_new_tokens=1)),
    ([0], Limits(max_new_tokens=2)),
    ([90], Limits(max_new_tokens=40)),  # EOS after 10
    ([97], Limits()),
    ([95], Limits(max_new_tokens=12, ignore_eos=True)),
    ([97], Limits(max_new_tokens=3)),  # EOS and the limit on one token
    ([0], Limits(stop_token_ids=(3, 5))),
    ([0], Limits(stop_token_ids=(6,))),
    ([0], Limits(stop=("ef",))),
    ([0], Limits(stop=("cdx", "de"))),
    ([0], Limits(stop=("d",), max_new_tokens=3)),
    ([0], Limits(stop=("jklm",))),
    ([0], Limits(stop=("zab",), max_new_tokens=60)),
    ([98], Limits(stop=("vw",))),
    ([0] * 94, Limits(max_new_tokens=30)),  # the model's last position
]


@pytest.mark.parametrize("depth", range(1, 9))
def test_c1_every_end_lies_where_plain_decoding_puts_it(depth: int) -> None:
    """EOS, stop ids, stop strings and limits inside accepted drafts: nothing behind them counts.

    Tokens, text, reason, logprobs and the order of streamed text are those without drafts.
    """

    def run(drafts: Drafts | None) -> list[tuple]:
        e = engine(drafts, requests=3)
        made = [Request(prompt=p, limits=limits, logprobs=1) for p, limits in ENDS]
        e.generate(made)
        e.audit()
        return [(r.output, r.text, r.finish, len(r.scores)) for r in made]

    want = run(None)
    assert run(Drafts(depth=depth)) == want
    assert [len(o) for o, _, _, n in want] == [n for _, _, _, n in want]
    assert {f for _, _, f, _ in want} == {"length", "eos", "stop"}


def test_perfect_drafts_save_steps() -> None:
    """31 tokens at depth 5: the first step brings one, five more bring six each."""
    e = engine(Drafts(depth=5))
    seen = watched(e)
    (request,) = e.generate([Request(prompt=[0], limits=Limits(max_new_tokens=31))])
    assert request.output == list(range(1, 32))
    assert [len(r.sampled) for _, (r,) in seen] == [1, 6, 6, 6, 6, 6]
    assert (e.meter.decode_steps, e.meter.decode_tokens) == (6, 31)


def test_a_stream_brings_several_tokens_at_once() -> None:
    events = list(engine(Drafts(depth=3)).stream(Request(prompt=[0], limits=Limits(stop=("hi",)))))
    assert [e.tokens for e in events] == [(1,), (2, 3, 4, 5), (6, 7, 8)]
    assert "".join(e.text for e in events) == "bcdefg"
    assert [e.finish for e in events] == [None, None, "stop"]


def test_nothing_behind_the_end_is_kept() -> None:
    """Accepted drafts filled a page behind the stop token: no page is published for them."""
    e = engine(Drafts(depth=8))
    seen = watched(e)
    request = Request(prompt=[0] * 3, limits=Limits(stop_token_ids=(3,)))
    e.generate([request])
    assert (request.output, len(seen[-1][1][0].sampled)) == ([1, 2, 3], 9)
    assert not e._cache.pages.history._index
    e.generate([Request(prompt=[0] * 3, limits=Limits(max_new_tokens=6))])
    assert len(e._cache.pages.history._index) == 1
    e.audit()


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_c4_the_token_after_a_partial_acceptance_is_the_models_own(accepted: int) -> None:
    """C4: forced to accept 0 .. 3 of 3: the next token is never an unset row's token 0."""

    def right(position: int) -> bool:
        return (position - 2) % (accepted + 1) < accepted

    e = engine(Drafts(depth=3, adaptive=False), right)
    seen = watched(e)
    (request,) = e.generate([Request(prompt=[40], limits=Limits(max_new_tokens=41))])
    assert request.output == list(range(41, 82))
    counts = {len(r.sampled) - 1 for p, (r,) in seen[1:-4] if len(p.work[0].drafts) == 3}
    assert counts == {accepted}


def test_c7_c8_acceptance_is_counted_by_position() -> None:
    """C7, C8: a module that is right but for every fifth position; the counts are known exactly."""
    e = engine(Drafts(depth=3, adaptive=False), lambda p: p % 5 > 0)
    e.generate([Request(prompt=[0] * n, limits=Limits(max_new_tokens=60)) for n in (1, 2, 3)])
    steps, proposed, accepted = 0, [0] * 3, [0] * 3
    for n in (1, 2, 3):
        position, end = n, n + 60  # of the next token
        position += 1  # the first step verifies nothing
        while position < end:
            drafts = min(3, end - position - 1)
            hit = 0
            while hit < drafts and (position + hit) % 5:
                hit += 1
            steps += drafts > 0
            for i in range(drafts):
                proposed[i] += 1
                accepted[i] += i < hit
            position += hit + 1
    a = e.acceptance
    assert a is not None
    assert (a.steps, a.proposed, a.accepted) == (steps, proposed, accepted)
    assert a.shares == tuple(x / y for x, y in zip(accepted, proposed, strict=True))
    assert "if reached" in a.table()
    assert len(a.table().splitlines()) == 5


def test_c10_c17_drafts_that_are_never_right_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C10, C17: weights of another checkpoint, or stand-in data: one warning, and right tokens."""
    caplog.set_level(logging.WARNING)
    e = engine(Drafts(depth=2, adaptive=False), lambda _: False)
    limits = Limits(max_new_tokens=60, ignore_eos=True)
    while e.acceptance is not None and e.acceptance.steps < 2 * ENOUGH + 50:
        (request,) = e.generate([Request(prompt=[5], limits=limits)])
        assert request.output == [6 + i for i in range(60)]
    (told,) = [r.getMessage() for r in caplog.records if "hardly ever" in r.getMessage()]
    assert f"0.0% of the last {ENOUGH} first drafts" in told
    assert "belong to another checkpoint" in told


def test_good_drafts_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    e = engine(Drafts(depth=2, adaptive=False), lambda p: p % 3 > 0)
    limits = Limits(max_new_tokens=60, ignore_eos=True)
    while e.acceptance is not None and e.acceptance.steps < ENOUGH + 50:
        e.generate([Request(prompt=[5], limits=limits)])
    assert not caplog.records


def test_drafts_stop_where_they_do_not_pay_and_come_back() -> None:
    """Wrong up to position 40: a rest of 8 tokens, then of 16; then right, and drafting stays.

    The output is that of plain decoding throughout, and another request's record is its own.
    """
    drafts = Drafts(depth=2, window=4, rest=8, longest_rest=64, draft_cost=0.1)
    e = engine(drafts, lambda p: p > 38)
    seen = watched(e)
    bad = Request(prompt=[5], limits=Limits(max_new_tokens=80, ignore_eos=True))
    good = Request(prompt=[5] * 60, limits=Limits(max_new_tokens=36, ignore_eos=True))
    e.generate([bad, good])
    assert bad.output == [6 + i for i in range(80)]
    assert good.output == [6 + i for i in range(36)]
    asked = {r.id: [w.propose for p, _ in seen for w in p.work if w.id == r.id and w.wanted]
             for r in (bad, good)}  # fmt: skip
    assert asked[bad.id][:36] == [2] * 5 + [0] * 8 + [2] * 5 + [0] * 16 + [2] * 2
    assert set(asked[bad.id][36:-2]) == {2}
    assert set(asked[good.id][:-2]) == {2}


# What drafting draws from.


def two_words(target: torch.Tensor, drafted: torch.Tensor) -> Model:
    """Both distributions depend on the last token alone: log-weights [V, V]."""
    base = counter(CFG, perfect)

    def step(params, pools, batch):
        out, pools = base.step(params, pools, batch)
        out.logits.copy_(target[batch.tokens[batch.wanted]])
        return out, pools

    def draft(params, pools, hidden, batch):
        assert base.draft is not None
        out, pools = base.draft(params, pools, hidden, batch)
        out.logits.copy_(drafted[batch.tokens[batch.wanted]])
        return out, pools

    return Model(CFG, base.params, step, draft)


def test_c5_ratio_keeps_the_distribution_and_accepts_as_theory_says() -> None:
    """C5: pairs of tokens by chi-square, and 1 - total variation of the first drafts accepted."""
    generator = torch.Generator().manual_seed(3)
    words = 4
    target = torch.full((CFG.vocab, CFG.vocab), -1e9)
    drafted = target.clone()
    target[:, :words] = torch.randn(CFG.vocab, words, generator=generator)
    drafted[:, :words] = target[:, :words] + torch.randn(CFG.vocab, words, generator=generator)
    model = two_words(target, drafted)
    pools = fit(CFG, [8] * 50, most=8, page_tokens=8, drafts=2)
    e = Engine(model, pools, chunk=8, drafts=Drafts(depth=2, rule="ratio", adaptive=False))
    count = 6000
    asked = [
        Request(
            prompt=[50],
            sampling=Sampling(temperature=1.0, seed=i),
            limits=Limits(max_new_tokens=3, ignore_eos=True),
        )
        for i in range(count)
    ]
    e.generate(asked)
    p, q = target.softmax(-1), drafted.softmax(-1)
    want = p[50, :words, None, None] * p[:words, :words, None] * p[None, :words, :words]
    cells = [(r.output[0] * words + r.output[1]) * words + r.output[2] for r in asked]
    seen = torch.bincount(torch.tensor(cells), minlength=words**3).float()
    want = want.flatten() * count
    chi = float(((seen - want) ** 2 / want).sum())
    cells_free = words**3 - 1
    assert chi < cells_free + 5 * (2 * cells_free) ** 0.5
    # The first draft stands after the token that the first step drew.
    overlap = torch.minimum(p, q)[:words].sum(-1)
    theory = float((p[50, :words] * overlap).sum())
    a = e.acceptance
    assert a is not None
    assert a.proposed[0] == count
    assert abs(a.shares[0] - theory) < 5 * (theory * (1 - theory) / count) ** 0.5
