"""Capture a step as one graph, and hold its operators against the shipped list of converters.

The evidence called static: it needs torch only.
"""

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from compiler import torchair_list
from compiler.torchair_own import order_writes


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph as torchair's converters are given it."""

    inputs: tuple[str, ...]  # what each graph input is, as a path: "pools.layers.0.window"
    operators: collections.Counter[str]
    written: tuple[str, ...]  # the inputs that it writes


def name_of(target: Any) -> str:
    """An operator's name: namespace.operator.overload, or module.function."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{target.__module__}.{target.__name__}"


def paths_of(graph_module: GraphModule) -> tuple[str, ...]:
    """Where in the captured function's arguments each input of Dynamo's graph comes from."""
    sources = [
        node.meta["grapharg"].source.name
        for node in graph_module.graph.nodes
        if node.op == "placeholder"
    ]
    return tuple(re.sub(r"\W+", ".", s.removeprefix("L[")).strip(".") for s in sources)


def number_of(name: str) -> int:
    """Which input a placeholder of the flat graph is: `arg49_1` is 49."""
    found = re.fullmatch(r"arg(\d+)_1", name)
    assert found, f"the flat graph names an input {name!r}"
    return int(found[1])


def observed(graph_module: GraphModule, inputs: tuple[str, ...]) -> Captured:
    """What a flat functional graph holds."""
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    copies = [node for node in calls if node.target is torch.ops.aten.copy_.default]
    return Captured(
        inputs=inputs,
        operators=collections.Counter(name_of(node.target) for node in calls),
        written=tuple(inputs[number_of(node.args[0].name)] for node in copies),
    )


def capture(fn: Callable[..., Any], args: tuple[Any, ...]) -> Captured:
    """The function's graph after functionalisation and our own pass. Raises if it is not one graph.

    Arguments may be on the meta device; nothing is computed.
    """
    seen: list[Captured] = []

    def backend(graph_module: GraphModule, example: list[Any]) -> Callable[..., Any]:
        inputs = paths_of(graph_module)

        def keep(flat: GraphModule, _: list[Any]) -> Callable[..., Any]:
            order_writes(flat)
            seen.append(observed(flat, inputs))
            return flat.forward

        compiled = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
        return compiled(graph_module, example)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, fullgraph=True, dynamic=False, backend=backend)(*args)
    (one,) = seen
    return one


def statuses(captured: Captured) -> dict[str, str | None]:
    """How each operator converts according to the list; None for one that does not."""
    table = torchair_list.read()
    return {op: table.of(op) for op in sorted(captured.operators)}
