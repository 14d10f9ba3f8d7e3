"""Backends as records: which lowering of each operator, and how a step becomes a program.

- `eager` runs the step as it stands, with two lowerings that need no compiler: writes go into the
  pools in place (the caller gives its pools away), and experts run segment by segment.
- `kernels` runs it as it stands, too, with C++ kernels for the CPU, built once: for runs so short
  that compiling every shape of a step does not pay.
- `inductor` compiles every shape of a step around the same kernels, so that what lies between them
  costs no call per operator.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiler import cpu_build, cpu_layout, cpu_ops, inductor
from compiler.segments import experts_by_segment
from dsv4.config import Config
from dsv4.ops import PLAIN, Ops
from dsv4.params import Params


def write_rows_in_place(pool_NC: Tensor, rows_T: Tensor, values_TC: Tensor) -> Tensor:
    """`ops.write_rows` into the pool itself: costs the rows written, not the pool."""
    return pool_NC.index_put_((rows_T,), values_TC)


@dataclasses.dataclass(frozen=True)
class Compile:
    """How a backend makes and finds programs. Both raise what the backend raises."""

    build: Callable[[Callable[..., Any], tuple[Any, ...], Path], Callable[..., Any]]
    load: Callable[[Callable[..., Any], Path], Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Backend:
    """How steps are run. `donates` says that a step's pools must not be used again."""

    name: str
    ops: Ops
    donates: bool
    why: str
    version: str = ""
    missing: Callable[[], str | None] | None = None  # what this machine lacks; None: nothing
    start: Callable[[Path], None] | None = None  # make `ops` usable; builds in a folder, once
    prepare: Callable[[Params, Config], Params] | None = None  # parameters as `ops` reads them
    compile: Compile | None = None  # None: steps run as they stand


_IN_PLACE = dataclasses.replace(PLAIN, write_rows=write_rows_in_place)

EAGER = Backend(
    name="eager",
    ops=dataclasses.replace(_IN_PLACE, experts=experts_by_segment),
    donates=True,
    why="runs uncompiled, operator by operator; needs nothing but torch",
)

KERNELS = Backend(
    name="kernels",
    ops=cpu_ops.lowered(_IN_PLACE),
    donates=True,
    why="runs uncompiled, with C++ kernels that are built once; needs a C++ compiler",
    missing=cpu_build.missing,
    start=cpu_ops.start,
    prepare=cpu_layout.prepare,
)

INDUCTOR = dataclasses.replace(
    KERNELS,
    name="inductor",
    why="compiles each shape of a step once, around C++ kernels; needs a C++ compiler",
    version=torch.__version__,
    compile=Compile(inductor.build, inductor.load),
)

PLANNED = ("torchair",)
_BACKENDS = {b.name: b for b in (EAGER, KERNELS, INDUCTOR)}
_AUTO = {"cpu": INDUCTOR.name}
NAMES = ("auto", *_BACKENDS)


def backend(name: str, device: str = "cpu") -> Backend:
    """The record of a backend. `auto`: the one for a device type.

    Raises ValueError for one that is planned or unknown, and for one for which this machine lacks
    something: nothing falls back to another.
    """
    if name == "auto" and device not in _AUTO:
        raise ValueError(f"no backend for device {device!r}; there are {', '.join(_AUTO)}")
    found = _BACKENDS.get(_AUTO[device] if name == "auto" else name)
    if found is None:
        state = "planned and not built yet" if name in PLANNED else "unknown"
        raise ValueError(f"backend {name!r} is {state}; use one of {', '.join(NAMES)}")
    lacks = found.missing() if found.missing else None
    if lacks is not None:
        raise ValueError(f"backend {found.name}: {lacks}; or use backend eager, which needs none")
    if name == "auto":
        return dataclasses.replace(found, why=f"auto on device {device}: {found.why}")
    return found
