"""Experts, one sorted segment of rows per expert: the eager lowering of `ops.experts`.

Outside bfloat16 each segment is padded to a multiple of 8 rows: narrower products take another
path in float32 and float64, and a token's result would depend on how many share its expert.

Reads each chosen expert's weights once and multiplies only the rows routed to it. It reads the
counts on the host, so it is for devices where that is free (CPU) and for programs that are not
captured. Inference only: it has no gradient of its own, use the plain form for research.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.norm import wide
from dsv4.ops import Experts, activate


def experts_by_segment(x_TD: Tensor, weights_TK: Tensor, slots_TK: Tensor, w: Experts) -> Tensor:
    """Same meaning as `dsv4.ops.experts`. The sum over k runs in the order of `slots_TK`."""
    num_tokens, kept = slots_TK.shape
    flat = slots_TK.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=w.w1.shape[0]).tolist()
    token, weight = order // kept, weights_TK.flatten()[order, None]
    rows = x_TD[token]
    out = x_TD.new_empty(flat.shape[0], x_TD.shape[1])
    tile = 1 if x_TD.dtype == torch.bfloat16 else 8
    begin = 0
    for slot, count in enumerate(counts):
        if count:
            part = slice(begin, begin + count)
            x, scale = rows[part], weight[part]
            if count % tile:
                x, scale = (F.pad(t, (0, 0, 0, -count % tile)) for t in (x, scale))
            a = activate(F.linear(x, w.w1[slot]), F.linear(x, w.w3[slot]), w.limit)
            out[order[part]] = F.linear((scale * a).to(x.dtype), w.w2[slot])[:count]
            begin += count
    return wide(out).unflatten(0, (num_tokens, kept)).sum(1)
