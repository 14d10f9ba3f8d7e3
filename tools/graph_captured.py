"""What became of a captured graph: its operators one by one, and its GE graph if there is one."""

import collections
import dataclasses


@dataclasses.dataclass
class Operator:
    """One operator of the captured graph."""

    name: str  # namespace.operator.overload
    count: int = 0
    listed: str | None = None  # status in the shipped list of converters
    emitted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    error: str | None = None  # what its converter raised

    def missing(self, converted: bool) -> str | None:
        """Why it does not lower, by the highest evidence there is; None if it does."""
        if converted:
            return self.error
        return None if self.listed else "not in the list of converters"


@dataclasses.dataclass(frozen=True)
class Pool:
    """A cache of the model as the graph sees it."""

    name: str
    in_place: bool  # written, through a reference to the graph's input
    copied: bool  # a copy of it is made first


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A GE graph."""

    text: str
    ops: collections.Counter[str]
    ref_inputs: tuple[int, ...]  # `_ref_data_idx`
    pools: tuple[Pool, ...]
    copies: tuple[str, ...]  # TensorMove operators left, with shapes
    unknown: tuple[str, ...]  # types that torchair's own prototype texts do not have
    strangers: tuple[str, ...]  # inputs and attributes that a prototype does not name
    untyped: int  # outputs without a dtype before torchair fills in float


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything the tool says about one graph."""

    torch_npu: str  # the version that the evidence is about
    operators: tuple[Operator, ...]
    written: tuple[str, ...]  # pools that the step writes
    lowered: Lowered | None  # None if the list of converters is all the evidence

    @property
    def missing(self) -> dict[str, str]:
        """Operators that do not lower, and why."""
        converted = self.lowered is not None
        found = {op.name: op.missing(converted) for op in self.operators}
        return {name: why for name, why in found.items() if why is not None}

    @property
    def faults(self) -> tuple[str, ...]:
        """What else is wrong with the GE graph."""
        if self.lowered is None:
            return ()
        low = self.lowered
        seen = {pool.name for pool in low.pools if pool.in_place}
        return (
            *(
                f"pool {name} is written, but not in place"
                for name in self.written
                if name not in seen
            ),
            *(f"pool {pool.name} is copied" for pool in low.pools if pool.copied),
            *(f"not in the prototype: {s}" for s in low.strangers),
            *(f"no prototype: {t}" for t in low.unknown),
        )
