"""The replaceable operators, as one record. The plain torch versions here are the meaning.

A backend may bring another lowering of the same meaning (in-place writes into donated pools, sorted
expert segments, fused device kernels); a test holds each pair together.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.norm import rms, wide


def write_rows(pool_NC: Tensor, rows_T: Tensor, values_TC: Tensor) -> Tensor:
    """`pool_NC` with `values_TC` at rows `rows_T`. Row 0 may repeat, with zero values only."""
    return pool_NC.index_put((rows_T,), values_TC)


def read_rows(pool_NC: Tensor, rows: Tensor) -> Tensor:
    """The rows of a pool at any shape of row numbers: rows.shape + [C]."""
    return pool_NC[rows]


def pick(scores_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores of each row, ascending; ties go to the lower index. [T, k]

    Exact under any chunking: the choice depends on the row alone, not on the order of a sort.
    A row with NaN chooses nothing sensible, but indices that exist: it must not fail its batch.
    """
    kth = scores_TE.topk(k, dim=-1).values[..., -1:]
    above, equal = scores_TE > kth, scores_TE == kth
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    count = scores_TE.shape[-1]
    order = torch.arange(count, 0, -1, device=scores_TE.device)
    index = count - torch.where(chosen, order, 0).topk(k, dim=-1).values
    return index.clamp(max=count - 1)


def activate(g: Tensor, u: Tensor, limit: float) -> Tensor:
    """Clamped SwiGLU in the wide dtype: the gate is clamped from above only. Spec section 9."""
    return F.silu(wide(g).clamp(max=limit)) * wide(u).clamp(-limit, limit)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Arguments of `experts` that are weights: w1 and w3 [L, F, D], w2 [L, D, F], and the clamp."""

    w1: Tensor
    w3: Tensor
    w2: Tensor
    limit: float


def experts(x_TD: Tensor, weights_TK: Tensor, slots_TK: Tensor, w: Experts) -> Tensor:
    """Routed experts: sum over k of expert slots[t, k] with weight weights[t, k]. [T, D] wide.

    The weight multiplies the activation before w2; the sum over experts is wide. Spec section 9.
    Few rows gather their experts' weights; many rows go through every expert, weighted 0 where
    not chosen.
    """
    num_slots = w.w1.shape[0]
    if slots_TK.numel() < num_slots:
        g = torch.einsum("td,tkfd->tkf", x_TD, w.w1[slots_TK])
        u = torch.einsum("td,tkfd->tkf", x_TD, w.w3[slots_TK])
        a = (weights_TK[..., None] * activate(g, u, w.limit)).to(x_TD.dtype)
        return wide(torch.einsum("tkf,tkdf->tkd", a, w.w2[slots_TK])).sum(1)
    weights_TL = weights_TK.new_zeros(*weights_TK.shape[:-1], num_slots)
    weights_TL = weights_TL.scatter_add(-1, slots_TK, weights_TK)
    g = torch.einsum("td,lfd->ltf", x_TD, w.w1)
    u = torch.einsum("td,lfd->ltf", x_TD, w.w3)
    a = (weights_TL.t()[..., None] * activate(g, u, w.limit)).to(x_TD.dtype)
    return wide(torch.einsum("ltf,ldf->ltd", a, w.w2)).sum(0)


@dataclasses.dataclass(frozen=True)
class Ops:
    """One lowering of each replaceable operator."""

    write_rows: Callable[[Tensor, Tensor, Tensor], Tensor] = write_rows
    read_rows: Callable[[Tensor, Tensor], Tensor] = read_rows
    rms: Callable[[Tensor, Tensor | None, float], Tensor] = rms
    activate: Callable[[Tensor, Tensor, float], Tensor] = activate
    pick: Callable[[Tensor, int], Tensor] = pick
    experts: Callable[[Tensor, Tensor, Tensor, Experts], Tensor] = experts


PLAIN = Ops()
