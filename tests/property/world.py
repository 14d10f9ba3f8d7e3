"""Sequences on shared pools, stepped by any schedule, and what of the pools is theirs.

A `World` drives `step` through `runtime.assemble` and `runtime.pages`, so that the properties hold
for the runtime's own addressing, window pages recycled after every step. Configs are tiny: every
example is longer than the window and has more entries than the indexer keeps.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4 import model
from dsv4.config import Config
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools, PoolSizes, pool_spec
from dsv4.tree import paths, tmap
from runtime.assemble import Row, Shape, assemble
from runtime.cache import Cache
from runtime.pages import Held
from tests import tiny

# Float64 rounds at 1.1e-16. The order of a sum changes with the shape of a step, so that a result
# is off by sqrt(terms) to terms roundings per reduction, a few hundred terms and some 60 reductions
# deep. Relative to the largest value 3e-15 is seen; a wrong row or mask gives 1e-2 and more.
BOUND = 1e-13

LONGEST = 60  # tokens


@dataclasses.dataclass(frozen=True)
class Setting:
    """A drawn model, and how its steps are laid out."""

    cfg: Config
    page_tokens: int
    block: int
    seed: int
    dtype: torch.dtype = torch.float64

    @functools.cached_property
    def params(self) -> Params:
        """Random ones of the seed; not a field, so that a failing example can be read."""
        return tiny.params(self.cfg, self.seed, self.dtype)

    @property
    def ctx(self) -> Ctx:
        """Plain operators."""
        return Ctx(self.cfg)


@st.composite
def settings(draw: Callable, dtype: torch.dtype = torch.float64) -> Setting:
    """Every layer kind and mix; windows shorter and longer than a group; selection that bites."""
    csa, hca = draw(st.sampled_from([(4, 8), (2, 6)]))
    kinds = draw(st.sampled_from(["wchc", "cch", "hc", "hwc", "cw", "wh"]))
    cfg = tiny.short(
        kinds,
        draw(st.integers(0, 2)),
        mtp=0,
        csa_rate=csa,
        hca_rate=hca,
        window=draw(st.sampled_from([4, 5, 8, 16])),
        index_topk=draw(st.integers(1, 4)),
        max_positions=4 * LONGEST,
    )
    return Setting(
        cfg=cfg,
        page_tokens=cfg.page_tokens * draw(st.integers(1, 3)),
        block=draw(st.sampled_from([1, 3, 4, 16])),
        seed=draw(st.integers(0, 2**16)),
        dtype=dtype,
    )


def prompts(setting: Setting, *lengths: int) -> list[list[int]]:
    """Random token ids of these lengths."""
    many = tiny.tokens(setting.cfg, len(lengths), max(lengths), setting.seed).tolist()
    return [ids[:n] for ids, n in zip(many, lengths, strict=True)]


lengths = st.integers(20, LONGEST)  # longer than any window, than any index_topk * csa_rate + 3


@st.composite
def cuts(draw: Callable, length: int, most: int = 24) -> list[int]:
    """A partition of `length` tokens into chunks."""
    out: list[int] = []
    while sum(out) < length:
        out.append(draw(st.integers(1, min(most, length - sum(out)))))
    return out


@st.composite
def schedules(draw: Callable, lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Steps over several sequences: in each some of them, in any order, with some tokens."""
    left = dict(enumerate(lengths))
    steps = []
    while left:
        order = draw(st.permutations(sorted(left)))
        work = [(i, draw(st.integers(1, min(24, left[i])))) for i in order[: draw(_some(order))]]
        for i, count in work:
            left[i] -= count
            if not left[i]:
                del left[i]
        steps.append(work)
    return steps


def _some(order: Sequence[int]) -> st.SearchStrategy[int]:
    return st.integers(1, len(order))


