"""The replaceable operators, as one record. The plain torch versions here are the meaning.

A backend may bring another lowering of the same meaning (in-place writes into donated pools, sorted
expert segments, fused device kernels); a test holds each pair together.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4 import mhc
from dsv4.config import Config
from dsv4.norm import rms, wide
from dsv4.params import Hyper
from dsv4.rope import rotate

_HEADS_AT_ONCE = 8  # bounds the [Z * heads, E] index scores held at a time


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


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x [.., K] with w [N, K] to [.., N]; grouped: x [.., G, K] with w [G, N, K] to [.., G, N]."""
    return F.linear(x, w) if w.dim() == 2 else torch.einsum("...gi,goi->...go", x, w)


def linear_wide(x: Tensor, w: Tensor) -> Tensor:
    """As `linear`, multiplied and summed in the wide dtype, with a wide result. Spec 10.5."""
    return linear(wide(x), wide(w))


@dataclasses.dataclass(frozen=True)
class Keys:
    """Rows of a pool that queries in blocks [U, Z] may attend to, and which of them see which.

    The rows are shared by a block [U, S], or each query has its own [U, Z, S].
    """

    pool_NC: Tensor
    rows: Tensor
    visible_UZS: Tensor


def attend(
    q_THC: Tensor, near: Keys, far: Keys | None, sink_H: Tensor, spots: tuple[Tensor, Tensor]
) -> Tensor:
    """One softmax with a sink over the visible keys, which are the values too. [T, H, C]

    `spots`: the token whose query stands at each place of the blocks [U, Z], and where each token
    takes its result [T] (`Batch.blocks` and `place`). Logits, softmax, sink and sums are wide; the
    sink takes part in the denominator only, unscaled. Spec section 5.
    """
    sources = (near,) if far is None else (near, far)
    rows = tuple(read_rows(k.pool_NC, k.rows) for k in sources)
    return attend_rows(q_THC, rows, tuple(k.visible_UZS for k in sources), sink_H, spots)


def attend_rows(
    q_THC: Tensor,
    keys: tuple[Tensor, ...],
    visible: tuple[Tensor, ...],
    sink_H: Tensor,
    spots: tuple[Tensor, Tensor],
) -> Tensor:
    """As `attend`, of rows that were read: keys [U, S, C] or [U, Z, S, C] near and, if any, far."""
    blocks, place = spots
    heads, width = q_THC.shape[1:]
    q = wide(q_THC[blocks]) * width**-0.5  # [U, Z, H, C]
    rows = [wide(k) for k in keys]
    parts = [_logits(q, r, seen) for r, seen in zip(rows, visible, strict=True)]
    logits = torch.cat(parts, dim=-1)  # [U, Z, H, S + E]
    sink = sink_H[:, None]
    top = torch.maximum(logits.max(-1, keepdim=True).values, sink)
    e = torch.exp(logits - top)
    e = e / (e.sum(-1, keepdim=True) + torch.exp(sink - top))
    o = _values(e[..., : rows[0].shape[-2]], rows[0])
    if len(rows) > 1:
        o = o + _values(e[..., rows[0].shape[-2] :], rows[1])
    return o.reshape(-1, heads, width)[place].to(q_THC.dtype)


def _logits(q_UZHC: Tensor, keys: Tensor, visible_UZS: Tensor) -> Tensor:
    equation = "uzhc,usc->uzhs" if keys.dim() == 3 else "uzhc,uzsc->uzhs"
    s = torch.einsum(equation, q_UZHC, keys)
    return torch.where(visible_UZS[:, :, None], s, -torch.inf)


def _values(e_UZHS: Tensor, keys: Tensor) -> Tensor:
    equation = "uzhs,usc->uzhc" if keys.dim() == 3 else "uzhs,uzsc->uzhc"
    return torch.einsum(equation, e_UZHS, keys)


def scores(iq_TIJ: Tensor, weights_TI: Tensor, keys: Keys, blocks_UZ: Tensor) -> Tensor:
    """I[t, j] = sum_h w[t, h] relu(iq[t, h] . ik[j]) in block layout. [U, Z, E] wide

    Entries that a query does not see score -inf. Heads are summed in fixed slices, so that the
    order of the sum does not depend on the chunk. Spec section 7.
    """
    held = read_rows(keys.pool_NC, keys.rows)
    return score_rows(iq_TIJ, weights_TI, held, keys.visible_UZS, blocks_UZ)


def score_rows(
    iq_TIJ: Tensor, weights_TI: Tensor, keys_UEJ: Tensor, visible_UZE: Tensor, blocks_UZ: Tensor
) -> Tensor:
    """As `scores`, of rows that were read."""
    iq, w = wide(iq_TIJ[blocks_UZ]), weights_TI[blocks_UZ]  # [U, Z, I, J], [U, Z, I]
    held = wide(keys_UEJ)
    total = torch.zeros((), dtype=held.dtype, device=held.device)
    for h in range(0, iq.shape[2], _HEADS_AT_ONCE):
        part = slice(h, h + _HEADS_AT_ONCE)
        dots = torch.einsum("uzij,uej->uzie", iq[:, :, part], held)
        total = total + torch.einsum("uzi,uzie->uze", w[:, :, part], torch.relu(dots))
    return torch.where(visible_UZE, total, -torch.inf)


class Rotate(Protocol):
    """What `rope.rotate` is called with."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor: ...


@dataclasses.dataclass(frozen=True)
class Ops:
    """One lowering of each replaceable operator."""

    write_rows: Callable[[Tensor, Tensor, Tensor], Tensor] = write_rows
    read_rows: Callable[[Tensor, Tensor], Tensor] = read_rows
    rms: Callable[[Tensor, Tensor | None, float], Tensor] = rms
    activate: Callable[[Tensor, Tensor, float], Tensor] = activate
    pick: Callable[[Tensor, int], Tensor] = pick
    experts: Callable[[Tensor, Tensor, Tensor, Experts], Tensor] = experts
    linear: Callable[[Tensor, Tensor], Tensor] = linear
    linear_wide: Callable[[Tensor, Tensor], Tensor] = linear_wide
    attend: Callable[[Tensor, Keys, Keys | None, Tensor, tuple[Tensor, Tensor]], Tensor] = attend
    scores: Callable[[Tensor, Tensor, Keys, Tensor], Tensor] = scores
    rotate: Rotate = rotate
    mix: Callable[[Hyper, Tensor, Config], tuple[Tensor, Tensor, Tensor]] = mhc.mix
    collapse: Callable[[Tensor, Tensor], Tensor] = mhc.collapse
    expand: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = mhc.expand


PLAIN = Ops()
