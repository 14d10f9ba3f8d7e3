"""Where one layer stands in one step: its plan, its addressing, and the step's rotary angles."""

import dataclasses

import torch
from torch import Tensor

from dsv4 import rope
from dsv4.batch import Batch
from dsv4.config import LayerPlan, Rope
from dsv4.context import Ctx
from dsv4.norm import wide_dtype


@dataclasses.dataclass(frozen=True)
class Site:
    """What a layer is told besides parameters, state and input."""

    plan: LayerPlan
    ctx: Ctx
    page_tokens: int
    drafts: int  # rows of a ring for tokens that may be rejected
    cos: Tensor  # [T, rope_dim / 2] of the layer's rope at the tokens' positions
    sin: Tensor
    first_key: int = 0  # window keys exist from this position on

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the layer's rope at other positions."""
        return rope.angles(positions, self.plan.rope, self.ctx.cfg.rope_dim, self.cos.dtype)


def turn(positions_T: Tensor, ropes: tuple[Rope, ...], dim: int, dtype: torch.dtype) -> dict:
    """{rope: (cos, sin)} at the tokens' positions, each table once per step."""
    own = wide_dtype(dtype)
    return {r: rope.angles(positions_T, r, dim, own) for r in dict.fromkeys(ropes)}


def window_row(batch: Batch, seq: Tensor, position: Tensor, page_tokens: int) -> Tensor:
    """Row of a window pool that holds `position` of table row `seq`. The table is a ring."""
    column = (position // page_tokens) % batch.window.shape[1]
    return batch.window[seq, column] * page_tokens + position % page_tokens


def entry_row(batch: Batch, seq: Tensor, entry: Tensor, per_page: int) -> Tensor:
    """Row of a history pool that holds compressed entry `entry` of table row `seq`."""
    return batch.history[seq, entry // per_page] * per_page + entry % per_page


def write(ctx: Ctx, pool_NC: Tensor, rows_T: Tensor, values_TC: Tensor, valid_T: Tensor) -> Tensor:
    """Write the valid rows; the others become zeros at row 0, which belongs to padding."""
    values = torch.where(valid_T[:, None], values_TC, 0).to(pool_NC.dtype)
    return ctx.ops.write_rows(pool_NC, torch.where(valid_T, rows_T, 0), values)
