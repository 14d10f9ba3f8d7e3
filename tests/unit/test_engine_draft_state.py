"""The draft module's state is whole wherever a request goes on: its drafts are the reference's.

The reference has no cache: backbone and module run over the whole sequence, then the module goes on
from its own streams. So drafts that were made with a lost, stale or foreign row would differ.
"""

import dataclasses
import itertools

import pytest
import torch

from dsv4 import model, mtp
from dsv4.context import Ctx
from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.request import Limits, Request, Sampling
from tests.fake_model import Model
from tests.real_model import CFG, engine, prompt, real, slots, told, watched

DEPTH = 3
DRAFTS = Drafts(depth=DEPTH, adaptive=False)


def reference(tokens: list[int], depth: int) -> list[int]:
    """Greedy drafts of the tokens after these."""
    made, ctx = real(), Ctx(CFG)
    with torch.no_grad():
        batch, pools = model.fresh(made.params, torch.tensor([tokens]), ctx)
        out, pools = model.step(made.params, pools, batch, ctx)
        # Of the newest token the engine has no streams yet, and they are not used here either.
        before = torch.cat((out.hidden[-1:], out.hidden[:-1]))
        known, drafts = list(tokens), []
        while True:
            batch, pools = model.fresh(made.params, torch.tensor([known]), ctx)
            out, _ = mtp.draft(made.params, pools, before, batch, ctx)
            drafts.append(int(out.logits[-1].argmax()))
            if len(drafts) == depth:
                return drafts
            before = torch.cat((before, out.hidden[-1:]))
            known.append(drafts[-1])


def test_the_first_draft_is_that_of_forward() -> None:
    """The reference begins where `mtp.forward` ends."""
    ids = prompt(29)
    with torch.no_grad():
        drafted = mtp.forward(real().params, torch.tensor([ids]), Ctx(CFG))[1][0]
    assert reference(ids, 1) == [int(drafted[-1].argmax())]


class Watch:
    """An engine whose every proposal is compared."""

    def __init__(self, requests: int = 1, made: Model | None = None, **more) -> None:
        settings = {"drafts": DRAFTS} | more
        self.engine: Engine = engine(made or real(), requests, **settings)
        self._seen = watched(self.engine)
        self.compared = 0
        self.starts: set[int] = set()

    def step(self) -> None:
        requests = {r.id: r for r in self.engine._scheduler._live.values()}
        self.engine.step()
        self.engine.audit()
        plan, ran = self._seen.pop()
        for work, result in zip(plan.work, ran, strict=True):
            if result.proposal is not None:
                known = work.start + len(work.tokens) + len(result.sampled)
                tokens = requests[work.id].tokens[:known]
                depth = len(result.proposal.tokens)
                assert list(result.proposal.tokens) == reference(tokens, depth), known
                self.compared += 1
                self.starts.add(work.start)

    def drain(self) -> None:
        while not self.engine.idle:
            self.step()


def ask(ids: list[int], new: int = 12, **more) -> Request:
    return Request(prompt=ids, limits=Limits(max_new_tokens=new), **more)


@pytest.mark.parametrize("chunk", [5, 8, 24])
def test_cold(chunk: int) -> None:
    """Prompts cut inside pages, at their ends, and not at all; a prompt of one token."""
    watch = Watch(2, chunk=chunk)
    for n in (1, 19, 24):
        watch.engine.add(ask(prompt(n)))
    watch.drain()
    assert watch.compared >= 27


def test_after_partial_acceptance() -> None:
    """C2: rows that the module wrote for rejected drafts are written again before they are read."""
    plain = engine(real(), 1).generate([ask(prompt(13), 24)])[0].output

    def oracle(slot: int, position: int) -> int | None:
        at = position - 13
        # Some are right, two in a row at times; the others are the module's own.
        return plain[at] if at < len(plain) and at % 7 in (1, 2, 4) else None

    # Proposals of an oracle are not the reference's: the module's own are, at the other places.
    made = told(real(), oracle)
    e = engine(made, 1, drafts=DRAFTS)
    seen = watched(e)
    request = e.add(ask(prompt(13), 24))
    counts, compared = set(), 0
    while not e.idle:
        e.step()
        plan, (result,) = seen[-1]
        if len(plan.work[0].drafts) == DEPTH:
            counts.add(len(result.sampled) - 1)
        if result.proposal is not None:
            (work,) = plan.work
            known = work.start + len(work.tokens) + len(result.sampled)
            if (known - 13) % 7 not in (1, 2, 4):  # the first draft is the module's own
                assert result.proposal.tokens[0] == reference(request.tokens[:known], 1)[0]
                compared += 1
    assert request.output == plain
    assert {0, 1, 2} <= counts
    assert compared >= 6


def test_c12_after_a_prefix_hit() -> None:
    """C12: at page ends 8 .. 24, in another slot than the prefix was computed in."""
    watch = Watch(8, tokens=64)
    ids = prompt(30)
    watch.engine.add(ask(ids, 4))
    watch.drain()
    for shared in (8, 15, 16, 24):
        other = prompt(9, seed=shared)
        watch.engine.add(ask(prompt(20, seed=99), 6))  # takes the old slot
        request = watch.engine.add(ask(ids[:shared] + other, 5))
        watch.starts.clear()
        watch.drain()
        assert watch.engine.cache_report(request).hit == shared // 8 * 8
        assert shared // 8 * 8 in watch.starts
    again = watch.engine.add(ask(ids, 4))
    watch.drain()
    assert watch.engine.cache_report(again).hit == 24


