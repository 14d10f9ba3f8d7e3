"""What a builder is told, and what it returns. Both frozen."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from compiler.backend import Backend
from dsv4.batch import Batch, Need, Shape, StepOut
from dsv4.config import Config
from dsv4.context import Ctx
from dsv4.mesh import ONE, Mesh
from dsv4.params import Params
from dsv4.state import Pools
from runtime.load import LoadReport, Progress

Fit = Callable[[Need], Shape]
Step = Callable[[Params, Pools, Batch], tuple[StepOut, Pools]]
Draft = Callable[[Params, Pools, Tensor, Batch], tuple[StepOut, Pools]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What a builder is asked for."""

    architecture: str
    cfg: Config
    source: Path | None  # directory of the checkpoint; None: random parameters
    seed: int | None  # of the random parameters
    backend: Backend
    cache_dir: Path  # where the backend builds its kernels
    dtype: torch.dtype
    mesh: Mesh
    drafts: bool  # whether the draft module is wanted, where there is one
    progress: Progress | None
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledModel:
    """A model that can be stepped, and where everything in it came from."""

    cfg: Config  # of the parameters: `mtp` is 0 if they have no draft module
    ctx: Ctx  # the backend's operators: may write in place; for grad and vmap use Ctx(cfg)
    params: Params
    step: Step  # may write into the pools it is given: use those it returns
    draft: Draft | None  # the draft module's step, over the streams before each token
    backend: Backend
    architecture: str
    source: Path | None
    report: LoadReport | None
    why: tuple[str, ...]  # the choices that led here, in order
    mesh: Mesh = ONE
    # Shapes that steps and drafts are padded to; None: any shape goes.
    fit: Fit | None = None
    fit_draft: Fit | None = None
