"""Our side of the benchmark, in a process of its own.

A prefill sample is one prompt from empty caches, whole or in chunks. A decode sample is four steps
at consecutive positions, so that every group of 4 tokens closes once in it; its caches hold random
numbers, since no value of a cache changes what a step costs. Batches are made before the clock
starts, as the peers' metadata is.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiler.ladder import ladder
from compiler.store import Store
from dsv4 import model as pure
from dsv4.batch import Batch, Need, Shape, shape_of
from dsv4.context import Ctx
from dsv4.state import Pools, PoolSizes, init_pools, pool_spec
from dsv4.tree import tmap
from registry.build import build
from registry.model import CompiledModel
from registry.programs import compile_model, room
from runtime.assemble import Row, assemble
from tests.bench.case import STEPS, Case
from tests.bench.contestant import reserve_output, sample, serve, timed

PAGE = 128  # tokens
WIDTH = 4  # window pages a decode row lists: the table is a ring


def sizes(case: Case) -> PoolSizes:
    """Pools for the sequences of a case, with room for sixteen more tokens each."""
    pages = 1 + case.batch * -(-(case.tokens + 16) // PAGE)
    window = 1 + case.batch * WIDTH if case.decode else pages
    return PoolSizes(history_pages=pages, window_pages=window, slots=case.batch + 1)


def row(case: Case, index: int, start: int, tokens: list[int]) -> Row:
    """What sequence `index` of a case does in one step."""
    pages = -(-(case.tokens + 16) // PAGE)
    history = range(1 + index * pages, 1 + (index + 1) * pages)
    if not case.decode:
        return Row(tokens, start, index + 1, history, history)
    first = max(0, start - 127) // PAGE
    window = [1 + index * WIDTH + page % WIDTH for page in range(first, start // PAGE + 1)]
    return Row(tokens, start, index + 1, history, window, window_start=first)


def programmed(model: CompiledModel, case: Case, chunk: int, block: int) -> CompiledModel:
    """The model with the programs that the steps of a case take; itself if it has none."""
    size = sizes(case)
    asked = room(model.cfg, size, chunk=min(chunk, case.tokens), block=block)
    asked = dataclasses.replace(asked, seqs=case.batch, window=width(case))
    rungs = ladder(asked)
    steps = batches(
        dataclasses.replace(model, fit=lambda need: rungs.pick(need).shape), case, chunk, block
    )
    shapes = {shape_of(batch) for batch in steps}
    only = tuple(b for b in rungs.buckets if b.shape in shapes)
    store = Store(Store.default_root())
    return compile_model(
        model, dataclasses.replace(rungs, buckets=only), store, page_tokens=size.page_tokens
    )


def width(case: Case) -> int:
    """Columns of the window table."""
    return WIDTH if case.decode else -(-(case.tokens + 16) // PAGE)


def batches(model: CompiledModel, case: Case, chunk: int, block: int) -> list[Batch]:
    """The steps of one prompt, or sixteen decode steps at consecutive positions.

    Padded to the shapes of programs, if the model has them.
    """
    generator = torch.Generator().manual_seed(1)
    made = []

    def ids(count: int) -> list[int]:
        return torch.randint(2, model.cfg.vocab, (count,), generator=generator).tolist()

    if case.decode:
        steps = [(start, 1) for start in range(case.tokens, case.tokens + 16)]
    else:
        steps = [(s, min(chunk, case.tokens - s)) for s in range(0, case.tokens, chunk)]
    for start, count in steps:
        rows = [row(case, i, start, ids(count)) for i in range(case.batch)]
        z = 1 if case.decode else min(block, count)
        made.append(padded(model, case, rows, z))
    return made


def padded(model: CompiledModel, case: Case, rows: list[Row], block: int) -> Batch:
    """The batch of some rows, in the shape of a program if there are programs."""
    shape = Shape(window=width(case))
    if model.fit is not None:
        counts = [len(r.tokens) for r in rows]
        ends = [r.start + len(r.tokens) for r in rows]
        shape = model.fit(
            Need(
                decode=case.decode,
                tokens=sum(counts),
                seqs=len(rows),
                wanted=len(rows),
                closes=tuple(
                    sum(e // rate - r.start // rate for r, e in zip(rows, ends, strict=True))
                    for rate in model.cfg.rates
                ),
                history=-(-max(ends) // PAGE),
                window=width(case),
            )
        )
    return assemble(rows, model.cfg, page_tokens=PAGE, block=shape.block or block, shape=shape)


def filled(model: CompiledModel, case: Case) -> Pools:
    """Pools whose rows are random, but for those of padding."""
    made = sizes(case)
    dtype = model.params.embed.dtype
    generator = torch.Generator().manual_seed(2)

    def fill(pool: Tensor, leaf: Any) -> Tensor:
        pool.normal_(generator=generator)
        pool[: leaf.unit] = 0
        return pool

    return tmap(fill, init_pools(model.cfg, made, dtype), pool_spec(model.cfg, made))


def ours(model: CompiledModel, case: Case, chunk: int, block: int) -> Callable[[], Tensor]:
    """A function that runs one prompt, or the next decode step, and returns its logits.

    This is the one place that calls the model: another way of running a step goes here.
    """
    steps = batches(model, case, chunk, block)
    held = [filled(model, case)]
    turns = itertools.cycle(steps)

    def run() -> Tensor:
        out = None
        for _ in range(1 if case.decode else len(steps)):
            out, held[0] = model.step(model.params, held[0], next(turns))
        assert out is not None
        return out.logits

    return run


class Ours:
    """This repository's model."""

    def __init__(self, directory: str, backend: str, chunk: int, block: int) -> None:
        """Load the checkpoint. `chunk`: tokens per prefill step; `block`: per query block."""
        self.directory, self.chunk, self.block = directory, chunk, block
        self.model = build(directory, backend=backend, drafts=False)
        self._run: Callable[[], Tensor] | None = None
        self._case: Case | None = None

    def hello(self) -> dict[str, Any]:
        """See `Contestant`."""
        whole = "whole prompts" if self.chunk >= 2**20 else f"chunks of {self.chunk} tokens"
        return {
            "versions": f"torch {torch.__version__}",
            "threads": torch.get_num_threads(),
            "how": f"backend {self.model.backend.name}, prefill in {whole}, blocks of {self.block}",
            "workarounds": [],
        }

    @torch.no_grad()
    def logits(self, prompt: list[int], token: int, steps: int) -> Tensor:
        """See `Contestant`."""
        return self._logits(self.model, prompt, token, steps)

    @torch.no_grad()
    def reference(self, prompt: list[int], token: int, steps: int, dtype: str, qat: bool) -> Tensor:
        """The same in another dtype, or with the caches rounded as `qat` says; plain operators."""
        kind = getattr(torch, dtype)
        model = self.model
        if model.params.embed.dtype != kind:
            model = build(self.directory, dtype=kind, drafts=False)
        ctx = Ctx(model.cfg, ops=model.ctx.ops, qat=qat)
        model = dataclasses.replace(model, ctx=ctx, step=lambda p, s, b: pure.step(p, s, b, ctx))
        return self._logits(model, prompt, token, steps)

    def _logits(self, model: CompiledModel, prompt: list[int], token: int, steps: int) -> Tensor:
        case = Case(decode=False, batch=1, tokens=len(prompt) + steps)
        pools = init_pools(model.cfg, sizes(case), model.params.embed.dtype)
        out = []
        at = 0
        for tokens in (prompt, *([token] for _ in range(steps))):
            rows = [row(case, 0, at, tokens)]
            z = min(self.block, len(tokens))
            batch = assemble(rows, model.cfg, page_tokens=PAGE, block=z)
            told, pools = model.step(model.params, pools, batch)
            out.append(told.logits[-1])
            at += len(tokens)
        return torch.stack(out)

    def prepare(self, case: Case) -> str | None:
        """See `Contestant`."""
        self._case = case
        model = programmed(self.model, case, self.chunk, self.block)
        self._run = ours(model, case, self.chunk, self.block)
        return None

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """See `Contestant`."""
        run = self._run
        assert run is not None
        assert self._case is not None
        count = STEPS if self._case.decode else 1
        return sample(lambda: [timed(run) for _ in range(count)])

    def release(self) -> None:
        """See `Contestant`."""
        self._run = self._case = None


def main() -> None:
    """Serve the parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=2**20)
    parser.add_argument("--block", type=int, default=16)
    args = parser.parse_args()
    output = reserve_output()
    torch.set_num_threads(args.threads)
    serve(Ours(args.directory, args.backend, args.chunk, args.block), output)


if __name__ == "__main__":
    main()
