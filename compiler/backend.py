"""Backends as records: which lowering of each operator, and how a step becomes a program.

`eager` runs the step as it stands, with two lowerings that need no compiler: writes go into the
pools in place (the caller gives its pools away), and experts run segment by segment.
`inductor` compiles (CPU, CUDA).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiler import inductor
from compiler.segments import experts_by_segment
from dsv4.ops import Ops


def write_rows_in_place(pool_NC: Tensor, rows_T: Tensor, values_TC: Tensor) -> Tensor:
    """`ops.write_rows` into the pool itself: costs the rows written, not the pool."""
    return pool_NC.index_put_((rows_T,), values_TC)


@dataclasses.dataclass(frozen=True)
class Compile:
    """How a backend makes and finds programs. Both raise what the backend raises."""

    build: Callable[[Callable[..., Any], tuple[Any, ...], Path], Callable[..., Any]]
    load: Callable[[Path], Callable[..., Any]]
    missing: Callable[[], str | None]  # what this machine lacks


@dataclasses.dataclass(frozen=True)
class Backend:
    """How steps are run. `donates` says that a step's pools must not be used again."""

    name: str
    ops: Ops
    donates: bool
    why: str
    version: str = ""
    compile: Compile | None = None  # None: steps run as they stand


EAGER = Backend(
    name="eager",
    ops=Ops(write_rows=write_rows_in_place, experts=experts_by_segment),
    donates=True,
    why="runs uncompiled, operator by operator; needs nothing but torch",
)

INDUCTOR = Backend(
    name="inductor",
    ops=Ops(write_rows=write_rows_in_place),
    donates=True,
    why="compiles each step shape once; needs a C++ compiler",
    version=torch.__version__,
    compile=Compile(inductor.build, inductor.load, inductor.missing),
)

PLANNED = ("torchair",)
_BACKENDS = {b.name: b for b in (EAGER, INDUCTOR)}
NAMES = ("auto", *_BACKENDS)


def backend(name: str, device: str = "cpu") -> Backend:
    """The record of a backend. `auto`: the one for a device type.

    Raises ValueError for one that is planned or unknown, and for one for which this machine lacks
    something: nothing falls back to another.
    """
    found = _BACKENDS.get(_AUTO.get(device, "") if name == "auto" else name)
    if found is None:
        if name == "auto":
            raise ValueError(f"no backend for device {device!r}; there are {', '.join(_AUTO)}")
        state = "planned and not built yet" if name in PLANNED else "unknown"
        raise ValueError(f"backend {name!r} is {state}; use one of {', '.join(NAMES)}")
    lacks = found.compile.missing() if found.compile else None
    if lacks is not None:
        raise ValueError(f"backend {found.name}: {lacks}")
    if name == "auto":
        return dataclasses.replace(found, why=f"auto on device {device}: {found.why}")
    return found


_AUTO = {"cpu": "inductor", "cuda": "inductor"}
