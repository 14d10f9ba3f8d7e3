"""Backends as records: which lowering of each operator, and how a step becomes a program.

- `eager` runs the step as it stands, with two lowerings that need no compiler: writes go into the
  pools in place (the caller gives its pools away), and experts run segment by segment.
- `kernels` runs it as it stands, too, with C++ kernels for the CPU, built once: for runs so short
  that compiling every shape of a step does not pay.
- `inductor` compiles every shape of a step around the same kernels, so that what lies between them
  costs no call per operator.
- `torchair` compiles every shape of a step for an Ascend NPU.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from compiler import cpu_build, cpu_layout, cpu_ops, inductor, torchair, torchair_ops
from compiler.segments import experts_by_segment
from dsv4.config import Config
from dsv4.ops import PLAIN, Ops
from dsv4.params import Params


def write_rows_in_place(pool_NC: Tensor, rows_T: Tensor, values_TC: Tensor) -> Tensor:
    """`ops.write_rows` into the pool itself: costs the rows written, not the pool."""
    return pool_NC.index_put_((rows_T,), values_TC)


@dataclasses.dataclass(frozen=True)
class Compile:
    """How a backend makes and finds programs, in folders. They raise what the backend raises."""

    version: Callable[[], str]  # all that changes its programs and is not in our sources
    build: Callable[[Callable[..., Any], tuple[Any, ...], Path], Callable[..., Any]]
    load: Callable[[Callable[..., Any], Path], Callable[..., Any]]
    cxx: Callable[[], str] = lambda: "g++"  # the C++ compiler that it calls
    probe: Callable[[Path], None] | None = None  # what it does once per process, with files


@dataclasses.dataclass(frozen=True)
class Backend:
    """How steps are run. `donates` says that a step's pools must not be used again."""

    name: str
    ops: Ops
    donates: bool
    why: str
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
    compile=Compile(inductor.version, inductor.build, inductor.load, inductor.cxx, inductor.probe),
)

TORCHAIR = Backend(
    name="torchair",
    ops=torchair_ops.NPU,
    donates=True,
    why="compiles each shape of a step for an Ascend NPU; never run by this project",
    missing=torchair.missing,
    compile=Compile(torchair.version, torchair.build, torchair.load),
)

_BACKENDS = {b.name: b for b in (EAGER, KERNELS, INDUCTOR, TORCHAIR)}
_AUTO = {"cpu": INDUCTOR.name, "npu": TORCHAIR.name}
NAMES = ("auto", *_BACKENDS)


def record(name: str, device: str = "cpu") -> Backend:
    """The record of a backend, whether it can run here or not. `auto`: the one for a device type.

    Raises ValueError for one that is unknown.
    """
    if name == "auto" and device not in _AUTO:
        raise ValueError(f"no backend for device {device!r}; there are {', '.join(_AUTO)}")
    found = _BACKENDS.get(_AUTO[device] if name == "auto" else name)
    if found is None:
        raise ValueError(f"backend {name!r} is unknown; use one of {', '.join(NAMES)}")
    if name == "auto":
        return dataclasses.replace(found, why=f"auto on device {device}: {found.why}")
    return found


def backend(name: str, device: str = "cpu") -> Backend:
    """As `record`. Raises ValueError also for a backend that lacks something on this machine.

    Nothing falls back to another.
    """
    found = record(name, device)
    lacks = found.missing() if found.missing else None
    if lacks is not None:
        raise ValueError(
            f"backend {found.name} cannot run here: {lacks}; or use backend eager, which needs "
            f"nothing but torch"
        )
    return found


def states() -> dict[str, str | None]:
    """Per backend what this machine lacks for it; None: it can run."""
    return {name: b.missing() if b.missing else None for name, b in _BACKENDS.items()}
