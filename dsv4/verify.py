"""Verification of drafted tokens, as pure functions of logits, drafts and a counter.

A step that verifies k drafts d_1 .. d_k after the last token t runs the backbone over all k + 1.
Row i of its logits belongs to the position of d_i, and the last row, the bonus, to the position
after d_k. Every row gets a token. The rows count as long as the token equals the draft
(`accepted`); the first that differs, or the bonus, is kept too, and the rows after it never were.

Two rules say what a draft and a row's token are. T is the target's distribution, D the draft's, and
"noise" that of a position, from the seed.

coupled   The draft is `sample.sample` of the draft module's logits, the token `sample.sample` of
          the target's, both with the SAME noise (stream 0). So the tokens are those of undrafted
          decoding with the same seed, one for one, at any depth, however well the module drafts.
          Likely equal: with probability sum_i 1 / sum_j max(T_j / T_i, D_j / D_i), which lies from
          (1 - v) / (1 + v) to 1 - v, v the total variation between T and D. At temperature 0 it is
          the comparison of two argmaxes.
ratio     The draft comes from `propose`, the token from `by_ratio`: the draft with probability
          min(1, T / D), else a draw from the normalised max(T - D, 0). Accepted with probability
          1 - v, the most any rule can reach; the tokens are distributed as T, but depend on where
          drafts stood.

Both are exact for any depth that is chosen from what came before: the token at a position uses the
words of this position alone, whose earlier drafts, rejected with a token before them, decided
nothing.

Letters: package docstring; rows Y are those whose logits are wanted.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4 import sample
from dsv4.sample import Draw


def propose(logits_YV: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """A draft per row of the draft module's logits, and what it was drawn from: [Y], [Y, V] wide.

    For the rule "ratio": drawn with stream 1. Rows with temperature 0 propose the largest logit.
    """
    x = sample.log_weights(logits_YV, draw)
    return _choose(x, draw, sample.DRAFTED), torch.softmax(x, dim=-1)


def by_ratio(logits_YV: Tensor, drafts_Y: Tensor, q_YV: Tensor, draw: Draw) -> Tensor:
    """The token of each row by the rule "ratio". [Y] int64

    `q_YV` is what the drafts were really drawn from. A draft of -1 says that none stands there
    (a bonus row, or one that was never drafted for): its q is not read, and its token is bit by bit
    that of `sample.sample` with stream 0.

    The token equals the draft if and only if the draft is accepted, which is when u * q(d) < p(d)
    with u from stream 2, below 1. A rejected one thus has p(d) <= q(d), and as a float difference
    has the sign of the true one, its weight in max(p - q, 0) is 0. Where that is 0 everywhere, by
    rounding alone, p without the draft stands in for it; where p allows nothing else, the draft is
    accepted. An entry with p = 0 is returned in no case.
    """
    x = sample.log_weights(logits_YV, draw)
    p = torch.softmax(x, dim=-1)
    q = q_YV.to(p.dtype)
    drafted, draft = (drafts_Y >= 0)[:, None], drafts_Y.clamp(min=0)[:, None]
    p_draft, q_draft = p.gather(-1, draft), q.gather(-1, draft)
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.amax(-1, keepdim=True) > 0, rest, p).scatter(-1, draft, 0)
    x = torch.where(drafted, rest.log(), x)
    other = _choose(x, draw, sample.TOKEN)[:, None]
    found = sample.words(draw.seed, draw.position, 1, sample.ACCEPTANCE)
    drawn = sample.uniform(found, p.dtype) * q_draft < p_draft
    only = x.gather(-1, other) == -torch.inf
    return torch.where(drafted & (drawn | only), draft, other)[:, 0]


def accepted(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """How many drafts count, given the token of each row: the bonus row has one, but no draft.

    `tokens[: accepted + 1]` are the new tokens, by either rule.
    """
    count = 0
    for token, draft in zip(tokens[:-1], drafts, strict=True):
        if token != draft:
            break
        count += 1
    return count


def _choose(log_weights_YV: Tensor, draw: Draw, stream: int) -> Tensor:
    return sample.choose(log_weights_YV, dataclasses.replace(draw, stream=stream))
