"""What may reach the prefix cache, and what of a state from elsewhere is believed."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.tree import tmap
from runtime.parcel import Parcel
from runtime.request import Limits, Request
from tests.real_model import CFG, engine, prompt, real

LIMITS = Limits(max_new_tokens=4)


def ask(ids: list[int], **more) -> Request:
    return Request(prompt=ids, limits=LIMITS, **more)


def test_a_chunk_that_was_not_finite_is_found_by_nobody() -> None:
    """One NaN for a moment: its request ends, and the next with the same beginning is right."""
    inner, ids, calls = real(), prompt(41), []

    def step(params, pools, batch):
        calls.append(1)
        out, pools = inner.step(params, pools, batch)
        if len(calls) == 1:
            pools = tmap(lambda t: torch.where(t != 0, torch.nan, t), pools)
        return out, pools

    e = engine(dataclasses.replace(inner, step=step), requests=2, chunk=16)
    bad = e.add(ask(ids))
    e.drain()
    assert bad.finish == "error"
    good = e.add(ask(ids))
    e.drain()
    e.audit()
    assert e.cache_report(good).hit == 0
    (want,) = engine(inner, cache=False).generate([ask(ids)])
    assert (good.output, good.finish) == (want.output, "length")


def test_what_ran_before_the_prefixes_were_forgotten_is_not_found() -> None:
    """A request that was under way when the weights changed holds state of both."""
    e, ids = engine(real(), requests=3, chunk=8), prompt(57)
    running = e.add(ask(ids))
    for _ in range(3):
        e.step()
    e.forget_prefixes()
    child = e.fork(running)
    e.drain()
    assert running.finish == child.finish == "length"
    later = e.add(ask(ids))
    e.drain()
    assert e.cache_report(later).hit == 0


def test_state_of_other_weights_is_refused() -> None:
    """The same config, another checkpoint: a rolling update must not mix them."""
    made = real()
    other = dataclasses.replace(made, params=tmap(lambda t: t * 1, made.params))
    other.params.layers[0].attn.wq_a.mul_(1.5)
    source = engine(made)
    request = source.add(ask(prompt(20)))
    source.step()
    moved = request.moved(source.export(request))
    engine(made).add(dataclasses.replace(moved))
    with pytest.raises(ValueError, match="weights"):
        engine(other).add(moved)


def test_a_state_that_waits_is_dropped_with_the_prefixes() -> None:
    """It was taken before the weights changed, and its request has not begun."""
    source, target, ids = engine(real()), engine(real()), prompt(20)
    request = source.add(ask(ids))
    source.step()
    busy = target.add(ask(prompt(9)))
    moved = target.add(request.moved(source.export(request)))
    assert moved.parcel is not None
    target.forget_prefixes()
    target.drain()
    source.drain()
    assert busy.finish == "length"
    assert target.cache_report(moved).reason != "imported"
    assert moved.output == request.output[1:]


def first(change: Callable[[Tensor], object]) -> Callable[[dict], dict]:
    def made(rows: dict) -> dict:
        name = next(n for n, t in rows.items() if t.numel())
        return rows | {name: change(rows[name])}

    return made


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: dict(list(rows.items())[1:]), "do not name the pools"),
        (lambda rows: rows | {"more": torch.zeros(1)}, "do not name the pools"),
        (lambda rows: None, "do not name the pools"),
        (first(lambda t: t[1:]), "they must be"),
        (first(lambda t: t[:1]), "they must be"),
        (first(lambda t: t.float()), "they must be"),
        (first(lambda t: t.tolist()), "they must be"),
        (first(lambda t: t * torch.nan), "not all finite"),
    ],
)
def test_a_damaged_state_is_refused_before_a_step(change: Callable, told: str) -> None:
    source, target = engine(real()), engine(real())
    request = source.add(ask(prompt(20)))
    source.step()
    state = source.export(request)
    damaged = Parcel(digest=state.digest, tokens=state.tokens, rows=change(dict(state.rows)))
    with pytest.raises(ValueError, match=told):
        target.add(request.moved(damaged))
    assert target.idle
    target.audit()


def test_a_request_made_from_another_has_scores_of_its_own() -> None:
    template = Request(prompt=[1], limits=LIMITS, logprobs=0)
    twin = dataclasses.replace(template)
    e = engine(real(CFG), requests=2)
    e.generate([template, twin])
    assert len(template.scores) == len(template.output)
    assert template.scores == twin.scores
    assert template.scores is not twin.scores
