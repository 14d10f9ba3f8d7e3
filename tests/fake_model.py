"""Models that compute nothing: they count, and draft as well as they are told to.

The token after n is n + 1. The draft of the token at position p is right if `right(p)`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.batch import Batch, StepOut
from dsv4.config import Config
from dsv4.params import Params
from dsv4.state import Pools
from runtime.runner import Draft, Fit, Step
from tests import tiny

Right = Callable[[int], bool]


@dataclasses.dataclass(frozen=True)
class Model:
    """What an engine is given."""

    cfg: Config
    params: Params
    step: Step
    draft: Draft | None = None
    fit: Fit | None = None
    fit_draft: Fit | None = None


CFG = tiny.short("w", 0, mtp=1, eos=(100,), max_positions=96)


@functools.cache
def _params(cfg: Config) -> Params:
    return tiny.params(cfg)


def _out(batch: Batch, wanted: Tensor, cfg: Config) -> StepOut:
    """Logits that want these tokens, and streams of zeros."""
    hidden = torch.zeros(len(batch.tokens), cfg.streams, cfg.dim)
    load = torch.zeros(1, 1, dtype=torch.int32)
    return StepOut(
        logits=F.one_hot(wanted % cfg.vocab, cfg.vocab).float() * 9, hidden=hidden, load=load
    )


def counter(
    cfg: Config = CFG, right: Right | None = None, seen: list[Batch] | None = None
) -> Model:
    """`seen` gets the batches of the backbone. Without `right` there is no draft module."""

    def step(params: Params, pools: Pools, batch: Batch) -> tuple[StepOut, Pools]:
        if seen is not None:
            seen.append(batch)
        return _out(batch, batch.tokens[batch.wanted] + 1, cfg), pools

    def draft(
        params: Params, pools: Pools, hidden_TMD: Tensor, batch: Batch
    ) -> tuple[StepOut, Pools]:
        assert right is not None
        places = (batch.positions[batch.wanted] + 1).tolist()
        more = torch.tensor([1 if right(p) else 2 for p in places], dtype=torch.int64)
        return _out(batch, batch.tokens[batch.wanted] + more, cfg), pools

    return Model(cfg, _params(cfg), step, draft if right is not None else None)


def letters(ids: Sequence[int]) -> str:
    """Token 0 is "a", and so on."""
    return "".join(chr(ord("a") + i % 26) for i in ids)
