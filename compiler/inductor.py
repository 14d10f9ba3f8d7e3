"""Inductor as a backend of `seal`: a step becomes machine code once, and is loaded from then on.

The step is captured whole (`fullgraph`), with static shapes but for the number of rows of the
pools, so that one program serves pools of any size, and saved with its guards: an argument that
differs in shape, dtype, stride or structure is an error that names the guard, never a compile.

Inductor's cache directory is `folder` while it writes or reads there, and the user's otherwise.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

# The calls between kernels are compiled too: interpreted they take as long as a token's kernels.
# What they would assert, the shapes that operators return, tests hold (`torch.library.opcheck`).
_OPTIONS: dict[str, Any] = {"cpp_wrapper": True, "size_asserts": False, "alignment_asserts": False}

_PROGRAM = "program.bin"
_KERNELS = "kernels"  # what inductor writes: the program finds its machine code here


def version() -> str:
    """All about inductor that changes what it writes for a graph: torch, and its settings.

    Its own hash of them also covers the working directory and the number of cores.
    """
    from torch._inductor import config

    settings = sorted(config.save_config_portable().items())
    return f"{torch.__version__} {hashlib.sha256(repr(settings).encode()).hexdigest()}"


def cxx() -> str:
    """The C++ compiler it calls."""
    from torch._inductor import cpp_builder

    return cpp_builder.get_cpp_compiler()


def _cache_in(folder: Path) -> AbstractContextManager[None]:
    # Importing inductor takes 1.6 s, which commands that compile nothing must not pay.
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    return temporary_cache_dir(str(folder))


def probe(folder: Path) -> None:
    """Let inductor ask, once per process, what this CPU can do; it keeps its probes in `folder`.

    Otherwise it asks within the first program that it compiles or loads, and keeps them there.
    """
    from torch._inductor import cpu_vec_isa

    with _cache_in(folder):
        cpu_vec_isa.pick_vec_isa()


def build(fn: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> Callable[..., Any]:
    """Compile `fn` for arguments like `args` and save it in `folder`, an empty one.

    Dims that may vary are marked on the tensors of `args` by the caller.
    """
    with _cache_in(folder / _KERNELS):
        jitted = torch.compile(fn, fullgraph=True, dynamic=False, options=_OPTIONS)
        compiled = jitted.aot_compile((args, {}))  # type: ignore[attr-defined]
        compiled.save_compiled_function(str(folder / _PROGRAM))
    return compiled


def load(_fn: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """The program saved in `folder`. Nothing is compiled, if `folder` is as `build` left it."""
    with _cache_in(folder / _KERNELS), (folder / _PROGRAM).open("rb") as file:
        return torch.compiler.load_compiled_function(file)
