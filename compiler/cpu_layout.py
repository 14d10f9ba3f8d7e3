"""Weights laid out once for the CPU kernels: panels of 16 rows, and narrow where nothing is lost.

    [N, K]  ->  [N / 16, K / per, 16, per]      per = 2 values of bfloat16, or 1 of float32

so that one vector holds the same k of 16 outputs (`cpu_tile.h`). Which tensors may be laid out is
declared in the table (`Leaf.operand`). Leading dims (experts, groups) stay in front.
"""

import torch
from torch import Tensor

from dsv4 import table
from dsv4.config import Config
from dsv4.params import Params
from dsv4.table import Leaf
from dsv4.tree import tmap

ROWS = 16  # rows of a panel


def lay_out(leaf: Leaf, values: Tensor, model: torch.dtype) -> Tensor:
    """`values` as a model of dtype `model` holds them on this backend; itself where unchanged.

    Wide values of a bfloat16 model become bfloat16 if every one of them is a bfloat16 number: the
    products are the same, at half the bytes. Rows or columns that do not fill panels stay as they
    are, and so does float64.
    """
    if not leaf.operand:
        return values
    if leaf.role == "wide" and model == torch.bfloat16:
        narrow = values.to(model)
        if torch.equal(narrow.to(values.dtype), values):
            values = narrow
    n, k = values.shape[-2:]
    per = 4 // values.dtype.itemsize
    if per == 0 or n % ROWS or k % per:
        return values
    units = values.unflatten(-1, (k // per, per)).unflatten(-3, (n // ROWS, ROWS))
    return units.transpose(-3, -2).contiguous()


def prepare(params: Params, cfg: Config) -> Params:
    """Parameters as `cpu_ops` reads them, and nothing else: shapes are no longer the table's.

    Needs both layouts of a tensor at once, and both trees if the caller keeps the first; a loader
    that cannot afford that calls `lay_out` as tensors arrive.
    """
    model = params.embed.dtype
    return tmap(lambda leaf, t: lay_out(leaf, t, model), table.spec(cfg), params)


def rows_of(panels: Tensor) -> Tensor:
    """The weight [.., N, K] that stands in panels [.., N / 16, K / per, 16, per]."""
    return panels.transpose(-3, -2).flatten(-2).flatten(-3, -2)
