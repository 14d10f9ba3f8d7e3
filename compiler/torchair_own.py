"""Operators of our own that torchair needs, each with its meaning, shapes and conversion to GE.

`grouped_matmul`: the vendor's wants weights as [L, I, O] and leaves a transposition of them in the
graph; the GE operator can be told that they stand as [L, O, I].

`write_after`: torchair writes into a graph input in place only if nothing else reads it, and copies
the whole pool otherwise. The rings and headers of the compressors are read and then written in one
step: `order_writes` puts this operator there, which writes in place after the reads.

Letters: N rows sorted by expert, I in, O out; others as in the package docstring of `dsv4`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.library import Library


def grouped_matmul(rows_NI: Tensor, weight_LOI: Tensor, counts_L: Tensor) -> Tensor:
    """The next `counts_L[l]` rows times expert l's weight, for each l in turn. [N, O]"""
    parts = rows_NI.split(counts_L.tolist())
    return torch.cat([F.linear(x, w) for x, w in zip(parts, weight_LOI, strict=True)])


def _grouped_matmul_shapes(rows_NI: Tensor, weight_LOI: Tensor, counts_L: Tensor) -> Tensor:
    return rows_NI.new_empty((rows_NI.shape[0], weight_LOI.shape[1]))


def _grouped_matmul_npu(rows_NI: Tensor, weight_LOI: Tensor, counts_L: Tensor) -> Tensor:
    return torch.ops.npu.npu_grouped_matmul(
        [rows_NI],
        [weight_LOI.transpose(1, 2)],
        group_list=counts_L,
        split_item=3,  # one result
        group_type=0,  # the rows are what is grouped
        group_list_type=1,  # by counts
    )[0]


def _write_after(
    pool_NC: Tensor, indices_T1: Tensor, values_TC: Tensor, reads: Sequence[Tensor]
) -> Tensor:
    """`pool_NC` with `values_TC` at `indices_T1[:, 0]`; the reads are those of the pool before."""
    return pool_NC.index_put((indices_T1[:, 0],), values_TC)


def _write_after_shapes(
    pool_NC: Tensor, indices_T1: Tensor, values_TC: Tensor, reads: Sequence[Tensor]
) -> Tensor:
    return torch.empty_like(pool_NC)


def _library() -> Library:
    own = Library("dsv4", "FRAGMENT")
    own.define("grouped_matmul(Tensor rows, Tensor weight, Tensor counts) -> Tensor")
    own.impl("grouped_matmul", grouped_matmul, "CPU")
    own.impl("grouped_matmul", _grouped_matmul_shapes, "Meta")
    own.impl("grouped_matmul", _grouped_matmul_npu, "PrivateUse1")
    own.define("write_after(Tensor pool, Tensor indices, Tensor values, Tensor[] reads) -> Tensor")
    own.impl("write_after", _write_after, "CPU")
    own.impl("write_after", _write_after_shapes, "Meta")
    return own


LIBRARY = _library()
CONVERTED = ("dsv4.grouped_matmul.default", "dsv4.write_after.default")


def _without_copy(copy: Node) -> Node:
    """What is copied into a graph input, past a functional copy of the same dtype and shape."""
    pool, value = copy.args
    assert isinstance(pool, Node)
    assert isinstance(value, Node)
    if value.target is torch.ops.aten.copy.default and value.args[0] is pool:
        source = value.args[1]
        assert isinstance(source, Node)
        mine, theirs = (node.meta["val"] for node in (pool, source))
        if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape):
            value.replace_all_uses_with(source)
            value.graph.erase_node(value)
            return source
    return value


def order_writes(graph_module: GraphModule, *_: object) -> None:
    """Let writes into graph inputs that the step has read before wait for those reads, in place.

    A pass over the functional graph, run by torchair after its own passes. Raises ValueError for a
    pool that is read otherwise than by `Ops.read_rows`, or whose old rows are read after the write.
    """
    graph = graph_module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    update = torch.ops.npu.npu_scatter_nd_update.default
    for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        pool, write = copy.args[0], _without_copy(copy)
        assert isinstance(pool, Node)
        if write.target is not update or write.args[0] is not pool:
            continue
        reads = [user for user in pool.users if user not in (copy, write)]
        for read in reads:
            if read.target is not torch.ops.aten.embedding.default or order[read] > order[write]:
                raise ValueError(
                    f"{read} reads pool {pool} as {read.target} in a step that writes it; read "
                    f"pools with Ops.read_rows, and before they are written"
                )
        if reads:
            write.target = torch.ops.dsv4.write_after.default
            write.args = (*write.args, reads)
    graph_module.recompile()


def register(ge: Any, register_converter: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Tell torchair how our own operators become GE operators.

    `ge` is its module of GE operators, `register_converter` its `register_fx_node_ge_converter`.
    """

    def empty(kind: int) -> list[Any]:
        return [ge.Fill([0], ge.Cast(0.0, dst_type=kind))]

    def convert_matmul(rows: Any, weight: Any, counts: Any, meta_outputs: Any = None) -> Any:
        # Empty optional inputs have the dtypes that the vendor's converter gives them.
        kinds = ge.DataType
        half = rows.dtype == kinds.DT_FLOAT16
        bias = empty(kinds.DT_FLOAT16 if half else kinds.DT_FLOAT)
        scale, offset = empty(kinds.DT_UINT64), empty(kinds.DT_FLOAT)
        anti, shift = empty(kinds.DT_FLOAT16), empty(kinds.DT_FLOAT16)
        return ge.GroupedMatmul(
            [rows], [weight], bias, scale, offset, anti, shift, counts, None,
            split_item=3, dtype=-1, transpose_weight=True, group_type=0, group_list_type=1,
        )[0]  # fmt: skip

    def convert_write(
        pool: Any, indices: Any, values: Any, reads: Any, meta_outputs: Any = None
    ) -> Any:
        written = ge.ScatterNdUpdate(pool, indices, values)
        # Control edges, after the data inputs: its own `dependencies` would come before them.
        written.node.input.extend(read.controller for read in reads)
        return written

    register_converter(torch.ops.dsv4.grouped_matmul.default)(convert_matmul)
    register_converter(torch.ops.dsv4.write_after.default)(convert_write)
