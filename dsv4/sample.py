"""Sampling from logits, as a pure function of logits, parameters and a counter.

Randomness is counter-based: the noise of vocabulary entry v in the token at absolute position p of
a request is a function of (seed, p, v) alone, so that what a request draws depends neither on the
batch it stands in nor on the steps that led there. A position that needs more than one independent
draw (`verify.py`) takes each from a stream of its own; `sample` alone uses stream 0.

    token = argmax over the kept entries of (logit / temperature + Gumbel(seed, p, v))

Letters: package docstring; n is the number of alternatives listed.
"""

import torch
from torch import Tensor

from dsv4.norm import wide
from dsv4.tree import node, static

# Streams of independent words at one position.
TOKEN = 0  # the token itself
DRAFTED = 1  # what a draft is drawn with, where it is not drawn as the token itself
ACCEPTANCE = 2  # whether a draft is accepted

_WORD = 0xFFFFFFFF
_ROUNDS = 10


@node
class Draw:
    """How each row of logits draws its token. A filter that no row uses is None."""

    temperature: Tensor  # [Y] wide; 0 is greedy
    seed: Tensor  # [Y] int64, at least 0
    position: Tensor  # [Y] int64, absolute position of the token that is drawn
    top_k: Tensor | None = None  # [Y] int64; 0 keeps all
    top_p: Tensor | None = None  # [Y] wide; 1 keeps all
    min_p: Tensor | None = None  # [Y] wide; 0 keeps all
    stream: int = static(default=TOKEN)


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, in int64 without overflow."""
    high, low = a * (b >> 16), a * (b & 0xFFFF)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four random words from four counter words and two key words.

    Words are int64 tensors of values below 2^32 and broadcast against each other. Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", 2011; equal to Random123's test vectors.
    """
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _multiply(a, 0xD2511F53), _multiply(c, 0xCD9E8D57)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return a, b, c, d


def words(seed_Y: Tensor, position_Y: Tensor, vocab: int, stream: int = TOKEN) -> Tensor:
    """One random word below 2^32 per row and vocabulary entry, int64. [Y, V]

    Entry v is word v % 4 of the counter (v // 4, low and high word of the position, stream).
    """
    group = torch.arange(-(-vocab // 4), device=seed_Y.device)
    seed, pos = seed_Y[:, None], position_Y[:, None]
    counter = (group, pos & _WORD, pos >> 32, torch.full_like(pos, stream))
    out = torch.stack(philox(counter, (seed & _WORD, seed >> 32)), dim=-1)
    return out.flatten(-2)[:, :vocab]


def uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform numbers from random words, in `dtype`: above 0, below 1, fine near 0."""
    return ((words.to(dtype) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise from random words, in `dtype`: finite, from -4 to 23."""
    # -log1p(-u) with u from the low end keeps small values, the large noise, at full precision.
    return -torch.log(-torch.log1p(-uniform(words, dtype)))


def kept(sorted_YV: Tensor, draw: Draw) -> Tensor:
    """Which entries of each row, sorted descending by tempered logit, may be drawn. [Y, V]

    top_k: the k largest. top_p: the smallest set, among those, whose mass reaches p. min_p:
    entries at least min_p times as probable as the largest. Equal logits are taken by ascending
    index, so exactly k and exactly the smallest set are kept. At least one entry always is.
    """
    rank = torch.arange(sorted_YV.shape[-1], device=sorted_YV.device)
    keep = (rank >= 0).expand_as(sorted_YV)
    if draw.top_k is not None:
        keep = (rank < draw.top_k[:, None]) | (draw.top_k == 0)[:, None]
    if draw.top_p is not None:
        p = torch.softmax(torch.where(keep, sorted_YV, -torch.inf), dim=-1)
        before = p.cumsum(-1) - p
        keep = keep & ((before < draw.top_p[:, None]) | (draw.top_p >= 1)[:, None])
    if draw.min_p is not None:
        keep = keep & (sorted_YV >= sorted_YV[:, :1] + draw.min_p.log()[:, None])
    return keep | (rank == 0)


def log_weights(logits_YV: Tensor, draw: Draw) -> Tensor:
    """What each row may draw, as unnormalised log-probabilities. [Y, V] wide

    Temperature first, then the filters. The likeliest entry has 0, what may not be drawn -inf.
    Rows with temperature 0 may only draw the largest logit, the lowest index among equals.
    """
    x = wide(logits_YV)
    cold = (draw.temperature <= 0)[:, None]
    # Against the largest logit, and below infinity, so that no temperature overflows.
    x = x - x.max(-1, keepdim=True).values
    most = torch.finfo(draw.temperature.dtype).max
    x = x / torch.where(cold, 1, draw.temperature.clamp(max=most)[:, None])
    if draw.top_k is not None or draw.top_p is not None or draw.min_p is not None:
        ordered = torch.sort(x, dim=-1, descending=True, stable=True)
        left = torch.where(kept(ordered.values, draw), ordered.values, -torch.inf)
        x = left.scatter(-1, ordered.indices, left)
    other = torch.arange(x.shape[-1], device=x.device) != greedy(logits_YV)[:, None]
    return torch.where(cold & other, -torch.inf, x)


def choose(log_weights_YV: Tensor, draw: Draw) -> Tensor:
    """One entry per row, drawn in proportion to the weights: Gumbel-max. [Y] int64"""
    found = words(draw.seed, draw.position, log_weights_YV.shape[-1], draw.stream)
    return (log_weights_YV + gumbel(found, log_weights_YV.dtype)).argmax(-1)


def sample(logits_YV: Tensor, draw: Draw) -> Tensor:
    """One token per row. [Y] int64

    Rows with temperature 0 take the largest logit, the lowest index among equals; so do rows with
    top_k = 1.
    """
    return choose(log_weights(logits_YV, draw), draw)


def probabilities(logits_YV: Tensor, draw: Draw) -> Tensor:
    """The distribution that `sample` draws from, exactly 0 where it never draws. [Y, V] wide"""
    return torch.softmax(log_weights(logits_YV, draw), dim=-1)


def greedy(logits_YV: Tensor) -> Tensor:
    """The largest logit of each row, the lowest index among equals. [Y] int64"""
    return logits_YV.argmax(-1)


def logprobs(logits_YV: Tensor, tokens_Y: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the model itself: no temperature, no filter; wide.

    Of the given tokens [Y], and of the n likeliest entries with their ids, both [Y, n].
    """
    logs = torch.log_softmax(wide(logits_YV), dim=-1)
    top = logs.topk(n, dim=-1)
    return logs.gather(-1, tokens_Y[:, None])[:, 0], top.values, top.indices
