"""From logits to the tokens that hold: sampling, verification of drafts, log-probabilities."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4 import sample, verify
from dsv4.sample import Draw
from runtime.plan import Work
from runtime.request import Logprobs, Sampled, Sampling


def draw_of(asked: Sequence[Sampling], positions: Sequence[int], like: Tensor) -> Draw:
    """The parameters of each row of logits; filters that no row uses are left out."""

    def column(values: Sequence[int | float]) -> Tensor:
        kind = torch.int64 if isinstance(values[0], int) else like.dtype
        return torch.tensor(values, dtype=kind, device=like.device)

    return Draw(
        temperature=column([float(s.temperature) for s in asked]),
        seed=column([s.seed for s in asked]),
        position=column(positions),
        top_k=column([s.top_k for s in asked]) if any(s.top_k for s in asked) else None,
        top_p=column([float(s.top_p) for s in asked]) if any(s.top_p < 1 for s in asked) else None,
        min_p=column([float(s.min_p) for s in asked]) if any(s.min_p for s in asked) else None,
    )


def tokens(logits_YV: Tensor, work: Sequence[Work]) -> list[list[Sampled]]:
    """Per work the new tokens that hold: accepted drafts and one more; none inside a prompt.

    Row y belongs to the position behind its token. A row after the first that differs from its
    draft was computed from a token that does not stand, and is dropped.
    """
    found = _rows(logits_YV, work)
    ids = found.tolist()
    finite = torch.isfinite(logits_YV.amax(-1)).tolist()
    first, kept, rows = 0, [], []
    for w in work:
        n = verify.accepted(ids[first : first + w.wanted], w.drafts) + 1 if w.wanted else 0
        kept.append([Sampled(ids[y], None, finite[y]) for y in range(first, first + n)])
        if w.logprobs is not None:
            rows += range(first, first + n)
        first += w.wanted
    if rows:
        _score(logits_YV[rows], work, kept)
    return kept


def _rows(logits_YV: Tensor, work: Sequence[Work]) -> Tensor:
    """The token of every row, whether it will hold or not. [Y]"""
    if all(w.sampling.temperature == 0 for w in work if w.wanted):
        return sample.greedy(logits_YV)
    asked = [w.sampling for w in work for _ in range(w.wanted)]
    positions = [w.start + len(w.tokens) + i for w in work for i in range(w.wanted)]
    draw = draw_of(asked, positions, logits_YV)
    if all(w.q is None for w in work):
        return sample.sample(logits_YV, draw)
    q, drafts, first = torch.zeros_like(logits_YV), [], 0
    for w in work:
        drafts += (*w.drafts, -1)[: w.wanted]
        if w.q is not None:
            q[first : first + len(w.drafts)] = w.q
        first += w.wanted
    return verify.by_ratio(logits_YV, torch.tensor(drafts, device=q.device), q, draw)


def _score(logits_YV: Tensor, work: Sequence[Work], kept: list[list[Sampled]]) -> None:
    """Put the model's own log-probabilities beside the tokens of works that ask for them."""
    asked = [i for i, w in enumerate(work) if w.logprobs is not None]
    ids = torch.tensor([s.token for i in asked for s in kept[i]], device=logits_YV.device)
    most = max(w.logprobs for w in work if w.logprobs is not None)
    own, top, index = (x.tolist() for x in sample.logprobs(logits_YV, ids, most))
    y = 0
    for i in asked:
        n = work[i].logprobs
        for j, s in enumerate(kept[i]):
            best = tuple(zip(index[y], top[y], strict=True))[:n]
            kept[i][j] = Sampled(s.token, Logprobs(own[y], best), s.finite)
            y += 1
