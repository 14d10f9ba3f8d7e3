"""Everything a pure function may know besides its arguments."""

import dataclasses

from dsv4.config import Config, Kind
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
        """Raise ValueError for a mesh that cannot run yet, or widths that `qat` cannot round."""
        self.mesh.check()
        cfg = self.cfg
        if not self.qat:
            return
        rest = cfg.head_dim - cfg.rope_dim
        if rest % 64:
            raise ValueError(
                f"qat rounds head_dim - rope_dim = {rest} values in blocks of 64; it must be a "
                f"multiple of 64, or run with qat off"
            )
        width = cfg.index_dim
        if Kind.CSA in cfg.kinds and (width % 32 or width & (width - 1)):
            raise ValueError(
                f"qat rotates and rounds index_dim = {width} values in blocks of 32; it must be a "
                f"power of two of at least 32, or run with qat off"
            )
