"""Everything a pure function may know besides its arguments."""

import dataclasses

from dsv4.config import Config
from dsv4.mesh import ONE, Mesh
from dsv4.ops import PLAIN, Ops


@dataclasses.dataclass(frozen=True)
class Ctx:
    """Static context of a step.

    `qat` rounds caches and indexer inputs as in training (spec section 3.2): on is parity with
    the official code and with quantised caches, off is parity with transformers.
    """

    cfg: Config
    mesh: Mesh = ONE
    ops: Ops = PLAIN
    qat: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a mesh that this version cannot run."""
        self.mesh.check()
