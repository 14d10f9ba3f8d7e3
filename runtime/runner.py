"""The one owner of device state: parameters, caches, and the programs that step them.

A run is the step of the backbone, then sampling, then the draft module (`propose.py`).

`exact` makes every matrix product have a multiple of 8 rows, blocks one size and tables one width:
then every reduction is the same whatever else is in the step.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.batch import Batch, Need, Shape, StepOut
from dsv4.config import Config
from dsv4.params import Params
from dsv4.state import Pools
from runtime import draw, propose
from runtime.assemble import Ints, Rows, assemble_rows, need
from runtime.cache import Cache
from runtime.drafts import Drafts
from runtime.plan import Plan, Ran
from runtime.request import Sampled

Step = Callable[[Params, Pools, Batch], tuple[StepOut, Pools]]
Draft = Callable[[Params, Pools, Tensor, Batch], tuple[StepOut, Pools]]
Fit = Callable[[Need], Shape]
Mark = Callable[[str], None]


class Model(Protocol):
    """What the runtime is handed: a config, parameters, and steps over them."""

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

    @property
    def draft(self) -> Draft | None:
        """The draft module over the streams before each token; likewise. None: there is none."""
        ...

    @property
    def fit(self) -> Fit | None:
        """The shape that a step with some need is padded to. None: any shape goes."""
        ...

    @property
    def fit_draft(self) -> Fit | None:
        """Likewise of the draft module."""
        ...


def _unmarked(_: str) -> None:
    """Nobody watches."""


class Runner:
    """Runs plans. Not re-entrant."""

    def __init__(
        self, model: Model, cache: Cache, *, block: int, drafts: Drafts | None, exact: bool
    ) -> None:
        """`block`: tokens per query block of steps with prompt tokens; others have 1."""
        self._model, self._cache = model, cache
        self._block, self._drafts, self._exact = block, drafts, exact
        self._device = model.params.embed.device
        self._longest = cache.pages.history_table.shape[1]  # pages of the longest request
        self.mark: Mark = _unmarked  # told the name of every stage that begins

    def check(self, seqs: int, rows: int, budget: int) -> None:
        """Raise ValueError if there are programs, and none for some step of an engine.

        Of `seqs` sequences with `rows` rows each while they generate, and `budget` tokens.
        """
        model = self._model
        if model.fit is not None and self._exact:
            raise ValueError(
                "exact pads every step in one way, and programs have shapes of their own: build "
                "the model with backend eager for exact, or leave exact out"
            )
        if model.fit_draft is not None and self._drafts is None:
            raise ValueError(
                "the model's programs were made for pools with drafts, and this engine has none: "
                "give drafts, or make programs for sizes with drafts = 0"
            )
        for fit, rates, more in ((model.fit, model.cfg.rates, 0), (model.fit_draft, (), 1)):
            if fit is None:
                continue
            own = rows + more  # the draft module computes a page's first row once more
            for decode, tokens in ((True, seqs * own), (False, budget + more * seqs)):
                fit(
                    Need(
                        decode=decode,
                        tokens=tokens,
                        seqs=seqs,
                        wanted=min(seqs * own, tokens),
                        closes=tuple(
                            seqs * (1 + (own - 1) // r) if decode else tokens // r + seqs
                            for r in rates
                        ),
                        history=self._longest,
                        window=self._cache.pages.width,
                    )
                )

    def run(self, plan: Plan) -> list[Ran]:
        """Compute a plan; per work the tokens that hold, and drafts of the next ones."""
        with torch.no_grad():
            for _, held, parcel in plan.imports:
                self._cache.put(held, parcel)
            self.mark("assemble")
            batch = self._batch(plan)
            self.mark("step")
            out = self._step(batch)
            self.mark("sample")
            rows = sum(w.wanted for w in plan.work)
            kept = draw.tokens(out.logits[:rows], plan.work) if rows else [[] for _ in plan.work]
            if self._drafts is None:
                return [Ran(s) for s in kept]
            self.mark("draft")
            return self._propose(plan, out.hidden, kept)

    def _step(self, batch: Batch) -> StepOut:
        out, self._cache.pools = self._model.step(self._model.params, self._cache.pools, batch)
        return out

    def _batch(self, plan: Plan) -> Batch:
        # All works at once, column by column: a step of many requests is host time.
        _, starts, tokens, drafts, wanted, slots, *_ = zip(*plan.work, strict=True)
        if any(drafts):
            tokens = [t + d for t, d in zip(tokens, drafts, strict=True)]
        rows = Rows(
            tokens=np.array(list(itertools.chain.from_iterable(tokens))),
            counts=np.array(list(map(len, tokens))),
            starts=np.array(starts),
            slots=np.array(slots),
            wanted=np.array(wanted),
            history=plan.history,
            window=plan.window,
        )
        return self._assemble(rows, self._model.cfg.rates, plan.decode, self._model.fit)

    def _assemble(self, rows: Rows, rates: Sequence[int], decode: bool, fit: Fit | None) -> Batch:
        """Padded to the shape of a program, where steps are programs.

        In exact mode: sizes that make every reduction independent of what else is in the step.
        Matrix products have a multiple of 8 rows, and enough for all steps to go through the
        experts the same way; tables have the width of the longest request.
        """
        shape, block = None, 1 if decode else self._block
        if fit is not None:
            shape = fit(need(rows, rates, decode))
            assert shape.block is not None, "a program has all sizes"
            block = shape.block
        elif self._exact:
            cfg, block = self._model.cfg, self._block
            shape = Shape(
                tokens=_eights(max(len(rows.tokens), -(-cfg.experts // cfg.topk))),
                wanted=_eights(int(rows.wanted.sum())),
                history=self._longest if rates else None,
            )
        return assemble_rows(rows, rates, block=block, shape=shape, device=self._device)

    def _propose(self, plan: Plan, hidden_TMD: Tensor, kept: list[list[Sampled]]) -> list[Ran]:
        """Bring the draft module's rows up to date with what holds now, and draft from there."""
        work = propose.catch_up(plan, kept, self._cache.pages.page_tokens)
        if work is None or self._drafts is None:
            return [Ran(s) for s in kept]
        streams = hidden_TMD[self._index(work.source)]
        if len(work.first):
            saved = self._cache.pools.streams
            assert saved is not None, "the pools of a model with drafts keep streams"
            shape = streams.shape[1:]
            streams[self._index(work.first)] = saved[self._index(work.page)].unflatten(1, shape)

        def module(streams_TMD: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
            return self._draft(streams_TMD, rows, plan.decode)

        drafts = propose.propose(plan, streams, work, module, self._drafts.rule)
        return [Ran(s, drafts.get(i)) for i, s in enumerate(kept)]

    def _draft(self, streams_TMD: Tensor, rows: Rows, decode: bool) -> tuple[Tensor, Tensor]:
        draft, params = self._model.draft, self._model.params
        assert draft is not None, "an engine with drafts has a model that makes them"
        batch = self._assemble(rows, (), decode, self._model.fit_draft)
        pad = len(batch.tokens) - len(streams_TMD)
        streams = F.pad(streams_TMD, (0, 0, 0, 0, 0, pad))
        out, self._cache.pools = draft(params, self._cache.pools, streams, batch)
        return out.logits, out.hidden

    def _index(self, rows: Ints) -> Tensor:
        return torch.from_numpy(rows).to(self._device)


def _eights(n: int) -> int:
    return -(-n // 8) * 8
