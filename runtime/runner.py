"""The one owner of device state: parameters, pools, and the program that steps them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsv4 import sample
from dsv4.batch import Batch, StepOut
from dsv4.config import Config
from dsv4.params import Params
from dsv4.state import Pools, PoolSizes, init_pools
from runtime.assemble import Row, Shape, assemble
from runtime.plan import Plan, Work
from runtime.request import Logprobs, Sampled

Step = Callable[[Params, Pools, Batch], tuple[StepOut, Pools]]


class Model(Protocol):
    """What the runtime is handed: a config, parameters, and a step over them."""

    @property
    def cfg(self) -> Config:
        """Architecture."""
        ...

    @property
    def params(self) -> Params:
        """Parameters; their dtype and device are those of the pools."""
        ...

    @property
    def step(self) -> Step:
        """May write its pools in place: the pools it returns are the only ones after a call."""
        ...


class Runner:
    """Runs plans. Not re-entrant."""

    def __init__(self, model: Model, sizes: PoolSizes, *, block: int, exact: bool) -> None:
        """See `Engine`."""
        self._model = model
        self._block = block
        self._exact = exact
        cfg, embed = model.cfg, model.params.embed
        self._device = embed.device
        self._pools = init_pools(cfg, sizes, embed.dtype, embed.device)
        held = (sizes.history_pages - 1) * sizes.page_tokens
        self._longest = -(-min(cfg.max_positions, held) // sizes.page_tokens)  # pages

    @property
    def pools(self) -> Pools:
        """The caches as they stand between two steps."""
        return self._pools

    def run(self, plan: Plan) -> list[list[Sampled]]:
        """Compute a plan; per work the tokens sampled, none where no logits were wanted."""
        with torch.no_grad():
            batch = self._batch(plan)
            out, self._pools = self._model.step(self._model.params, self._pools, batch)
            rows = [w for w in plan.work for _ in range(w.wanted)]
            if not rows:
                return [[] for _ in plan.work]
            drawn = iter(_sample(out.logits[: len(rows)], rows))
            return [[next(drawn) for _ in range(w.wanted)] for w in plan.work]

    def _batch(self, plan: Plan) -> Batch:
        rows = [_row(w) for w in plan.work]
        return assemble(
            rows,
            self._model.cfg,
            page_tokens=self._pools.page_tokens,
            block=1 if plan.decode and not self._exact else self._block,
            shape=self._shape(plan) if self._exact else None,
            device=self._device,
        )

    def _shape(self, plan: Plan) -> Shape:
        """Sizes that make every reduction independent of what else is in the step.

        Matrix products have a multiple of 8 rows, and enough for all steps to go through the
        experts the same way; tables have the width of the longest request.
        """
        cfg = self._model.cfg
        wanted = sum(w.wanted for w in plan.work)
        return Shape(
            tokens=_eights(max(plan.tokens, -(-cfg.experts // cfg.topk))),
            wanted=_eights(wanted),
            history=self._longest,
        )


def _eights(n: int) -> int:
    return -(-n // 8) * 8


def _row(work: Work) -> Row:
    request, held = work.request, work.request.held
    assert held is not None, "a request in a plan holds pages"
    return Row(
        tokens=request.tokens[work.start : work.start + work.count],
        start=work.start,
        slot=held.slot,
        history_pages=held.history,
        window_pages=held.window,
        window_start=held.window_start,
        wanted=work.wanted,
    )


def _draw(rows: Sequence[Work], like: Tensor) -> sample.Draw:
    """The parameters of each row of logits; filters that no row uses are left out."""
    asked = [w.request.sampling for w in rows]

    def column(values: list) -> Tensor:
        kind = torch.int64 if isinstance(values[0], int) else like.dtype
        return torch.tensor(values, dtype=kind, device=like.device)

    return sample.Draw(
        temperature=column([float(s.temperature) for s in asked]),
        seed=column([s.seed for s in asked]),
        position=column([w.start + w.count for w in rows]),
        top_k=column([s.top_k for s in asked]) if any(s.top_k for s in asked) else None,
        top_p=column([float(s.top_p) for s in asked]) if any(s.top_p < 1 for s in asked) else None,
        min_p=column([float(s.min_p) for s in asked]) if any(s.min_p for s in asked) else None,
    )


def _sample(logits_YV: Tensor, rows: Sequence[Work]) -> list[Sampled]:
    if all(w.request.sampling.temperature == 0 for w in rows):
        tokens = sample.greedy(logits_YV)
    else:
        tokens = sample.sample(logits_YV, _draw(rows, logits_YV))
    ids = tokens.tolist()
    finite = torch.isfinite(logits_YV.amax(-1)).tolist()
    asked = [w.request.logprobs for w in rows]
    most = max((n for n in asked if n is not None), default=None)
    if most is None:
        return [Sampled(i, finite=f) for i, f in zip(ids, finite, strict=True)]
    own, top, index = (x.tolist() for x in sample.logprobs(logits_YV, tokens, most))
    best = [tuple(zip(i, v, strict=True)) for i, v in zip(index, top, strict=True)]
    return [
        Sampled(ids[y], None if n is None else Logprobs(own[y], best[y][:n]), finite[y])
        for y, n in enumerate(asked)
    ]