class World:
    """Pools, and sequences that grow on them."""

    def __init__(
        self,
        setting: Setting,
        sequences: Sequence[list[int]],
        *,
        drafts: int = 0,
        shuffle: int | None = None,
    ) -> None:
        """`drafts`: tokens that may be taken back. `shuffle`: seed of the order of free pages."""
        self.setting = setting
        cfg, page = setting.cfg, setting.page_tokens
        most = LONGEST + 8
        pages = -(-most // page) + 1
        count = 3 + len(sequences) * pages  # some are never used
        self.sizes = PoolSizes(
            history_pages=count,
            window_pages=count,
            slots=len(sequences) + 2,
            page_tokens=page,
            drafts=drafts,
        )
        self.cache = Cache(cfg, self.sizes, most=most, dtype=setting.params.embed.dtype)
        self.pages = self.cache.pages
        if shuffle is not None:
            generator = torch.Generator().manual_seed(shuffle)
            for pool in (self.pages.history, self.pages.window, self.pages.slots):
                order = torch.randperm(len(pool._free), generator=generator)
                pool._free = [pool._free[i] for i in order]
        self.tokens = [list(s) for s in sequences]
        self.lengths = [0] * len(sequences)
        self.held: list[Held] = []
        for _ in sequences:
            held = self.cache.open()
            assert held is not None
            self.held.append(held)

    @property
    def pools(self) -> Pools:
        """What the next step is given."""
        return self.cache.pools

    @pools.setter
    def pools(self, pools: Pools) -> None:
        self.cache.pools = pools

    def row(self, i: int, tokens: Sequence[int]) -> Row:
        """The next tokens of sequence i, all wanted."""
        held, start = self.held[i], self.lengths[i]
        assert self.cache.append(held, len(tokens))
        return Row(
            tokens=tokens,
            start=start,
            slot=held.slot,
            history_pages=held.history,
            window_pages=held.window,
            window_start=held.window_start,
            wanted=len(tokens),
        )

    def run(self, rows: Sequence[Row], block: int | None = None, shape: Shape | None = None):
        """Step over rows; the logits of each. Page 0 and slot 0 stay zero."""
        setting = self.setting
        batch = assemble(
            rows,
            setting.cfg,
            page_tokens=setting.page_tokens,
            block=block or setting.block,
            shape=shape,
        )
        with torch.no_grad():
            out, self.pools = model.step(setting.params, self.pools, batch, setting.ctx)
        for name, pool, unit in self.units():
            assert not pool[:unit].any(), f"{name}: padding rows were written"
        counts = [len(r.tokens) for r in rows]
        return out.logits[: sum(counts)].split(counts)

    def step(
        self,
        work: Sequence[tuple[int, int]],
        *,
        block: int | None = None,
        shape: Shape | None = None,
    ) -> dict[int, Tensor]:
        """Advance sequences by some tokens each: their logits, and window pages recycled."""
        rows = [self.row(i, self.tokens[i][self.lengths[i] : self.lengths[i] + n]) for i, n in work]
        logits = self.run(rows, block, shape)
        for i, n in work:
            self.lengths[i] += n
            self.cache.commit(self.held[i], n)
        self.pages.audit(self.held)
        return {i: x for (i, _), x in zip(work, logits, strict=True)}

    def play(self, steps: Sequence[Sequence[tuple[int, int]]], **layout) -> list[Tensor]:
        """Run a schedule; the logits of every position of each sequence, [length, V]."""
        seen: list[list[Tensor]] = [[] for _ in self.tokens]
        for work in steps:
            for i, logits in self.step(work, **layout).items():
                seen[i].append(logits)
        return [torch.cat(x) for x in seen]

    def drafted(self, i: int, tokens: Sequence[int]) -> None:
        """Write tokens and take them back: the length alone says what is valid."""
        self.run([self.row(i, tokens)])
        self.cache.rollback(self.held[i], len(tokens))

    # What of the pools belongs to a sequence.

    def units(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every pool with its name and the rows that index 0 owns of it."""
        spec = paths(pool_spec(self.setting.cfg, self.sizes))
        for name, pool in paths(self.pools).items():
            yield name, pool, spec[name].unit

    def live(self, i: int) -> dict[str, Tensor]:
        """Per pool, the rows that later steps of sequence i may read, oldest first."""
        cfg, n = self.setting.cfg, self.setting.page_tokens
        length, held = self.lengths[i], self.held[i]

        def window_rows(first: int) -> Tensor:
            pos = torch.arange(max(first, 0), length)
            pages = torch.tensor([0, *held.window])  # row 0 is never looked at
            return pages[pos // n - held.window_start + 1] * n + pos % n

        def entries(rate: int) -> Tensor:
            j = torch.arange(length // rate)
            return torch.tensor([0, *held.history])[j // (n // rate) + 1] * (n // rate) + j % (
                n // rate
            )

        out = {}
        for name, pool, _ in self.units():
            plan = cfg.plans[int(name.split(".")[1])]
            kind = name.split(".")[-1]
            if kind == "window":
                out[name] = window_rows(length - cfg.window + 1)
            elif kind == "rows":
                out[name] = entries(plan.rate)
            elif kind == "ring":
                ring = pool.shape[0] // self.sizes.slots
                pos = torch.arange(max(length - plan.overlap * plan.rate + 1, 0), length)
                out[name] = held.slot * ring + pos % ring
            else:
                # Written with the last group of a page, read until the group after it is closed.
                pos = torch.arange(max(length - 2 * plan.rate + 1, 0), length)
                page = pos // n
                pos = pos[(pos % n >= n - plan.rate) & (length < (page + 1) * n + plan.rate)]
                pages = torch.tensor([0, *held.window])
                page = pages[pos // n - held.window_start + 1]
                out[name] = page * plan.rate + pos % plan.rate
        return out

    def state(self, i: int) -> dict[str, Tensor]:
        """Per pool, the contents of the live rows of sequence i."""
        pools = paths(self.pools)
        return {name: pools[name][rows] for name, rows in self.live(i).items()}

    def poison(self, *spoilt: int) -> None:
        """Write NaN to every row that no sequence may read any more, except to padding's.

        The sequences `spoilt` have NaN in what they do read, too.
        """
        live = [self.live(i) for i in range(len(self.tokens)) if i not in spoilt]
        fresh = {}
        for name, pool, unit in self.units():
            keep = torch.zeros(pool.shape[0], dtype=torch.bool)
            keep[:unit] = True
            for rows in live:
                keep[rows[name]] = True
            fresh[name] = torch.where(keep[:, None], pool, torch.nan)
        values = iter(fresh.values())
        self.pools = tmap(lambda _: next(values), self.pools)


def alone(setting: Setting, tokens: list[int], block: int = 7) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and live rows of one sequence computed in one step on its own pools."""
    world = World(setting, [tokens])
    (logits,) = world.play([[(0, len(tokens))]], block=block)
    return logits, world.state(0)


def off(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value that is wanted."""
    assert got.shape == want.shape
    if not want.numel():
        return 0.0
    assert got.isfinite().all()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


def assert_same(
    world: World, i: int, logits: Tensor, want: tuple[Tensor, dict[str, Tensor]]
) -> None:
    """Sequence i has the wanted logits and live rows, to rounding."""
    assert off(logits, want[0]) <= BOUND
    for name, rows in world.state(i).items():
        assert off(rows, want[1][name]) <= BOUND, name
