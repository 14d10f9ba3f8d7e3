"""A mesh of named axes, and the rules that map a tensor's logical axes onto it.

Every tensor declares its logical axes once (`params.py`, `state.py`). `Rules` says which mesh axis
each logical axis is cut over. On axes of size one everything here is the identity; larger axes
are refused by `Mesh.check` until sharding is built.
"""

import dataclasses


class P(tuple[str | None, ...]):
    """One logical axis name, or None, per tensor dimension: P("vocab", "embed").

    A class of its own, so that a spec is a leaf of a pytree and not a node.
    """

    __slots__ = ()

    def __new__(cls, *axes: str | None) -> "P":
        """Build the spec from its entries."""
        return super().__new__(cls, axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Named axes with their sizes and this rank's coordinate on each."""

    axes: tuple[str, ...] = ("dp", "tp", "ep", "sp")
    sizes: tuple[int, ...] = (1, 1, 1, 1)
    coords: tuple[int, ...] = (0, 0, 0, 0)

    def size(self, axis: str) -> int:
        """Number of ranks on a mesh axis. Raises ValueError for an axis the mesh lacks."""
        if axis not in self.axes:
            raise ValueError(f"mesh has no axis {axis!r}; its axes are {', '.join(self.axes)}")
        return self.sizes[self.axes.index(axis)]

    def check(self) -> None:
        """Raise ValueError for a mesh that this version cannot run."""
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if size != 1:
                raise ValueError(
                    f"mesh axis {axis!r} has size {size}; this version runs on axes of size 1 only "
                    f"(the specs are declared, the sharded collectives are not built yet)"
                )


ONE = Mesh()


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which mesh axis each logical axis is cut over; a logical axis not named is replicated."""

    pairs: tuple[tuple[str, str], ...] = (
        ("vocab", "tp"),
        ("heads", "tp"),
        ("groups", "tp"),
        ("experts", "ep"),
        ("tokens", "sp"),
        ("seqs", "dp"),
    )

    def place(self, spec: P) -> P:
        """Logical spec -> mesh spec. Raises ValueError if a mesh axis would be used twice."""
        table = dict(self.pairs)
        placed = P(*(table.get(a) if a is not None else None for a in spec))
        used = [a for a in placed if a is not None]
        if len(used) != len(set(used)):
            raise ValueError(f"spec {tuple(spec)} uses a mesh axis twice: {tuple(placed)}")
        return placed


def local_shape(shape: tuple[int, ...], spec: P, rules: Rules, mesh: Mesh) -> tuple[int, ...]:
    """This rank's shape of a tensor. Raises ValueError where an axis does not divide a dim."""
    out = []
    for dim, axis in zip(shape, rules.place(spec), strict=True):
        ranks = 1 if axis is None else mesh.size(axis)
        if dim % ranks:
            raise ValueError(f"dim of {dim} ({axis}) is not divisible by {ranks} ranks of {axis!r}")
        out.append(dim // ranks)
    return tuple(out)
