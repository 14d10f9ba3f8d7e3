"""Steps as programs of an Ascend NPU, through torchair's GE lane.

Never run by this project: there has been no NPU. What is proved without one is said by
`python -m tools.graph`, which hands the same steps, the same passes and the same converters to
torchair on any machine.

A static graph per function: give each bucket of shapes a function of its own.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compiler import torchair_own


def missing() -> str | None:
    """Why no step can be compiled for an NPU here, or None if one can."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; install dsv4[npu] on a machine with CANN"
    try:
        torch_npu = importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu does not load ({error}); it needs CANN and its environment"
    if not torch_npu.npu.is_available():
        return "torch_npu sees no NPU"
    return None


def package() -> Any:
    """The torchair package, which torch_npu puts on the path when it loads."""
    return importlib.import_module("torchair")


def configure(torchair: Any) -> Any:
    """torchair's compiler config with our converters registered and our pass over the graph."""
    config = torchair.CompilerConfig()  # first: torch_npu loads torchair at its first use
    ge = importlib.import_module("torchair._ge_concrete_graph.ge_apis")
    torchair_own.register(ge, torchair.register_fx_node_ge_converter)
    config.post_grad_custom_post_pass = torchair_own.order_writes
    return config


class _Step(torch.nn.Module):
    """A step as the method of a module, the only form that torchair's cache takes."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def run(self, *args: Any) -> Any:
        return self.fn(*args)


def version() -> str:
    """All about it that changes a program and that our sources do not say."""
    found = package()
    return f"{importlib.import_module('torch_npu').__version__} {getattr(found, '__version__', '')}"


def build(fn: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> Callable[..., Any]:
    """The program of `fn` for arguments like `args`, run once on them, which compiles it."""
    program = compile_step(fn, folder)
    program(*args)
    return program


def load(fn: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """The program that `build` kept in `folder`."""
    return compile_step(fn, folder)


def compile_step(fn: Callable[..., Any], cache_dir: Path | None = None) -> Callable[..., Any]:
    """The program of a step function, compiled at its first call, for the shapes of that call.

    `cache_dir` keeps the compiled graph for later starts. Torchair's own key sees neither the
    sources nor the shapes, and a graph from its cache checks nothing: the caller gives a directory
    that stands for all of them. Raises RuntimeError saying what is missing.
    """
    reason = missing()
    if reason is not None:
        raise RuntimeError(f"steps cannot be compiled for an NPU: {reason}")
    torchair = package()
    config = configure(torchair)
    if cache_dir is not None:
        return torchair.inference.cache_compile(
            _Step(fn).run, config=config, dynamic=False, cache_dir=str(cache_dir)
        )
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)
