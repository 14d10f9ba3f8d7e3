"""Collectives by mesh-axis name. On an axis of size one each is the identity.

Layers call them where a sharded layout would have to communicate, so that the single-device model
and the sharded model are the same code. Axes of other sizes are refused by `Mesh.check`.
"""

from torch import Tensor

from dsv4.mesh import Mesh


def _only_size_one(mesh: Mesh, axis: str) -> None:
    if mesh.size(axis) != 1:
        mesh.check()


def psum(x: Tensor, axis: str, mesh: Mesh) -> Tensor:
    """Sum the partial values over a mesh axis."""
    _only_size_one(mesh, axis)
    return x


def all_gather(x: Tensor, axis: str, mesh: Mesh) -> Tensor:
    """Concatenate the shards of dim 0 over a mesh axis."""
    _only_size_one(mesh, axis)
    return x