@pytest.mark.parametrize("cache", [True, False])
def test_after_a_preemption(cache: bool) -> None:
    """Computed again from a cached boundary, or from nothing."""
    watch = Watch(1, tokens=56, cache=cache)
    sizes = watch.engine._cache.pages
    assert sizes.slots.capacity == 1
    late = ask(prompt(20, seed=1), 10, priority=1)
    watch.engine.add(late)
    for _ in range(4):
        watch.step()
    watch.engine.add(ask(prompt(9, seed=2), 3, priority=0))
    watch.drain()
    assert late.preemptions == 1
    assert len(late.output) == 10


def test_after_forks() -> None:
    """Of a request inside a page, at a page's end, and mid-prompt: parent and child."""
    for steps, length in ((1, 19), (1, 24), (2, 40)):
        watch = Watch(2, chunk=24)
        parent = watch.engine.add(ask(prompt(length), 8))
        for _ in range(steps):
            watch.step()
        before = watch.compared
        child = watch.engine.fork(parent, limits=Limits(max_new_tokens=6))
        assert child.computed == parent.computed > 0
        watch.drain()
        both = min(len(parent.tokens), len(child.tokens))
        assert child.tokens[:both] == parent.tokens[:both]
        assert watch.compared >= before + 8


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 21])
def test_c9_c11_after_an_export_into_another_engine(length: int) -> None:
    """C9, C11: drafts on the decode side are those of one engine, from its first step on."""
    there = Watch(1)
    request = there.engine.add(ask(prompt(length), 12))
    there.step()
    there.step()
    parcel = there.engine.export(request)
    here = Watch(2, chunk=8)
    here.engine.add(ask(prompt(11, seed=5), 9))  # other pages and another slot
    here.step()
    moved = here.engine.add(
        Request(
            prompt=request.tokens,
            limits=Limits(max_new_tokens=12 - len(request.output)),
            parcel=parcel,
        )
    )
    here.step()
    assert here.engine.cache_report(moved).reason == "imported"
    here.drain()
    there.drain()
    assert request.output[: len(request.output) - len(moved.output)] + moved.output == (
        request.output
    )
    assert len(moved.output) >= 6


def test_after_an_import_that_goes_on_with_another_token() -> None:
    """The module's row behind the state was made for the token that came next where it was."""
    for length in (13, 16, 21):
        there = Watch(1)
        request = there.engine.add(ask(prompt(length), 9))
        there.step()
        parcel = there.engine.export(request)
        here = Watch(1)
        other = [*request.tokens[:-1], (request.tokens[-1] + 1) % CFG.vocab]
        here.engine.add(Request(prompt=other, limits=Limits(max_new_tokens=9), parcel=parcel))
        here.drain()
        assert here.compared >= 7


def test_after_a_rest() -> None:
    """While drafts do not pay none is made, but the module's rows are written all the same.

    So they are there when drafting comes back, and where a request that wanted no drafts leaves a
    prefix to one that does.
    """
    rests = Drafts(depth=DEPTH, window=2, rest=9, draft_cost=1.0)
    watch = Watch(2, drafts=rests)
    watch.engine.add(ask(prompt(10), 40))
    watch.drain()
    assert max(b - a for a, b in itertools.pairwise(sorted(watch.starts))) >= 9
    assert max(watch.starts) > 30
    plain = watch.engine.add(ask(prompt(12, seed=3), 24, drafting=False))
    before = watch.compared
    watch.drain()
    assert watch.compared == before
    after = watch.engine.add(ask(plain.tokens[:34], 6))
    watch.drain()
    assert watch.engine.cache_report(after).hit == 32
    assert watch.compared > before


def test_after_a_failed_step() -> None:
    """Its requests start over with the proposals they had."""
    calls = [0]
    made = real()

    def step(params, pools, batch):
        calls[0] += 1
        if calls[0] in (2, 5):
            raise MemoryError
        return made.step(params, pools, batch)

    watch = Watch(2, dataclasses.replace(made, step=step))
    many = [watch.engine.add(ask(prompt(n), 6)) for n in (11, 18)]
    while not watch.engine.idle:
        try:
            watch.step()
        except IndexError:  # a step that failed has no results to compare
            watch.engine.audit()
    assert [len(r.output) for r in many] == [6, 6]
    assert calls[0] > 8
    assert watch.compared >= 8


def test_c5_sampled_drafts_share_the_noise_of_their_tokens() -> None:
    """C5: the oracle is the target itself, so every draft is accepted at temperature 1 too."""
    want = ask(prompt(10), 20, sampling=Sampling(temperature=1.0, seed=11))
    engine(real(), 1).generate([want])
    box: list[Engine] = []

    def oracle(slot: int, position: int) -> int | None:
        assert slots(box[0])[slot].sampling.seed == 11
        at = position - 10
        return want.output[at] if at < 20 else None

    e = engine(told(real(), oracle), 1, drafts=DRAFTS)
    box.append(e)
    got = ask(prompt(10), 20, sampling=Sampling(temperature=1.0, seed=11))
    e.generate([got])
    assert got.output == want.output
    assert e.acceptance is not None
    assert e.acceptance.shares == (1.0, 1.0, 1.0)
