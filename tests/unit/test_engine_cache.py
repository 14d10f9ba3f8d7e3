"""Prefix hits, exports and forks through whole engines with real models: bit-equal to cold runs."""

import dataclasses
from typing import Any

import pytest
import torch

from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.request import Limits, Request, Sampling
from tests import tiny
from tests.real_model import CFG, engine, prompt, real, watched

PLAIN = dataclasses.replace(CFG, mtp=0)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def ask(ids: list[int], new: int = 10, **more: Any) -> Request:
    return Request(prompt=ids, limits=Limits(max_new_tokens=new), logprobs=3, **more)


def anew(request: Request) -> Request:
    """The same, not added yet. (`dataclasses.replace` would share the list of scores.)"""
    return ask(list(request.prompt), request.limits.max_new_tokens, sampling=request.sampling)


def made(request: Request) -> tuple:
    """What must not differ by a bit."""
    return request.output, request.scores


def exact(dtype: torch.dtype, requests: int = 6, **more: Any) -> Engine:
    return engine(real(PLAIN, dtype), requests, exact=True, **more)


def cold(request: Request, dtype: torch.dtype = torch.float64) -> tuple:
    """The same on pools that never held anything, no cache, in one piece."""
    (fresh,) = exact(dtype, cache=False, chunk=64).generate([anew(request)])
    assert fresh.report is None or fresh.report.hit == 0
    return made(fresh)


@BOTH
def test_b1_the_same_prompt_again_in_another_slot_is_bit_equal(dtype: torch.dtype) -> None:
    """B1, B9: after its slot was filled by others, greedy and sampled; every whole page hits."""
    e = exact(dtype)
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=5)):
        request = ask(prompt(45), sampling=sampling)
        want = cold(request, dtype)
        e.generate([anew(request)])
        e.generate([ask(prompt(33, seed=s), 4) for s in (1, 2, 3)])
        (again,) = e.generate([anew(request)])
        assert again.report is not None
        assert (again.report.hit, again.report.reason) == (40, "full")
        assert made(again) == want


@BOTH
def test_b3_a_shared_beginning_hits_down_to_its_page(dtype: torch.dtype) -> None:
    """B2, B3: k shared tokens hit floor(k / 8) * 8; the rest is computed, in company, bit-equal."""
    e = exact(dtype, requests=8)
    base = prompt(44)
    e.generate([ask(base, 2)])
    many = [ask(base[:k] + prompt(7, seed=k), 6) for k in (7, 8, 9, 23, 24, 41)]
    want = [cold(r, dtype) for r in many]
    e.generate(many)
    assert [r.report.hit for r in many if r.report] == [0, 8, 8, 16, 24, 40]
    assert [made(r) for r in many] == want
    e.audit()


def test_b2_b4_b5_the_report_says_what_would_hit_and_why_not_more() -> None:
    """Before admission what would be found now, afterwards what was; the unit is in the words."""
    e = exact(torch.float64)
    ids = prompt(30)
    first, second = ask(ids, 3), ask(ids, 3)
    assert (e.cache_report(first).hit, e.cache_report(first).reason) == (0, "no such prefix")
    e.generate([first])
    assert e.cache_report(first).hit == 0  # of its own admission, not of now
    e.add(second)
    before = e.cache_report(second)
    assert (before.hit, before.limit, before.unit, before.reason) == (24, 24, 8, "full")
    assert "24 of 30 tokens hit (unit 8)" in before.why
    e.drain()
    assert e.cache_report(second) == before
    assert "fewer than 9 tokens" in e.cache_report(ask(ids[:8])).why
    assert e.cache_report(ask(ids, salt="other")).reason == "salt"
    assert e.cache_report(ask(ids, cache=False)).reason == "disabled"
    assert exact(torch.float64, cache=False).cache_report(ask(ids)).reason == "disabled"


def test_salts_and_extras_share_nothing_with_others() -> None:
    e = exact(torch.float64)
    ids = prompt(30)
    e.generate([ask(ids, 2, salt="a"), ask(ids, 2, extra=("adapter",))])
    assert e.cache_report(ask(ids)).hit == 0
    assert e.cache_report(ask(ids, salt="a")).hit == 24
    assert e.cache_report(ask(ids, salt="a", extra=("adapter",))).hit == 0


def test_forgotten_prefixes_are_not_hit() -> None:
    """Also those of a request that still runs: its pages go back unnamed, and none is lost."""
    e = exact(torch.float64)
    ids = prompt(30)
    e.generate([ask(ids, 2)])
    running = e.add(ask(prompt(20, seed=4), 20))
    e.step()
    e.step()
    assert e.cache_report(ask(ids)).hit == 24
    e.forget_prefixes()
    e.audit()
    assert e.cache_report(ask(ids)).hit == 0
    again = ask(ids, 4)
    want = cold(again)
    e.add(again)
    e.drain()
    assert made(again) == want
    assert made(running) == cold(ask(prompt(20, seed=4), 20))
    assert e.cache_report(again).hit == 0
    assert e.cache_report(ask(prompt(20, seed=4))).hit == 0


def test_a7_turns_of_a_chat_equal_cold_runs() -> None:
    """A7: five turns, each beginning with all before it: hits grow, answers are the cold ones."""
    e = exact(torch.float64)
    ids, hits = prompt(11), []
    for turn in range(5):
        request = ask(ids, 6)
        want = cold(request)
        e.generate([request])
        assert made(request) == want
        hits.append(e.cache_report(request).hit)
        ids = [*request.tokens, *prompt(5, seed=50 + turn)]
    assert hits == [0, 16, 24, 32, 48]


# State that moves.


