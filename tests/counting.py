"""An engine over a model that counts: the token after n is n + 1. And over a real, tiny one."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from dsv4 import model
from dsv4.batch import Batch, StepOut
from dsv4.config import Config
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools, PoolSizes
from runtime.engine import Engine
from runtime.pages import fit
from runtime.request import Limits, Request, Sampling
from runtime.runner import Draft, Fit
from tests import tiny


@dataclasses.dataclass(frozen=True)
class Model:
    """What an engine is given."""

    cfg: Config
    params: Params
    step: Callable[[Params, Pools, Batch], tuple[StepOut, Pools]]
    draft: Draft | None = None
    fit: Fit | None = None
    fit_draft: Fit | None = None


def real(cfg: Config, dtype: torch.dtype = torch.float64) -> Model:
    """Random parameters, the plain step."""
    ctx = Ctx(cfg)
    return Model(cfg, tiny.params(cfg, 0, dtype), lambda p, s, b: model.step(p, s, b, ctx))


def counter(cfg: Config, seen: list[Batch] | None = None) -> Model:
    """A step that computes nothing and wants the token after the last one: n, n + 1, n + 2, ..."""

    def step(params: Params, pools: Pools, batch: Batch) -> tuple[StepOut, Pools]:
        if seen is not None:
            seen.append(batch)
        following = (batch.tokens[batch.wanted] + 1) % cfg.vocab
        logits = torch.nn.functional.one_hot(following, cfg.vocab).float() * 9
        load = torch.zeros(1, 1, dtype=torch.int32)
        return StepOut(logits=logits, hidden=logits, load=load), pools

    return Model(cfg, tiny.params(cfg), step)


CFG = tiny.short("wc", 0, mtp=0, eos=(100,), max_positions=64)
REAL = tiny.short(mtp=0, max_positions=200)


def sizes(tokens: int = 64, requests: int = 4) -> PoolSizes:
    return fit(CFG, [tokens] * requests, most=16, page_tokens=8)


def letters(ids: Sequence[int]) -> str:
    """Token 0 is "a", and so on."""
    return "".join(chr(ord("a") + i % 26) for i in ids)


def engine(seen: list[Batch] | None = None, pools: PoolSizes | None = None, **more) -> Engine:
    given = {"chunk": 8, "decode": letters} | more
    return Engine(counter(CFG, seen), pools or sizes(), **given)


def requests(cfg: Config) -> list[Request]:
    """Greedy and sampled, short and long, past the window and past index_topk entries."""
    kinds = (
        (5, Sampling()),
        (37, Sampling(temperature=1.0, seed=3)),
        (61, Sampling(temperature=0.7, top_k=5, seed=4)),
        (1, Sampling(temperature=1.3, top_p=0.9, seed=2**40)),
        (20, Sampling(temperature=1.0, min_p=0.05)),
    )
    return [
        Request(
            prompt=tiny.tokens(cfg, 1, n, seed=n)[0].tolist(),
            sampling=sampling,
            limits=Limits(max_new_tokens=12, ignore_eos=True),
            logprobs=2,
        )
        for n, sampling in kinds
    ]
