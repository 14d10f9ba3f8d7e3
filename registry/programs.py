"""From a model whose steps run as they stand to one whose steps are programs."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from compiler.key import Key, digest_of
from compiler.key_parts import process_parts
from compiler.ladder import FEWEST_PAGES, PAGES_STEP, SEQS_STEP, Bucket, Ladder, Room, ladder
from compiler.program import Program, any_rows, seal
from compiler.programs import Programs
from compiler.store import Store
from dsv4 import tree
from dsv4.batch import blank
from dsv4.config import Config
from dsv4.state import Pools, PoolSizes, init_pools, pool_spec
from registry.model import CompiledModel
from runtime import pages
from runtime.pools import served

# Told of each program when it is ready, with how many there will be.
Told = Callable[[Program, int], None]


def room(
    cfg: Config, sizes: PoolSizes, *, chunk: int, budget: int | None = None, block: int = 16
) -> Room:
    """What an engine with these options can ask of a step, rounded up to rungs of the ladder.

    So that engines of about one size share their programs. Arguments as of `runtime.engine.Engine`,
    with `sizes.drafts` for the depth of its drafts. Raises ValueError for drafts of a model without
    a draft module.
    """
    rows, most = 1 + sizes.drafts, -(-cfg.max_positions // sizes.page_tokens)
    seqs = _up(sizes.slots - 1, 1, SEQS_STEP)
    keep = pages.kept_tokens(served(cfg, sizes.drafts))
    width = pages.window_width(keep, sizes.page_tokens, pages.reach(chunk, sizes.drafts))
    return Room(
        seqs=seqs,
        rows=rows,
        tokens=max(budget or 0, chunk + seqs * rows),
        block=block,
        history=min(_up(sizes.history_pages - 1, FEWEST_PAGES, PAGES_STEP), most),
        window=width,
        rates=cfg.rates,
    )


def compile_model(
    model: CompiledModel,
    asked: Room | Ladder,
    store: Store,
    *,
    page_tokens: int,
    told: Told | None = None,
    strict: bool = True,
) -> CompiledModel:
    """The model with a program for every bucket of `asked`: from `store`, or compiled and kept.

    A model whose backend does not compile is returned as it is. Drafts are compiled if the room
    has rows for them. With `strict`, a step of any other shape is an error later on.
    """
    make = model.backend.compile
    if make is None:
        return model
    steps_of = asked if isinstance(asked, Ladder) else ladder(asked)
    depth = steps_of.room.rows - 1
    parts = process_parts(model.backend.name, make.version(), cxx=make.cxx())
    probe = make.probe
    if probe is not None:
        key = Key.of({"step": "probes of the CPU"}, parts)
        store.use(key, lambda entry: probe(entry.files), counted=False)
    example = _Example(model, served(model.cfg, depth), depth, page_tokens, store, parts)
    steps = Programs(steps_of, example.seal_step, strict=strict)
    made = [steps]
    drafts = None
    if depth:
        drafts = Programs(_draft_ladder(steps_of.room), example.seal_draft, strict=strict)
        made.append(drafts)
    total = sum(len(p.ladder.buckets) for p in made)
    for programs in made:
        for program in programs.make():
            if told is not None:
                told(program, total)
    return dataclasses.replace(
        model,
        step=steps,
        draft=drafts,
        fit=steps.fit,
        fit_draft=None if drafts is None else drafts.fit,
        why=(*model.why, f"{total} programs of {model.backend.name} in {store.root}"),
    )


def _draft_ladder(asked: Room) -> Ladder:
    """The draft module runs over a row more of each sequence: the first of a page, once more."""
    more = dataclasses.replace(asked, rows=asked.rows + 1, tokens=asked.tokens + asked.seqs)
    return ladder(more).without_closes()


@dataclasses.dataclass(frozen=True)
class _Example:
    """Arguments that programs are compiled for."""

    model: CompiledModel
    cfg: Config
    depth: int
    page_tokens: int
    store: Store
    parts: Mapping[str, str]  # of the key, of this process

    def seal_step(self, bucket: Bucket) -> Program:
        """The program of a step."""
        return self._seal("step", self.model.step, bucket)

    def seal_draft(self, bucket: Bucket) -> Program:
        """The program of a draft."""
        assert self.model.draft is not None, "drafts are asked for with a draft module"
        return self._seal("draft", self.model.draft, bucket)

    def _seal(self, step: str, fn: Callable[..., Any], bucket: Bucket) -> Program:
        model, cfg = self.model, self.model.cfg
        embed = model.params.embed
        batch = blank(bucket.shape, embed.device)
        args: tuple[Any, ...] = (model.params, any_rows(self._pools()), batch)
        if step == "draft":
            streams = embed.new_zeros(batch.tokens.shape[0], cfg.streams, cfg.dim)
            args = (*args[:2], streams, batch)
        layout = tuple(
            (name, tuple(x.shape), tuple(x.stride()), str(x.dtype))
            for name, x in tree.paths(model.params).items()
        )
        key = Key.of(
            {
                "model": model.architecture,
                "step": step,
                "bucket": str(bucket),
                "shape": digest_of(bucket.shape),
                "dtype": str(embed.dtype).removeprefix("torch."),
                "mesh": digest_of(model.mesh),
                "config": digest_of(cfg),
                "layers": digest_of(cfg.plans),
                "params": digest_of(layout),
                "page_tokens": str(self.page_tokens),
                "drafts": str(self.depth),
                "qat": str(model.ctx.qat),
            },
            self.parts,
        )
        return seal(fn, args, model.backend, key, self.store)

    def _pools(self) -> Pools:
        """Small pools in which no two kinds have the same number of rows.

        Numbers that are equal here would have to be equal in every engine.
        """
        # Rows of two kinds are equal for one n at most.
        sizes = next(s for s in map(self._sizes, itertools.count(3)) if _told_apart(self.cfg, s))
        embed = self.model.params.embed
        return init_pools(self.cfg, sizes, embed.dtype, embed.device)

    def _sizes(self, n: int) -> PoolSizes:
        return PoolSizes(
            history_pages=n + 2,
            window_pages=n + 4,
            slots=n,
            page_tokens=self.page_tokens,
            drafts=self.depth,
        )


def _told_apart(cfg: Config, sizes: PoolSizes) -> bool:
    """Whether pools that grow in different ways have different numbers of rows."""
    ways: dict[int, set[tuple[str, int]]] = {}
    for leaf in tree.leaves(pool_spec(cfg, sizes)):
        ways.setdefault(leaf.shape[0], set()).add((leaf.group, leaf.unit))
    return all(len(found) == 1 for found in ways.values())


def _up(count: int, least: int, step: int) -> int:
    """`least`, or the first of `step` times that, and so on, that reaches `count`."""
    found = least
    while found < count:
        found *= step
    return found
