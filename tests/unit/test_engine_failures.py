"""What can go wrong in the loop, whom it costs what, and what it leaves behind."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from compiler.backend import EAGER
from dsv4 import model
from dsv4.batch import Batch, StepOut
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools
from runtime.engine import Engine
from runtime.pages import fit
from runtime.request import Limits, Request
from tests import tiny
from tests.counting import CFG, REAL, Model, counter, engine, letters, real, sizes


def test_abort_frees_everything() -> None:
    e = engine(pools=sizes(24, 1))
    limits = Limits(max_new_tokens=5)
    made = [e.add(Request(prompt=[1] * 20, limits=limits)) for _ in range(2)]
    e.step()
    for request in (made[0], made[0], made[1]):
        e.abort(request)
    assert [r.finish for r in made] == ["abort", "abort"]
    e.audit()
    assert e.idle
    assert e.step() == []
    (r,) = e.generate([Request(prompt=[1], limits=Limits(max_new_tokens=2))])
    assert r.output == [2, 3]


def test_a_closed_stream_ends_its_request() -> None:
    e = engine()
    request = Request(prompt=[1])
    events = e.stream(request)
    next(events)
    events.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert request.finish == "abort"
    assert e.idle
    e.audit()


def test_streams_side_by_side() -> None:
    """Each gets all of its own events, whoever steps the engine."""
    e = engine()
    limits = Limits(max_new_tokens=5)
    streams = [e.stream(Request(prompt=[n], limits=limits)) for n in (0, 50)]
    heads = [next(s) for s in streams]
    assert [list(h.tokens) for h in heads] == [[1], [51]]
    rest = [[t for event in s for t in event.tokens] for s in streams]
    assert rest == [[2, 3, 4, 5], [52, 53, 54, 55]]


def test_a_step_that_fails_can_be_repeated() -> None:
    """Nothing is committed before a step has succeeded, and its requests start over."""
    inner, calls = counter(CFG), []

    def step(params: Params, pools: Pools, batch: Batch) -> tuple[StepOut, Pools]:
        calls.append(batch)
        if len(calls) in (1, 3, 7, 11):
            raise MemoryError
        return inner.step(params, pools, batch)

    e = Engine(dataclasses.replace(inner, step=step), sizes(), chunk=4)
    request = e.add(Request(prompt=[7] * 9, limits=Limits(max_new_tokens=4)))
    while not e.idle:
        e.step()
        e.audit()
    assert len(calls) > 11
    assert request.output == [8, 9, 10, 11]


def test_who_makes_steps_fail_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """One bad request among five; its error is told, and the others lose nothing."""
    inner = counter(CFG)

    def step(params: Params, pools: Pools, batch: Batch) -> tuple[StepOut, Pools]:
        if (batch.tokens == 77).any():
            raise RuntimeError("cannot do 77")
        return inner.step(params, pools, batch)

    e = Engine(dataclasses.replace(inner, step=step), sizes(), chunk=4, decode=letters)
    limits = Limits(max_new_tokens=6)
    made = [e.add(Request(prompt=[n] * 9, limits=limits)) for n in (1, 72, 20, 30, 40)]
    while not e.idle:
        e.step()
        e.audit()
    assert [r.finish for r in made] == ["length", "error", "length", "length", "length"]
    assert str(made[1].error) == "cannot do 77"
    assert made[1].output == [73, 74, 75, 76, 77]
    for n, request in zip((1, 20, 30, 40), (made[0], *made[2:]), strict=True):
        assert request.output == list(range(n + 1, n + 7))
    assert "they start over" in caplog.text
    with pytest.raises(RuntimeError, match="cannot do 77"):
        e.generate([Request(prompt=[77])])


def test_an_interrupt_is_no_failure() -> None:
    """Control-C comes out of `step`, and the engine can go on."""
    inner, calls = counter(CFG), []

    def step(params: Params, pools: Pools, batch: Batch) -> tuple[StepOut, Pools]:
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return inner.step(params, pools, batch)

    e = Engine(dataclasses.replace(inner, step=step), sizes(), chunk=4)
    request = e.add(Request(prompt=[7] * 9, limits=Limits(max_new_tokens=4)))
    e.step()
    with pytest.raises(KeyboardInterrupt):
        e.step()
    assert e.drain() == [request]
    assert request.output == [8, 9, 10, 11]


def test_a_detokenizer_that_fails_ends_its_request_alone() -> None:
    def decode(ids: Sequence[int]) -> str:
        if 43 in ids:
            raise RuntimeError("no text for 43")
        return letters(ids)

    def pair() -> list[Request]:
        return [Request(prompt=p, limits=Limits(max_new_tokens=6)) for p in ([40], [10])]

    e = engine(decode=decode)
    bad, good = (e.add(r) for r in pair())
    while not e.idle:
        e.step()
        e.audit()
    assert (bad.finish, good.finish) == ("error", "length")
    assert bad.output == [41, 42, 43]
    assert str(bad.error) == "no text for 43"
    assert good.output == [11, 12, 13, 14, 15, 16]
    again = pair()
    with pytest.raises(RuntimeError, match="no text for 43"):
        e.generate(again)
    assert again[1].finish == "length"  # raised when all have ended
    stream = e.stream(pair()[0])
    with pytest.raises(RuntimeError, match="no text for 43"):
        list(stream)
    e.audit()


def test_a_step_that_fails_after_writing_is_computed_anew() -> None:
    """Pools are given away: a failed step has overwritten rows that its repetition would need."""
    ctx = Ctx(REAL, ops=EAGER.ops)
    calls: list[int] = []

    def step(params: Params, pools: Pools, batch: Batch, fails: int) -> tuple[StepOut, Pools]:
        out = model.step(params, pools, batch, ctx)
        calls.append(1)
        if len(calls) == fails:
            raise RuntimeError("after writing")
        return out

    params = tiny.params(REAL, 0, torch.float64)
    prompt = tiny.tokens(REAL, 1, 61)[0].tolist()

    def run(fails: int) -> list[int]:
        calls.clear()
        m = Model(REAL, params, lambda p, s, b: step(p, s, b, fails))
        e = Engine(m, fit(REAL, [90], most=9), chunk=9)
        request = e.add(Request(prompt=prompt, limits=Limits(max_new_tokens=12), logprobs=0))
        while not e.idle:
            e.step()
            e.audit()
        return request.output

    want = run(0)
    for fails in (2, 3, 7, 10):
        assert run(fails) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_is_exact_on_the_eager_backend(dtype: torch.dtype) -> None:
    """Segments of experts have other sizes in other company; results must not."""
    ctx = Ctx(REAL, ops=EAGER.ops)
    m = Model(REAL, tiny.params(REAL, 0, dtype), lambda p, s, b: model.step(p, s, b, ctx))

    def scores(chunk: int, company: int) -> list[float]:
        e = Engine(m, fit(REAL, [80] * 4, most=32), chunk=chunk, exact=True)
        made = [
            Request(prompt=tiny.tokens(REAL, 1, 40, i)[0].tolist(), logprobs=0,
                    limits=Limits(max_new_tokens=10))
            for i in range(1 + company)
        ]  # fmt: skip
        e.generate(made)
        return [s.token for s in made[0].scores]

    want = scores(32, 0)
    assert scores(32, 3) == want
    assert scores(7, 2) == want


def test_a_stream_closed_before_its_first_event_ends_its_request() -> None:
    e = engine()
    request = Request(prompt=[1])
    e.stream(request).close()
    assert request.finish == "abort"
    assert e.idle


def test_a_request_of_another_engine_cannot_be_aborted_here() -> None:
    mine, other = engine(), engine()
    request = mine.add(Request(prompt=[1], limits=Limits(max_new_tokens=3)))
    mine.step()
    with pytest.raises(ValueError, match="not one of this engine's"):
        other.abort(request)
    mine.generate([])
    while not mine.idle:
        mine.step()
    assert request.output == [2, 3, 4]


def test_logits_that_are_not_finite_end_their_request() -> None:
    params = tiny.params(REAL)
    broken = dataclasses.replace(params, norm=params.norm * torch.nan)
    m = Model(REAL, broken, real(REAL).step)
    request = Request(prompt=[3, 4], limits=Limits(max_new_tokens=2))
    with pytest.raises(ValueError, match="logits after 2 tokens are not finite"):
        Engine(m, fit(REAL, [8], most=8)).generate([request])
    assert (request.finish, request.output) == ("error", [])


def test_prompts_are_copied_and_hold_whole_numbers() -> None:
    mine = [5, 6]
    request = Request(prompt=mine, limits=Limits(max_new_tokens=2))
    mine.append(7)
    engine().generate([request])
    assert request.output == [7, 8]
    for bad in ("123", [1.5], [True], [None]):
        with pytest.raises(ValueError, match="token ids are whole numbers"):
            Request(prompt=bad)  # type: ignore[arg-type]
