"""What one step must do at least: bytes that move and floating-point operations. Spec section 17.

A step reads each weight it uses once, of the routed experts only those that are chosen, and of each
sequence's caches what attention and the indexer look at. Operations are those of matrix products;
norms, softmax, rotations and the compressors' pooling are not counted. Nothing is counted that a
perfect program could leave out: the indexer works only where more entries are visible than are
kept, and logits are those of each sequence's last token.
"""

from collections.abc import Iterator

import torch

from dsv4 import table
from dsv4.config import Config, Kind, LayerPlan
from dsv4.table import Leaf
from dsv4.tree import paths
from tests.bench.case import Case

WIDE_BYTES = 4


def entries_seen(plan: LayerPlan, position: int) -> int:
    """Compressed entries visible to the token at a position."""
    return (position + 1) // plan.rate if plan.rate else 0


def scored(cfg: Config, plan: LayerPlan, position: int) -> int:
    """Entries the indexer must score: all that are visible, if they are more than it keeps."""
    seen = entries_seen(plan, position) if plan.kind is Kind.CSA else 0
    return seen if seen > cfg.index_topk else 0


def attended(cfg: Config, plan: LayerPlan, position: int) -> int:
    """Keys one token attends to: its window, and the entries it sees or keeps."""
    seen = entries_seen(plan, position)
    return min(cfg.window, position + 1) + (
        min(cfg.index_topk, seen) if plan.kind is Kind.CSA else seen
    )


def touched(cfg: Config, tokens: int) -> float:
    """Experts of one layer that `tokens` tokens choose, if they choose evenly."""
    return cfg.experts * (1 - (1 - cfg.topk / cfg.experts) ** tokens)


def _layer(path: str) -> int | None:
    """Which backbone layer a leaf belongs to."""
    head, *rest = path.split(".")
    return int(rest[0]) if head == "layers" else None


def _is_routed(path: str) -> bool:
    return ".ffn.w" in path


def _only_scores(path: str) -> bool:
    """Leaves that are used for scoring only: the indexer's keys are made in any case."""
    return ".indexer.wq_b" in path or ".indexer.weights_proj" in path


def _leaves(cfg: Config) -> Iterator[tuple[str, Leaf]]:
    for path, leaf in paths(table.spec(cfg)).items():
        if not path.startswith("mtp."):
            yield path, leaf


def _stored_bytes(leaf: Leaf, dtype: torch.dtype, held: bool) -> int:
    """Bytes of one element, as this program holds it or as the checkpoint stores it."""
    if held or leaf.role == "int32":
        return leaf.dtype(dtype).itemsize
    return WIDE_BYTES if leaf.stored == "f32" else dtype.itemsize


def weight_bytes(cfg: Config, case: Case, dtype: torch.dtype, *, held: bool) -> float:
    """Bytes of weights a step reads, the chosen experts' once.

    `held`: in the dtypes our program keeps them in; else in those of the checkpoint.
    """
    tokens = case.step_tokens
    share = touched(cfg, tokens) / cfg.experts
    total = 0.0
    for path, leaf in _leaves(cfg):
        size = _stored_bytes(leaf, dtype, held)
        layer = _layer(path)
        if path == "embed" or path.endswith("tid2eid"):
            total += tokens * leaf.shape[1] * size
        elif _only_scores(path) and layer is not None and not _scores(cfg, layer, case):
            continue
        else:
            total += leaf.count * size * (share if _is_routed(path) else 1)
    return total


def _scores(cfg: Config, layer: int, case: Case) -> bool:
    last = case.tokens if case.decode else case.tokens - 1
    return scored(cfg, cfg.plans[layer], last) > 0


def cache_bytes(cfg: Config, case: Case, dtype: torch.dtype) -> float:
    """Bytes of caches a decode step moves, read and written; prompts are not bound by them."""
    assert case.decode, "only decode steps are bound by what they read"
    c, j = cfg.head_dim, cfg.index_dim
    total = 0.0
    for plan in cfg.plans:
        total += (attended(cfg, plan, case.tokens) + 1) * c * dtype.itemsize
        widths = () if not plan.rate else (c, j) if plan.kind is Kind.CSA else (c,)
        total += scored(cfg, plan, case.tokens) * j * dtype.itemsize
        for width in widths:
            raw = 2 * plan.overlap * width * WIDE_BYTES  # one token's (k | g)
            # Each token writes its own; once in `rate` steps a group reads overlap * rate of them
            # and writes an entry.
            total += raw + plan.overlap * raw + width * dtype.itemsize / plan.rate
    return case.batch * total


def step_bytes(cfg: Config, case: Case, dtype: torch.dtype, *, held: bool = False) -> float:
    """Bytes a decode step must move."""
    return weight_bytes(cfg, case, dtype, held=held) + cache_bytes(cfg, case, dtype)


def linear_flops(cfg: Config, position: int) -> float:
    """Operations with weights for one token, logits excluded."""
    total = 0.0
    for path, leaf in _leaves(cfg):
        layer = _layer(path)
        if layer is None or len(leaf.shape) < 2 or leaf.role == "int32" or path.endswith(".ape"):
            continue
        if _only_scores(path) and not scored(cfg, cfg.plans[layer], position):
            continue
        total += 2 * leaf.count * (cfg.topk / cfg.experts if _is_routed(path) else 1)
    return total


def stream_flops(cfg: Config) -> float:
    """Operations that mix the residual streams of one token: collapse and expand, twice a layer."""
    m, d = cfg.streams, cfg.dim
    return cfg.layers * 2 * (2 * m * d + 2 * m * m * d)


def attention_flops(cfg: Config, position: int) -> float:
    """Operations of one token's attention and indexer scores."""
    total = 0.0
    for plan in cfg.plans:
        total += 4 * cfg.heads * cfg.head_dim * attended(cfg, plan, position)
        total += 2 * cfg.index_heads * (cfg.index_dim + 1) * scored(cfg, plan, position)
    return total


def logits_flops(cfg: Config) -> float:
    """Operations from the streams of one token to its logits."""
    m, d = cfg.streams, cfg.dim
    return 2 * m * m * d + 2 * m * d + 2 * cfg.vocab * d


def step_flops(cfg: Config, case: Case) -> float:
    """Operations of one step."""
    first, last = (case.tokens, case.tokens + 1) if case.decode else (0, case.tokens)
    each = sum(
        linear_flops(cfg, position) + stream_flops(cfg) + attention_flops(cfg, position)
        for position in range(first, last)
    )
    return case.batch * (each + logits_flops(cfg))
