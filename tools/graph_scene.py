"""A step of one bucket on meta tensors: shapes and dtypes only, so any preset fits any machine."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from dsv4 import model, mtp, table, tree
from dsv4.batch import Batch
from dsv4.config import Config
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools, PoolSizes, pool_spec
from runtime.assemble import Row, Shape, assemble

META = torch.device("meta")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """The sizes of a step's tensors. Chunks of prompts are attended in blocks of `block` tokens."""

    tokens: int  # T
    seqs: int  # without the padding row
    context: int  # positions that a sequence's table can address
    block: int = 16

    @property
    def chunk(self) -> int:
        """Tokens of the one chunk; the other sequences have one token, and one token is padding."""
        return max(1, self.tokens - self.seqs)

    def shape(self, cfg: Config) -> Shape:
        """Every size of the step's tensors."""
        return Shape(
            tokens=self.tokens,
            seqs=self.seqs + 1,
            wanted=self.seqs,
            blocks=self.tokens // self.block + self.seqs + 2,
            closes=tuple(self.tokens // rate + self.seqs for rate in cfg.rates),
            history=-(-self.context // cfg.page_tokens),
            window=self.window(cfg),
        )

    def window(self, cfg: Config) -> int:
        """Window pages of a sequence."""
        return -(-(self.chunk + cfg.window) // cfg.page_tokens) + 1


DECODE = Bucket(tokens=4, seqs=4, context=8192, block=1)
MIXED = Bucket(tokens=192, seqs=4, context=8192)
BUCKETS = MappingProxyType({"decode": DECODE, "mixed": MIXED})


def sized(bucket: Bucket, changes: dict[str, int]) -> Bucket:
    """The bucket with other sizes. Raises ValueError for sizes that no step can have."""
    new = dataclasses.replace(bucket, **changes)
    if not 1 <= new.seqs <= new.tokens:
        raise ValueError(f"{new.seqs} sequences in {new.tokens} tokens; each has at least one")
    if new.context <= new.tokens:
        raise ValueError(f"context is {new.context}; it must be more than the {new.tokens} tokens")
    if new.block == 1 and new.tokens != new.seqs:
        raise ValueError(f"a decode step of {new.seqs} sequences has as many tokens")
    return new


@dataclasses.dataclass(frozen=True)
class Scene:
    """A step about to happen."""

    params: Params
    pools: Pools
    batch: Batch
    hidden: torch.Tensor | None  # the draft's input


def cut(cfg: Config, layers: int) -> Config:
    """The first layer of each plan, then others in order, `layers` in all; no draft module.

    Raises ValueError for more layers than there are, or fewer than plans.
    """
    plans = cfg.plans
    first = [i for i, plan in enumerate(plans) if plan not in plans[:i]]
    if not len(first) <= layers <= len(plans):
        raise ValueError(f"{layers} layers; this model can be cut to {len(first)} to {len(plans)}")
    rest = [i for i in range(len(plans)) if i not in first]
    kept = sorted(first + rest[: layers - len(first)])
    kinds = tuple(cfg.kinds[i] for i in kept)
    hashed = tuple(cfg.hash_layers[i] for i in kept)
    return dataclasses.replace(cfg, kinds=kinds, hash_layers=hashed, mtp=0)


def sizes(cfg: Config, bucket: Bucket) -> PoolSizes:
    """Pools that hold every sequence of the bucket at its longest."""
    shape = bucket.shape(cfg)
    assert shape.history is not None
    return PoolSizes(
        history_pages=1 + bucket.seqs * shape.history,
        window_pages=1 + bucket.seqs * bucket.window(cfg),
        slots=1 + bucket.seqs,
        page_tokens=cfg.page_tokens,
    )


def batch(cfg: Config, bucket: Bucket) -> Batch:
    """A step that a scheduler could have made, padded to the bucket. On CPU."""
    page, columns, shape = cfg.page_tokens, bucket.window(cfg), bucket.shape(cfg)
    assert shape.history is not None
    counts = [bucket.chunk, *[1] * (bucket.seqs - 1 - (bucket.chunk == 1))]
    rows = []
    for i, count in enumerate(counts):
        start = min(5 * page + 3 + i, bucket.context - count)
        pages = -(-(start + count) // page)
        held = min(pages, columns)
        rows.append(
            Row(
                tokens=[1 + (start + j) % (cfg.vocab - 1) for j in range(count)],
                start=start,
                slot=i + 1,
                history_pages=[1 + i * shape.history + j for j in range(pages)],
                window_pages=[1 + i * columns + j for j in range(held)],
                window_start=pages - held,
            )
        )
    return assemble(rows, cfg, page_tokens=page, block=bucket.block, shape=shape)


def scene(cfg: Config, bucket: Bucket, dtype: torch.dtype = torch.bfloat16) -> Scene:
    """Parameters, pools and batch on meta. Raises ValueError where the bucket is too small."""

    def empty(leaf: Any) -> torch.Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype(dtype), device=META)

    hidden = torch.empty((bucket.tokens, cfg.streams, cfg.dim), dtype=dtype, device=META)
    return Scene(
        tree.tmap(empty, table.spec(cfg)),
        tree.tmap(empty, pool_spec(cfg, sizes(cfg, bucket))),
        tree.tmap(lambda t: t.to(META), batch(cfg, bucket)),
        hidden if cfg.mtp else None,
    )


def step(scene: Scene, ctx: Ctx, *, draft: bool = False) -> tuple[Callable[..., Any], tuple]:
    """The function to capture and its arguments: the backbone's step, or the draft module's.

    Raises ValueError for the draft of a model without its draft module.
    """
    if not draft:
        return (lambda p, pools, b: model.step(p, pools, b, ctx)), (
            scene.params, scene.pools, scene.batch,
        )  # fmt: skip
    if scene.hidden is None:
        raise ValueError("this model has no draft module; leave out --draft")
    return (lambda p, pools, h, b: mtp.draft(p, pools, h, b, ctx)), (
        scene.params, scene.pools, scene.hidden, scene.batch,
    )  # fmt: skip
