"""The NPU's lowering of `dsv4.ops.Ops`: what a step calls when torchair compiles it.

Each function means what its plain form in `dsv4.ops` means. On CPU they run through the stand-ins
of `torchair_vendor.py`, which is how tests hold the pairs together; the vendor's kernels
themselves have never been run by this project.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import compiler.torchair_own  # noqa: F401  declares dsv4::grouped_matmul
from dsv4.norm import wide
from dsv4.ops import Experts, Keys, Ops, attend_rows, score_rows


def write_rows(pool_NC: Tensor, rows_T: Tensor, values_TC: Tensor) -> Tensor:
    """`ops.write_rows` into the pool itself.

    Written as a new tensor copied back: torchair recognises the pair and writes in place, on every
    version of CANN. `tools.graph` fails if a copy of a pool is left in the graph.
    """
    pool_NC.copy_(torch.ops.npu.npu_scatter_nd_update(pool_NC, rows_T[:, None], values_TC))
    return pool_NC


def read_rows(pool_NC: Tensor, rows: Tensor) -> Tensor:
    """`ops.read_rows` as a gather along the first dim (GatherV2)."""
    return F.embedding(rows, pool_NC)


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`ops.rms`, fused; the unweighted norm has a weight of ones."""
    gamma = x.new_ones(x.shape[-1]) if weight is None else weight
    return torch.ops.npu.npu_rms_norm(x, gamma, eps)[0]


def activate(g: Tensor, u: Tensor, limit: float) -> Tensor:
    """`ops.activate`, fused: the vendor's clamped SwiGLU without its scale and bias."""
    both = torch.cat((wide(g), wide(u)), dim=-1)
    return torch.ops.npu.npu_clipped_swiglu(
        both, dim=-1, alpha=1.0, limit=limit, bias=0.0, interleaved=False
    )


def experts(x_TD: Tensor, weights_TK: Tensor, slots_TK: Tensor, w: Experts) -> Tensor:
    """`ops.experts`: rows sorted by expert, three grouped products, rows summed by token.

    Every expert's weights are read once, and no shape depends on the routing.
    """
    num_slots, kept = w.w1.shape[0], slots_TK.shape[1]
    matmul = torch.ops.dsv4.grouped_matmul
    rows_ND, place_N, counts_L, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x_TD,
        slots_TK.to(torch.int32),
        active_num=slots_TK.numel(),
        expert_num=num_slots,
        expert_tokens_num_type=1,  # counts
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_slots],
    )
    a = activate(matmul(rows_ND, w.w1, counts_L), matmul(rows_ND, w.w3, counts_L), w.limit)
    flat = weights_TK.flatten()
    scale_N = torch.zeros_like(flat).scatter(0, place_N.long(), flat)
    y_ND = wide(matmul((scale_N[:, None] * a).to(x_TD.dtype), w.w2, counts_L))
    # The vendor's sum wants the choices outermost.
    by_choice = place_N.unflatten(0, (-1, kept)).t().flatten()
    return torch.ops.npu.npu_moe_finalize_routing(
        y_ND, None, None, None, None, by_choice, None, 0, kept
    )


def attend(
    q_THC: Tensor, near: Keys, far: Keys | None, sink_H: Tensor, spots: tuple[Tensor, Tensor]
) -> Tensor:
    """`ops.attend` with its rows read as above."""
    sources = (near,) if far is None else (near, far)
    rows = tuple(read_rows(k.pool_NC, k.rows) for k in sources)
    return attend_rows(q_THC, rows, tuple(k.visible_UZS for k in sources), sink_H, spots)


def scores(iq_TIJ: Tensor, weights_TI: Tensor, keys: Keys, blocks_UZ: Tensor) -> Tensor:
    """`ops.scores` with its rows read as above."""
    held = read_rows(keys.pool_NC, keys.rows)
    return score_rows(iq_TIJ, weights_TI, held, keys.visible_UZS, blocks_UZ)


NPU = Ops(
    write_rows=write_rows,
    read_rows=read_rows,
    rms=rms,
    activate=activate,
    experts=experts,
    attend=attend,
    scores=scores,
)
