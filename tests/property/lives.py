"""Sequences in a `Cache`, stepped on real rows, and what they must compute: a run that is alone.

A `Lives` owns one cache with its prefix cache; a `Life` is one sequence in it. Every step runs the
backbone, and the draft module where the model has one, over one sequence, and its logits are
compared with a run of the tokens alone and in one piece: other pages, no cache, no recycling. All
rows of all pools but padding's begin as NaN, so whatever is read before it was written is seen.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4 import model, mtp
from dsv4.state import PoolSizes, pool_spec
from dsv4.tree import from_paths, paths
from runtime.assemble import Row, assemble
from runtime.cache import Cache
from runtime.pages import Held
from runtime.parcel import Parcel
from runtime.prefix import Chain, Prefix
from tests import tiny
from tests.property.world import BOUND, Setting, off

MOST = 12  # tokens of one step, besides drafts
KINDS = ["wchc", "ch", "hc", "c", "h", "w", "hwc"]  # every kind first, last and alone


@st.composite
def settings(draw: Callable) -> Setting:
    """Every layer mix, with and without a draft module; windows shorter and longer than a group."""
    csa, hca = draw(st.sampled_from([(4, 8), (2, 6)]))
    kinds = draw(st.sampled_from(KINDS))
    cfg = tiny.short(
        kinds,
        draw(st.integers(0, 1)),
        mtp=draw(st.integers(0, 1)),
        csa_rate=csa,
        hca_rate=hca,
        window=draw(st.sampled_from([1, 2, 3, 8, 11])),
        index_topk=draw(st.integers(1, 4)),
        max_positions=240,
    )
    page = max(cfg.page_tokens, 2) * draw(st.integers(1, 2))
    block = draw(st.sampled_from([1, 4, 16]))
    return Setting(cfg=cfg, page_tokens=page, block=block, seed=draw(st.integers(0, 2**16)))


def ids(setting: Setting, count: int, seed: int) -> list[int]:
    """Random tokens; no runs of equal ones, so that no two indexer scores tie."""
    rng = random.Random(seed)
    return [rng.randrange(setting.cfg.vocab) for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class Alone:
    """What these tokens give by themselves, at every position."""

    logits: Tensor  # [S, V]
    hidden: Tensor  # [S, M, D] streams
    drafted: Tensor | None  # [S, V], of the draft module


@functools.lru_cache(maxsize=512)
def dense(setting: Setting, tokens: tuple[int, ...]) -> Alone:
    """One run of all tokens in fresh pools, in an order of pages that nobody shares."""
    with torch.no_grad():
        batch, pools = model.fresh(setting.params, torch.tensor([tokens]), setting.ctx)
        out, pools = model.step(setting.params, pools, batch, setting.ctx)
        if not setting.cfg.mtp:
            return Alone(out.logits, out.hidden, None)
        drafted, _ = mtp.draft(setting.params, pools, out.hidden.roll(1, 0), batch, setting.ctx)
    return Alone(out.logits, out.hidden, drafted.logits)


@dataclasses.dataclass(eq=False)
class Life:
    """One sequence: what its state is of, and where it lives."""

    held: Held
    chain: Chain
    tokens: list[int] = dataclasses.field(default_factory=list)  # valid ones

    def snapshot(self) -> tuple:
        """What a refused call must leave alone."""
        h = self.held
        return h.length, h.written, h.window_start, [*h.history], [*h.window]


class Lives:
    """A cache, its prefix cache, and the sequences in it."""

    def __init__(
        self,
        setting: Setting,
        *,
        history: int = 40,
        window: int = 40,
        slots: int = 5,
        drafts: int = 0,
    ) -> None:
        """`drafts`: tokens that may be written and then rejected."""
        self.setting, self.drafts = setting, drafts
        self.sizes = PoolSizes(
            history_pages=history,
            window_pages=window,
            slots=slots,
            page_tokens=setting.page_tokens,
            drafts=drafts,
        )
        dtype = setting.params.embed.dtype
        self.cache = Cache(setting.cfg, self.sizes, most=MOST + drafts, dtype=dtype)
        self.pages = self.cache.pages
        self.prefix = Prefix(self.pages, self.cache.digest, enabled=True)
        self.spec = paths(pool_spec(setting.cfg, self.sizes))
        self.all: list[Life] = []
        for name, pool in paths(self.cache.pools).items():
            pool[self.spec[name].unit :] = torch.nan

    def _add(self, held: Held | None, tokens: Sequence[int], published: int = 0) -> Life | None:
        if held is None:
            return None
        chain = self.prefix.chain("", ())
        chain.published = published
        self.all.append(Life(held, chain, list(tokens)))
        return self.all[-1]

    def open(self) -> Life | None:
        """An empty sequence."""
        return self._add(self.cache.open(), ())

    def grown(self, tokens: Sequence[int], step: int = MOST) -> Life:
        """A sequence of these tokens, computed in steps, every one of them compared."""
        life = self.open()
        assert life is not None
        want = dense(self.setting, tuple(tokens))
        for at in range(0, len(tokens), step):
            assert self.advance(life, tokens[at : at + step], want=want)
        return life

    def fork(self, life: Life) -> Life | None:
        """Another sequence with the same state."""
        return self._add(self.cache.fork(life.held), life.tokens)

    def restore(self, tokens: Sequence[int]) -> Life:
        """A sequence that begins with what the prefix cache has of these tokens."""
        hit, report = self.prefix.match(self.prefix.chain("", ()), tokens)
        life = self._add(self.cache.open(), tokens[: report.hit], len(hit.history))
        assert life is not None
        self.pages.restore(life.held, hit.history, hit.window)
        return life

    def export(self, life: Life) -> Parcel:
        """The state of a sequence."""
        return self.cache.export(life.held, life.tokens)

    def receive(self, state: Parcel, prompt: Sequence[int]) -> Life | None:
        """The sequence that goes on from a state."""
        return self._add(self.cache.import_(state, prompt), state.tokens)

    def release(self, life: Life) -> None:
        """The sequence ends; what it published stays."""
        self.prefix.ended(life.chain, life.held)
        self.cache.release(life.held)
        self.all.remove(life)

    def advance(
        self,
        life: Life,
        tokens: Sequence[int],
        keep: int | None = None,
        want: Alone | None = None,
    ) -> bool:
        """Append tokens, run them, compare them, and commit the first `keep` of them."""
        if not self.cache.append(life.held, len(tokens)):
            return False
        error = self.run(life, tokens, want)
        assert error <= BOUND, f"logits are off by {error:.1e}"
        self.commit(life, tokens[:keep])
        return True

    def commit(self, life: Life, tokens: Sequence[int]) -> None:
        """As the scheduler does it: publish before window pages are recycled."""
        life.tokens += tokens
        self.pages.commit(life.held, len(tokens))
        self.prefix.publish(life.chain, life.held, life.tokens, len(life.tokens))
        self.pages.recycle(life.held)

    def run(self, life: Life, tokens: Sequence[int], want: Alone | None = None) -> float:
        """Step over appended tokens; by how much any of their logits is off.

        `want`: of these tokens, or of more behind them.
        """
        setting, held = self.setting, life.held
        start, end = held.length, held.length + len(tokens)
        row = Row(
            tokens=tokens,
            start=start,
            slot=held.slot,
            history_pages=held.history,
            window_pages=held.window,
            window_start=held.window_start,
            wanted=len(tokens),
        )
        batch = assemble([row], setting.cfg, page_tokens=setting.page_tokens, block=setting.block)
        want = want or dense(setting, (*life.tokens, *tokens))
        with torch.no_grad():
            before = self._before(life, want)
            out, pools = model.step(setting.params, self.cache.pools, batch, setting.ctx)
            error = off(out.logits, want.logits[start:end])
            if want.drafted is not None:
                streams = torch.cat((before, out.hidden[:-1]))
                got, pools = mtp.draft(setting.params, pools, streams, batch, setting.ctx)
                skip = int(start == 0)  # position 0 has no streams before it
                error = max(error, off(got.logits[skip:], want.drafted[start + skip : end]))
        self.cache.pools = pools
        for name, pool in paths(pools).items():
            assert not pool[: self.spec[name].unit].any(), f"{name}: padding rows were written"
        return error

    def _before(self, life: Life, want: Alone) -> Tensor:
        """Streams before the next token: where it begins a page, those kept with the last one."""
        held, kept = life.held, self.cache.pools.streams
        page, within = divmod(held.length, self.setting.page_tokens)
        if within or not page or kept is None:
            return want.hidden[max(held.length - 1, 0)][None]
        return kept[held.window[page - 1 - held.window_start]].view(1, *want.hidden.shape[1:])

    def audit(self) -> None:
        """No page is lost, none has an owner too many or too few."""
        self.pages.audit(life.held for life in self.all)

    def end(self) -> None:
        """When all have gone everything is there again."""
        for life in [*self.all]:
            self.release(life)
        self.pages.audit([])
        for pool in (self.pages.history, self.pages.window, self.pages.slots):
            assert pool.available == pool.capacity, pool.name

    def harm(self, suffix: str) -> None:
        """Spoil every row of the pools whose path ends so, but padding's: a test must fail."""
        named = paths(self.cache.pools)
        for name, pool in named.items():
            if name.endswith(suffix):
                named[name] = pool.clone()
                named[name][self.spec[name].unit :] += 1
        self.cache.pools = from_paths(self.cache.pools, named)


def same(a: Parcel, b: Parcel) -> bool:
    """Bit by bit, rows that were never written (NaN) included."""
    return a.rows.keys() == b.rows.keys() and all(
        torch.equal(x.nan_to_num(), b.rows[name].nan_to_num())
        and torch.equal(x.isnan(), b.rows[name].isnan())
        for name, x in a.rows.items()
    )
