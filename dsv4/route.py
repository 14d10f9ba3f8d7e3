"""Expert choice: by token id through a table, or by score plus bias. Spec section 9."""

import torch
from torch import Tensor

from dsv4.context import Ctx
from dsv4.params import Moe


def log_scores(logits_TX: Tensor) -> Tensor:
    """log sqrt(softplus(z)), exact where softplus(z) itself underflows.

    softplus(z) tends to e^z below: log softplus(z) = z - e^z / 2 + O(e^2z).
    """
    z = logits_TX
    low = z.clamp(max=-15.0)
    high = z.clamp(min=-15.0)
    tail = low - 0.5 * torch.exp(low)
    # Written out (no NPU converter has softplus); half of |z| on either side keeps the gradient
    # at 0 right, where abs has none.
    size = high.abs()
    softplus = 0.5 * (high + size) + torch.log1p(torch.exp(-size))
    return 0.5 * torch.where(z < -15.0, tail, torch.log(softplus))


def route(p: Moe, x_TD: Tensor, tokens_T: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """Weights [T, K] (wide, summing to route_scale) and experts [T, K] of each token.

    The bias steers the choice only; weights come from unbiased scores. w = s / sum(s) is computed
    as softmax(log s), which stays exact when every score underflows.
    """
    logs = log_scores(ctx.ops.linear_wide(x_TD, p.gate))
    if p.tid2eid is not None:
        experts = p.tid2eid[tokens_T].long()
    else:
        scores = torch.exp(logs) if p.bias is None else torch.exp(logs) + p.bias
        experts = ctx.ops.pick(scores, ctx.cfg.topk)
    weights = torch.softmax(logs.gather(-1, experts), dim=-1) * ctx.cfg.route_scale
    return weights, experts
