"""Manifold-constrained hyper-connections: M residual streams around each sublayer. Spec section 4.

    streams [T, M, D] --- pre ---> collapse [T, D] -> norm -> sublayer -> y [T, D]
        |                                                                    |
        +--- comb (sum over its FIRST index) ---> (+) <------- post ---------+

All of it is wide, with one rounding at the end of `collapse` and of `expand`.
"""

import torch
from torch import Tensor

from dsv4.config import Config
from dsv4.norm import wide
from dsv4.params import Hyper, HyperHead


def _scores(h_TMD: Tensor, fn: Tensor, eps: float) -> Tensor:
    # The statistic spans all M * D values, stream-major.
    x = wide(h_TMD).flatten(-2)
    return (x @ fn.t()) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def sinkhorn(logits_TMM: Tensor, iterations: int, eps: float) -> Tensor:
    """Softmax over the last dim, then alternating column and row normalisation, columns first."""
    comb = torch.softmax(logits_TMM, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def mix(p: Hyper, h_TMD: Tensor, cfg: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients pre [T, M], post [T, M] and comb [T, M, M] of one sublayer."""
    n = cfg.streams
    m = _scores(h_TMD, p.fn, cfg.norm_eps)
    pre = torch.sigmoid(m[:, :n] * p.scale[0] + p.base[:n]) + cfg.hc_eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * p.scale[1] + p.base[n : 2 * n])
    logits = (m[:, 2 * n :] * p.scale[2] + p.base[2 * n :]).unflatten(-1, (n, n))
    return pre, post, sinkhorn(logits, cfg.sinkhorn, cfg.hc_eps)


def collapse(h_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Weighted sum of the streams. [T, D]"""
    return torch.einsum("tm,tmd->td", pre_TM, wide(h_TMD)).to(h_TMD.dtype)


def expand(y_TD: Tensor, h_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    """New streams: h'_j = post_j y + sum_i comb[i, j] h_i. [T, M, D]"""
    mixed = torch.einsum("tij,tid->tjd", comb_TMM, wide(h_TMD))
    return (post_TM[..., None] * wide(y_TD)[:, None] + mixed).to(h_TMD.dtype)


def head(p: HyperHead, h_TMD: Tensor, cfg: Config) -> Tensor:
    """Final collapse. [T, D]"""
    pre = torch.sigmoid(_scores(h_TMD, p.fn, cfg.norm_eps) * p.scale + p.base) + cfg.hc_eps
    return collapse(h_TMD, pre)
