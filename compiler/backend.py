"""Backends as records: which lowering of each operator, and how a step becomes a program.

`eager` runs the step as it stands, with two lowerings that need no compiler: writes go into the
pools in place (the caller gives its pools away), and experts run segment by segment. Compiled
backends are planned; asking for one is refused.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from compiler.segments import experts_by_segment
from dsv4.ops import Ops

F = TypeVar("F", bound=Callable[..., object])


def write_rows_in_place(pool_NC: Tensor, rows_T: Tensor, values_TC: Tensor) -> Tensor:
    """`ops.write_rows` into the pool itself: costs the rows written, not the pool."""
    return pool_NC.index_put_((rows_T,), values_TC)


@dataclasses.dataclass(frozen=True)
class Backend:
    """How steps are run. `donates` says that a step's pools must not be used again."""

    name: str
    ops: Ops
    donates: bool
    why: str

    def compile(self, fn: F) -> F:
        """The program of a step function. Eager: the function itself."""
        return fn


EAGER = Backend(
    name="eager",
    ops=Ops(write_rows=write_rows_in_place, experts=experts_by_segment),
    donates=True,
    why="runs uncompiled, operator by operator; needs nothing but torch",
)

PLANNED = ("inductor", "torchair")


def backend(name: str) -> Backend:
    """The record of a backend. Raises ValueError for one that is planned or unknown."""
    if name == EAGER.name:
        return EAGER
    state = "planned and not built yet" if name in PLANNED else "unknown"
    raise ValueError(f"backend {name!r} is {state}; use 'eager'")
