"""A tiny real model with a draft module, for engines; and drafts that an oracle corrects."""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from dsv4 import model, mtp
from dsv4.config import Config
from dsv4.context import Ctx
from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.pages import fit
from runtime.plan import Plan, Ran
from runtime.request import Request
from tests import tiny
from tests.fake_model import Model

CFG = tiny.short("wch", eos=(), max_positions=128)  # every kind, one draft module


@functools.cache
def real(cfg: Config = CFG, dtype: torch.dtype = torch.float64) -> Model:
    """Random parameters and the plain steps."""
    ctx = Ctx(cfg)
    return Model(
        cfg,
        tiny.params(cfg, 0, dtype),
        lambda p, s, b: model.step(p, s, b, ctx),
        lambda p, s, h, b: mtp.draft(p, s, h, b, ctx),
    )


Oracle = Callable[[int, int], int | None]


def told(made: Model, oracle: Oracle) -> Model:
    """The same, but the draft at a position of the request in a slot is what the oracle says.

    The module runs as ever and writes its rows: only what it proposes is exchanged. None: its own.
    """
    inner = made.draft
    assert inner is not None

    def draft(params, pools, hidden, batch):
        out, pools = inner(params, pools, hidden, batch)
        logits = out.logits.clone()
        slots = batch.slots[batch.seq[batch.wanted]].tolist()
        places = (batch.positions[batch.wanted] + 1).tolist()
        for y, (slot, position) in enumerate(zip(slots, places, strict=True)):
            token = oracle(slot, position) if slot else None
            if token is not None:
                logits[y] = F.one_hot(torch.tensor(token), logits.shape[1]) * 1e9
        return dataclasses.replace(out, logits=logits), pools

    return dataclasses.replace(made, draft=draft)


def engine(made: Model, requests: int = 1, tokens: int = 96, **more) -> Engine:
    """Room for so many requests; pages of 8 tokens."""
    drafts: Drafts | None = more.get("drafts")
    settings = {"chunk": 24, "block": 8} | more
    pools = fit(
        made.cfg,
        [tokens] * requests,
        most=settings["chunk"],
        page_tokens=made.cfg.page_tokens,
        drafts=drafts.depth if drafts else 0,
    )
    return Engine(made, pools, **settings)


def watched(e: Engine) -> list[tuple[Plan, list[Ran]]]:
    """The plans and results of every step from now on."""
    seen, run = [], e._runner.run

    def watch(plan: Plan) -> list[Ran]:
        ran = run(plan)
        seen.append((plan, ran))
        return ran

    e._runner.run = watch
    return seen


def prompt(length: int, seed: int = 0, cfg: Config = CFG) -> list[int]:
    """Random token ids."""
    return tiny.tokens(cfg, 1, length, seed)[0].tolist()


def slots(e: Engine) -> dict[int, Request]:
    """Who runs in which slot."""
    return {r.held.slot: r for r in e._scheduler.running if r.held is not None}
