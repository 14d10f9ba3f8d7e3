"""Lower a captured step through torchair's own converters, without CANN and without an NPU.

The evidence called converted. Only torchair's folder of the torch_npu wheel is put on the path;
two compiled modules that it imports are stood in for, and answered from the prototype texts that it
carries. The conversion, its passes over the graph and every converter are torchair's own.

One graph per process: torchair keeps what it registers.
"""

import atexit
import collections
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.library import Library

from compiler import torchair, torchair_own, torchair_vendor
from tools import graph_prototypes
from tools.graph_capture import Captured, name_of, number_of, observed, paths_of
from tools.graph_captured import Lowered, Pool
from tools.graph_wheel import Wheel

_DTYPES = (
    "BOOL UINT8 INT8 INT16 UINT16 INT32 UINT32 INT64 UINT64 BF16 FLOAT16 FLOAT32 FLOAT64 "
    "COMPLEX64 COMPLEX128"
)
# Operators whose result is, or is a view of, their first input.
_PASS_ON = frozenset({"TensorMove", "ScatterNdUpdate", "Reshape", "Identity"})


class _NeverRuns:
    """Torchair's graph object. Here a graph is built and looked at, never loaded."""

    def __init__(self, *_: object) -> None:
        pass

    def load(self, *_: object) -> None:
        raise RuntimeError("this graph was lowered without CANN; it cannot be loaded")


