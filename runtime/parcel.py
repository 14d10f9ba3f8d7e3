"""The rows of one sequence: what a fork copies, what leaves for another engine, what it costs.

A parcel holds the valid state of a sequence and nothing else, by pool and in order of positions, so
that it can be put into any other pages, and into rings of another size. Two engines understand each
other if their layout digests are equal; anything else is refused before a page is taken.

Functions here write into the pools they are given: only their owner may call them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dsv4.state import PoolLeaf, Pools
from dsv4.tree import paths
from runtime.pages import Copies, Held


@dataclasses.dataclass(frozen=True)
class Parcel:
    """The state of a sequence, away from any pool."""

    digest: str  # `prefix.layout_digest` of the engine it comes from
    tokens: tuple[int, ...]  # whose state it is
    rows: Mapping[str, Tensor]  # by pool path: its live rows, oldest first

    @property
    def bytes(self) -> int:
        """What would have to be sent."""
        return sum(t.numel() * t.element_size() for t in self.rows.values())

    def check(self, digest: str, tokens: Sequence[int]) -> None:
        """Raise ValueError if it is not the state of leading `tokens` in layout `digest`."""
        if self.digest != digest:
            raise ValueError(
                f"the state has layout {self.digest[:16]}, this engine {digest[:16]}: model, "
                f"weights, dtype, page size, and whether drafts are made must be the same; send "
                f"the prompt without it"
            )
        n = len(self.tokens)
        if not 0 < n < len(tokens):
            raise ValueError(
                f"the state is of {n} tokens and the prompt has {len(tokens)}: it must have at "
                f"least 1, and fewer than the prompt, whose last token is computed here"
            )
        if tuple(tokens[:n]) != self.tokens:
            raise ValueError(f"the state is of other tokens than the first {n} of the prompt")


def check_rows(parcel: Parcel, pools: Pools, spec: Pools, first_page: int) -> None:
    """Raise ValueError unless the rows fit these pools, by name, shape and dtype, and are finite.

    What they say is trusted beyond that: take parcels from your own engines only.
    """
    have, leaves, length = paths(pools), paths(spec), len(parcel.tokens)
    if not isinstance(parcel.rows, Mapping) or parcel.rows.keys() != have.keys():
        raise ValueError("the state's rows do not name the pools of this engine, each once")
    pages = -(-length // pools.page_tokens)
    for name, pool in have.items():
        leaf, rows = leaves[name], parcel.rows[name]
        count = {
            "history": length * leaf.unit // pools.page_tokens,
            "window": (pages - first_page) * leaf.unit,
            "slots": min(length, leaf.unit - leaf.slack),
        }[leaf.group]
        wanted = (torch.Size((count, pool.shape[1])), pool.dtype)
        given = (rows.shape, rows.dtype) if isinstance(rows, Tensor) else type(rows).__name__
        if given != wanted:
            raise ValueError(f"the state's rows of {name} are {given}; they must be {wanted}")
        if not torch.isfinite(rows).all():
            raise ValueError(f"the state's rows of {name} are not all finite numbers")


def export(pools: Pools, spec: Pools, held: Held, first_page: int) -> dict[str, Tensor]:
    """The rows of a sequence, copied out of the pools; its window from page `first_page` on."""
    return {name: pool[rows] for name, pool, rows in _live(spec, pools, held, first_page)}


def put(pools: Pools, spec: Pools, held: Held, parcel: Parcel) -> None:
    """Write a parcel into the pages and the slot of a sequence of the same length."""
    assert held.length == len(parcel.tokens), "a parcel is put into a sequence of another length"
    for name, pool, rows in _live(spec, pools, held, held.window_start):
        pool[rows] = parcel.rows[name].to(pool)


def copy(pools: Pools, spec: Pools, copies: Copies) -> None:
    """Copy whole pages and slots, as a fork asks."""
    leaves = paths(spec)
    for name, pool in paths(pools).items():
        leaf: PoolLeaf = leaves[name]
        for source, target in getattr(copies, leaf.group):
            to, from_ = target * leaf.unit, source * leaf.unit
            pool[to : to + leaf.unit] = pool[from_ : from_ + leaf.unit]


def unit_bytes(pools: Pools, spec: Pools) -> dict[tuple[str, str], int]:
    """Bytes of one page or slot of all layers, by group and cache kind."""
    out: dict[tuple[str, str], int] = {}
    leaves = paths(spec)
    for name, pool in paths(pools).items():
        leaf: PoolLeaf = leaves[name]
        key = (leaf.group, leaf.kind)
        out[key] = out.get(key, 0) + leaf.unit * pool.shape[1] * pool.element_size()
    return out


def held_bytes(pools: Pools, spec: Pools, held: Held) -> dict[str, int]:
    """Bytes of the pages and the slot that a sequence holds, by cache kind."""
    counts = {"history": len(held.history), "window": len(held.window), "slots": 1}
    units = unit_bytes(pools, spec)
    return {kind: counts[group] * size for (group, kind), size in units.items()}


def _live(
    spec: Pools, pools: Pools, held: Held, first_page: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every pool with the rows that hold valid state of the sequence, in order of positions."""
    leaves, n = paths(spec), pools.page_tokens
    # The dtype is that of indices even where there is none.
    history = torch.tensor(held.history, dtype=torch.long)
    window = torch.tensor(held.window, dtype=torch.long)
    for name, pool in paths(pools).items():
        leaf: PoolLeaf = leaves[name]
        if leaf.group == "history":
            entry = torch.arange(held.length * leaf.unit // n)
            rows = history[entry // leaf.unit] * leaf.unit + entry % leaf.unit
        elif leaf.group == "window":
            start = held.window_start
            pages = window[first_page - start : -(-held.length // n) - start]
            rows = (pages[:, None] * leaf.unit + torch.arange(leaf.unit)).flatten()
        else:
            first = max(held.length - (leaf.unit - leaf.slack), 0)
            rows = held.slot * leaf.unit + torch.arange(first, held.length) % leaf.unit
        yield name, pool, rows.to(pool.device)