@BOTH
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_an_exported_request_goes_on_bit_equal(dtype: torch.dtype, steps: int) -> None:
    """Mid-prompt, at its end and while it generates; into an engine of other pages and rings."""
    source, target = exact(dtype, chunk=16), exact(dtype, requests=3, tokens=104)
    whole = ask(prompt(41))
    want = cold(whole, dtype)
    request = source.add(anew(whole))
    for _ in range(steps):
        source.step()
    parcel = source.export(request)
    assert len(parcel.tokens) == request.computed
    before = list(request.output)
    source.abort(request)
    target.add(ask(prompt(17, seed=8)))
    target.step()
    moved = ask(list(request.tokens), 10 - len(before), parcel=parcel)
    target.add(moved)
    target.drain()
    assert target.cache_report(moved).reason == "imported"
    assert before + moved.output == want[0]
    assert request.scores + moved.scores == want[1]
    target.audit()
    # What came with it can be hit there.
    again = ask(list(moved.prompt), 2)
    assert target.cache_report(again).hit >= 40


def test_a_parcel_of_another_model_or_page_is_refused() -> None:
    source = exact(torch.float64)
    request = source.add(ask(prompt(20)))
    source.step()
    parcel = source.export(request)
    others = (
        exact(torch.float32),
        engine(real(dataclasses.replace(PLAIN, window=16), torch.float64), exact=True),
    )
    for other in others:
        with pytest.raises(ValueError, match="the state has layout"):
            other.add(ask(list(request.tokens), parcel=parcel))
        assert other.idle
    same = exact(torch.float64)
    with pytest.raises(ValueError, match="of other tokens"):
        same.add(ask([0, *request.tokens], parcel=parcel))
    with pytest.raises(ValueError, match="no state yet"):
        same.export(same.add(ask(prompt(5))))


@BOTH
@pytest.mark.parametrize("length", [19, 24])
def test_a_fork_equals_two_cold_runs(dtype: torch.dtype, length: int) -> None:
    """Inside a page and at its end; the child greedy, or drawing with a seed of its own."""
    e = exact(dtype)
    whole = ask(prompt(length))
    request = e.add(anew(whole))
    e.step()
    e.step()
    e.step()
    drawn = Sampling(temperature=1.0, seed=77)
    kids = [e.fork(request), e.fork(request, sampling=drawn, limits=Limits(max_new_tokens=7))]
    assert all(k.computed == request.computed for k in kids)
    e.audit()
    e.drain()
    assert made(request) == cold(whole, dtype)
    prompts = list(kids[0].prompt)
    assert prompts == request.tokens[: len(prompts)]
    assert made(kids[0]) == cold(ask(prompts), dtype)
    assert made(kids[1]) == cold(ask(prompts, 7, sampling=drawn), dtype)
    assert e.cache_report(kids[0]).reason == "forked"
    e.audit()


# With drafts.


@BOTH
def test_hits_while_drafting(dtype: torch.dtype) -> None:
    """B4 with drafts: the unit stays a page; tokens and logprobs bit-equal to cold, undrafted."""
    drafts = Drafts(depth=3, adaptive=False)
    e = engine(real(CFG, dtype), 6, exact=True, drafts=drafts)
    base = prompt(44)
    e.generate([ask(base, 6)])
    many = [ask(base[:k] + prompt(6, seed=k), 8) for k in (8, 23, 40)]
    want = [cold(r, dtype) for r in many]
    e.generate(many)
    assert [e.cache_report(r).hit for r in many] == [8, 16, 40]
    assert [made(r) for r in many] == want
    e.audit()


def test_a_plan_can_be_run_twice() -> None:
    """A value that holds all a step needs: the same plan on the same pools, the same numbers."""
    e = engine(real(), 3, drafts=Drafts(depth=2), exact=True)
    seen = watched(e)
    made = [e.add(ask(prompt(n), 5, sampling=Sampling(temperature=1, seed=n))) for n in (9, 20, 30)]
    while not e.idle:
        e.step()
        plan, ran = seen.pop()
        if not plan.imports:
            again = e._runner.run(plan)
            seen.pop()
            assert [r.sampled for r in again] == [r.sampled for r in ran]
            assert [r.proposal and r.proposal.tokens for r in again] == [
                r.proposal and r.proposal.tokens for r in ran
            ]
    assert all(len(r.output) == 5 for r in made)
    assert tiny.tokens(CFG, 1, 9)[0].tolist() == prompt(9)


def test_a_burst_with_one_beginning_computes_it_once() -> None:
    """All are admitted in one step; those whose turn comes later find what the first computed."""
    shared = prompt(41)
    e = exact(torch.float64, chunk=16, budget=22)
    burst = [e.add(ask([*shared, n], 4)) for n in range(1, 6)]
    e.step()
    assert len(e._scheduler.running) == 5
    e.drain()
    e.audit()
    # The second began at once, in the room that the first one's chunk left.
    assert [e.cache_report(r).hit for r in burst] == [0, 0, 40, 40, 40]
    for request in burst:
        assert made(request) == cold(anew(request))


def test_a_moved_request_keeps_its_wishes() -> None:
    """`moved` goes on with the same sampling, and ends where the original would."""
    source, target = exact(torch.float64), exact(torch.float64)
    sampling = Sampling(temperature=0.9, seed=11)
    request = source.add(ask(prompt(20), 12, sampling=sampling, salt="a"))
    while len(request.output) < 5:
        source.step()
    other = target.add(request.moved(source.export(request)))
    done = len(request.output)
    target.drain()
    source.drain()
    assert (other.sampling, other.salt, other.limits.max_new_tokens) == (sampling, "a", 12 - done)
    assert other.output == request.output[done:]
