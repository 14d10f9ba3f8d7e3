"""The caches of one model, as pools addressed by absolute position. Spec sections 10.2 and 15.

Two content-addressed groups of pages and one group of rings:
- history pages: compressed entries and indexer keys, one row per `rate` tokens, kept for good;
- window pages: window keys, one row per token, plus a header with the overlap rows (the A halves of
  the page's last CSA group) and the streams of the page's last token (which the draft module joins
  with the first token after it), so that a page boundary is a complete place to resume from;
- rings, one slot per running sequence: the raw inputs (k, g) of groups that are still open, found
  by position modulo the ring.
Page 0 and slot 0 belong to padding and stay zero.

All pools are flat [rows, width], the form a paged write wants on every backend.
"""

import dataclasses
import math
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dsv4.config import Config, Kind, LayerPlan
from dsv4.mesh import P
from dsv4.norm import wide_dtype
from dsv4.tree import leaves, node, static, tmap


@node
class Entries:
    """One compressor's cache."""

    rows: Tensor  # [history pages * page_tokens / r, C]
    ring: Tensor  # [slots * ring, 2 * c * C], wide: (k | g) of each token, ape included in g
    header: Tensor | None  # [window pages * r, 2 * C], wide: (A k | A g); with overlap only


@node
class LayerPool:
    """One layer's caches."""

    window: Tensor  # [window pages * page_tokens, C]
    compressed: Entries | None
    keys: Entries | None  # the indexer's, width J


@node
class Pools:
    """All caches of a model."""

    layers: tuple[LayerPool, ...]
    mtp: LayerPool | None
    streams: Tensor | None  # [window pages, M * D] of each page's last token; with mtp only
    # The numbers of pages and slots are those of the tensors: a program serves any of them.
    page_tokens: int = static()
    drafts: int = static()  # rows of a ring for tokens that may be rejected


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """How much to allocate. Counts include page 0 and slot 0."""

    history_pages: int
    window_pages: int
    slots: int
    page_tokens: int = 128
    drafts: int = 0  # tokens that may be written and then rejected

    def check(self, cfg: Config) -> None:
        """Raise ValueError for sizes that cannot hold anything or do not fit the rates."""
        if self.page_tokens < 1 or self.page_tokens % cfg.page_tokens:
            raise ValueError(
                f"page_tokens is {self.page_tokens}; it must be a multiple of {cfg.page_tokens} "
                f"(the least common multiple of the compression rates {cfg.rates})"
            )
        for name in ("history_pages", "window_pages", "slots"):
            if getattr(self, name) < 2:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; at least 2 are needed, the first is padding"
                )
        if self.drafts < 0:
            raise ValueError(f"drafts is {self.drafts}; it must be at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolLeaf:
    """One pool, declared: a leaf of the pool spec tree."""

    shape: tuple[int, ...]
    axes: P
    kind: str  # for reports: window, compressed, index keys, open inputs, overlap, draft streams
    group: str  # whose indices address it: history, window or slots
    unit: int  # rows of one page or slot
    slack: int = 0  # of these, rows for drafts that may be rejected
    wide: bool = False

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """The dtype of this pool in a model of dtype `model`."""
        return wide_dtype(model) if self.wide else model


def ring_rows(plan: LayerPlan, drafts: int) -> int:
    """Ring rows of one slot: the open groups plus the drafts that may be rejected. Section 6.4."""
    return plan.overlap * plan.rate + drafts


# Which indices address the rows of each kind.
_GROUPS = MappingProxyType(
    {
        "window": "window",
        "overlap": "window",
        "draft streams": "window",
        "compressed": "history",
        "index keys": "history",
        "open inputs": "slots",
    }
)


def _leaf(
    sizes: PoolSizes, kind: str, unit: int, width: int, *, slack: int = 0, wide: bool = False
) -> Any:
    # Any, not PoolLeaf: the spec tree has the pool tree's types.
    group = _GROUPS[kind]
    counts = {
        "history": sizes.history_pages,
        "window": sizes.window_pages,
        "slots": sizes.slots,
    }
    return PoolLeaf(
        shape=(counts[group] * unit, width),
        axes=P("seqs", None),
        kind=kind,
        group=group,
        unit=unit,
        slack=slack,
        wide=wide,
    )


def _entries(plan: LayerPlan, width: int, sizes: PoolSizes, kind: str) -> Entries:
    c, r = plan.overlap, plan.rate
    ring, slack = ring_rows(plan, sizes.drafts), sizes.drafts
    return Entries(
        rows=_leaf(sizes, kind, sizes.page_tokens // r, width),
        ring=_leaf(sizes, "open inputs", ring, 2 * c * width, slack=slack, wide=True),
        header=_leaf(sizes, "overlap", r, 2 * width, wide=True) if c == 2 else None,
    )


def _layer_pool(cfg: Config, plan: LayerPlan, sizes: PoolSizes) -> LayerPool:
    indexed = plan.kind is Kind.CSA
    return LayerPool(
        window=_leaf(sizes, "window", sizes.page_tokens, cfg.head_dim),
        compressed=_entries(plan, cfg.head_dim, sizes, "compressed") if plan.rate else None,
        keys=_entries(plan, cfg.index_dim, sizes, "index keys") if indexed else None,
    )


def pool_spec(cfg: Config, sizes: PoolSizes) -> Pools:
    """The table of pools: a `Pools` tree whose leaves are `PoolLeaf`. Raises ValueError."""
    sizes.check(cfg)
    return Pools(
        layers=tuple(_layer_pool(cfg, plan, sizes) for plan in cfg.plans),
        mtp=_layer_pool(cfg, cfg.mtp_plan, sizes) if cfg.mtp else None,
        streams=_leaf(sizes, "draft streams", 1, cfg.streams * cfg.dim) if cfg.mtp else None,
        page_tokens=sizes.page_tokens,
        drafts=sizes.drafts,
    )


def init_pools(
    cfg: Config, sizes: PoolSizes, dtype: torch.dtype, device: torch.device | None = None
) -> Pools:
    """Zeroed pools for a model of dtype `dtype`."""
    return tmap(
        lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype(dtype), device=device),
        pool_spec(cfg, sizes),
    )


def pool_bytes(tree: Any, dtype: torch.dtype) -> int:
    """Bytes of a pool spec tree, or of any part of it."""
    return sum(math.prod(leaf.shape) * leaf.dtype(dtype).itemsize for leaf in leaves(tree))


def sequence_bytes(cfg: Config, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes one sequence of `tokens` needs, by cache kind, without paging. Spec section 15.4.

    Window keys and open inputs are counted at their full constant size.
    """
    wide = wide_dtype(dtype).itemsize
    total = {"compressed": 0, "index keys": 0, "window": 0, "open inputs": 0}
    plans = (*cfg.plans, *((cfg.mtp_plan,) if cfg.mtp else ()))
    for plan in plans:
        total["window"] += cfg.window * cfg.head_dim * dtype.itemsize
        if not plan.rate:
            continue
        entries, open_rows = tokens // plan.rate, ring_rows(plan, 0)
        total["compressed"] += entries * cfg.head_dim * dtype.itemsize
        total["open inputs"] += open_rows * 2 * plan.overlap * cfg.head_dim * wide
        if plan.kind is Kind.CSA:
            total["index keys"] += entries * cfg.index_dim * dtype.itemsize
            total["open inputs"] += open_rows * 2 * plan.overlap * cfg.index_dim * wide
    return total