def _stand_in(name: str, **members: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def _declare_vendor(wheel: Wheel) -> Library:
    """Declare every operator of torch_npu by its own schema, so that its converters register.

    Those of `torchair_vendor.py` also get their shapes and meaning.
    """
    library = torchair_vendor.declare()
    assert library is not None, "torch_npu is loaded, or its operators are declared already"
    for schema in wheel.schemas():
        name = schema.split("(", 1)[0]
        packet, _, overload = name.partition(".")
        known = getattr(torch.ops.npu, packet, None)
        if known is None or (overload or "default") not in known.overloads():
            library.define(schema)
    return library


def load(wheel: Wheel) -> Any:
    """The torchair package of the wheel, ready to convert. Once per process."""
    assert not {"torchair", "torch_npu"} & set(sys.modules), "one wheel per process"
    link = Path(tempfile.mkdtemp(prefix="torchair-"))
    atexit.register(shutil.rmtree, link)
    (link / "torchair").symlink_to(wheel.torchair.resolve())
    sys.path.insert(0, str(link))
    prototypes = graph_prototypes.read(wheel.torchair)

    def compatible(op: str, inputs: tuple[str, ...], attrs: tuple[str, ...]) -> str:
        known = prototypes.get(op)
        bad = known.strangers(list(inputs), list(attrs)) if known else []
        return f"{op} has no {', '.join(bad)}" if bad else ""

    _stand_in(
        "torchair.core._torchair",
        TorchNpuGraphBase=_NeverRuns,
        TorchDataType=Enum("TorchDataType", _DTYPES),
        InitializeGraphEngine=lambda options: None,
        FinalizeGraphEngine=lambda: None,
        SetDebugLogPath=lambda path: None,
        StupidRepeat=None,
        check_cann_compat=compatible,
        get_registered_ir_def=lambda op: ("UNREGISTERED", [], [], []),
    )
    executor = "torchair.core._npu_graph_executor"
    classes = ("AllocatorType", "DataType", "LLMEngine", "Placement")
    _stand_in(executor, **{name: type(name, (), {}) for name in classes})
    return torchair.package()


class Conversion:
    """What happened while torchair converted one graph."""

    def __init__(self, declared: Library) -> None:
        """Nothing yet. The operators stay declared as long as their graph is here."""
        self.declared = declared
        self.captured: Captured | None = None
        self.errors: dict[str, str] = {}
        self.emitted: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.graphs: list[Any] = []
        self.untyped = 0
        self.feeds: list[torch.Tensor] = []  # the graph's inputs before it ran, unless on meta

    def watch(self, converter: Any) -> None:
        """Listen in on torchair's `fx2ge_converter` module.

        A converter that raises is noted and its operator left in the graph under its own name, so
        that one run names every operator that does not convert.
        """
        graph_type, whole = converter.GeConcreteGraph, converter._normalize_ge_graph
        parse, optimise = graph_type.parse_node, graph_type.optimize_graph_without_runtime

        def parse_node(graph: Any, target: Any, args: Any, kwargs: Any, meta: Any) -> Any:
            name, before = name_of(target), len(graph.graph.op)
            try:
                out = parse(graph, target, args, kwargs, meta)
            except Exception as error:  # whatever it raises, it does not convert
                self.errors[name] = " ".join(str(error).split())[:300]
                out = graph._create_mock_node_for_op(target, args, kwargs)
                converter.set_ge_outputs(out, meta)
            self.emitted[name].update(op.type for op in list(graph.graph.op)[before:])
            return out

        def optimise_graph(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self.graphs.append(graph)
            return optimise(graph, *args, **kwargs)

        def normalise(graph: Any) -> None:
            undefined = converter.ProtoDataType.DT_UNDEFINED
            self.untyped = sum(
                desc.dtype == undefined
                for op in graph.op
                if op.type not in ("Data", "RefData", "NetOutput")
                for desc in op.output_desc
            )
            whole(graph)

        graph_type.parse_node = parse_node
        graph_type.optimize_graph_without_runtime = optimise_graph
        converter._normalize_ge_graph = normalise


def convert(
    fn: Callable[..., Any], args: tuple[Any, ...], wheel: Wheel
) -> tuple[Conversion, Lowered]:
    """Compile `fn` for an NPU as far as that goes without one. Arguments may be on meta."""
    done = Conversion(_declare_vendor(wheel))
    package = load(wheel)
    done.watch(sys.modules["torchair._ge_concrete_graph.fx2ge_converter"])
    config = torchair.configure(package)
    config.debug.run_eagerly = True  # after the conversion; on meta tensors that costs nothing
    inputs: list[tuple[str, ...]] = []

    def look(graph_module: GraphModule, *rest: object) -> None:
        torchair_own.order_writes(graph_module, *rest)
        done.captured = observed(graph_module, inputs[0])

    config.post_grad_custom_post_pass = look
    compile_graph = package.get_npu_backend(compiler_config=config)

    def backend(graph_module: GraphModule, example: list[Any]) -> Callable[..., Any]:
        inputs.append(paths_of(graph_module))
        compiled = compile_graph(graph_module, example)

        def run(*feeds: torch.Tensor) -> Any:
            done.feeds = [x.clone() for x in feeds]
            return compiled(*feeds)

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, fullgraph=True, dynamic=False, backend=backend)(*args)
    assert len(inputs) == len(done.graphs) == 1, "a step is one graph"
    return done, _lowered(done, graph_prototypes.read(wheel.torchair))


def _lowered(done: Conversion, prototypes: dict[str, graph_prototypes.Prototype]) -> Lowered:
    graph, captured = done.graphs[0], done.captured
    assert captured is not None
    ops = list(graph.graph.op)
    strangers, unknown = set(), set()
    for op in ops:
        if op.type not in prototypes:
            unknown.add(op.type)
        else:
            fed = [d.name for d, source in zip(op.input_desc, op.input, strict=False) if source]
            bad = prototypes[op.type].strangers(fed, list(op.attr))
            strangers |= {f"{op.type}.{name}" for name in bad}
    return Lowered(
        text=str(graph.graph._proto),
        ops=collections.Counter(op.type for op in ops),
        ref_inputs=tuple(graph._ref_data_idx),
        pools=_pools(graph, captured.inputs),
        copies=tuple(f"{op.name} of {op.input[0]}" for op in ops if op.type == "TensorMove"),
        unknown=tuple(sorted(unknown - graph_prototypes.UNQUOTED)),
        strangers=tuple(sorted(strangers - graph_prototypes.NEWER)),
        untyped=done.untyped,
    )


def _pools(graph: Any, inputs: tuple[str, ...]) -> tuple[Pool, ...]:
    by_name = {op.name: op for op in graph.graph.op}

    def origin(op: Any) -> Any:
        while op.type in _PASS_ON:
            op = by_name[op.input[0].split(":")[0]]
        return op

    moved = {origin(op).name for op in graph.graph.op if op.type == "TensorMove"}
    scattered = {op.input[0].split(":")[0] for op in graph.graph.op if op.type == "ScatterNdUpdate"}
    refs = set(graph._ref_data_idx)
    return tuple(
        Pool(
            name=inputs[number_of(op.name)],
            in_place=op.attr["index"].i in refs and op.name in scattered,
            copied=op.name in moved,
        )
        for op in graph.graph.op
        if op.type == "Data" and inputs[number_of(op.name)].startswith("pools.")
    )
