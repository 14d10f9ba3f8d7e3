"""DeepSeek V4, and V4 with its draft module: from an order to a model that can be stepped."""

import dataclasses

import torch
from torch import Tensor

from dsv4 import model, mtp, table
from dsv4.batch import Batch, StepOut
from dsv4.config import Config
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools
from registry.model import CompiledModel, Order
from runtime import load
from runtime.load import LoadReport


def build(order: Order) -> CompiledModel:
    """Load or draw the parameters and compile the step. Raises ValueError, before allocating."""
    cfg = order.cfg if order.drafts else dataclasses.replace(order.cfg, mtp=0)
    params, report, told = _parameters(order, cfg)
    cfg = dataclasses.replace(cfg, mtp=int(params.mtp is not None))
    backend = order.backend
    if backend.start is not None:
        backend.start(order.cache_dir / "kernels")
    if backend.prepare is not None:
        params = backend.prepare(params, cfg)
    ctx = Ctx(cfg=cfg, mesh=order.mesh, ops=backend.ops)

    def step(params: Params, pools: Pools, batch: Batch) -> tuple[StepOut, Pools]:
        return model.step(params, pools, batch, ctx)

    def draft(
        params: Params, pools: Pools, hidden_TMD: Tensor, batch: Batch
    ) -> tuple[StepOut, Pools]:
        return mtp.draft(params, pools, hidden_TMD, batch, ctx)

    return CompiledModel(
        cfg=cfg,
        ctx=ctx,
        params=params,
        step=step,
        draft=draft if cfg.mtp else None,
        backend=backend,
        mesh=order.mesh,
        architecture=order.architecture,
        source=order.source,
        report=report,
        why=(*order.why, *told),
    )


def build_with_drafts(order: Order) -> CompiledModel:
    """As `build`, for a model that must have its draft module. Raises ValueError without one."""
    if not order.drafts or not order.cfg.mtp:
        raise ValueError(f"{order.architecture} is a model with drafts; config.json has no stage")
    made = build(order)
    if made.draft is None:
        raise ValueError(f"{order.architecture} needs mtp.* tensors; {order.source} has none")
    return made


def _parameters(order: Order, cfg: Config) -> tuple[Params, LoadReport | None, tuple[str, ...]]:
    if order.source is None:
        assert order.seed is not None, "build refuses this"
        generator = torch.Generator().manual_seed(order.seed)
        told = (f"random parameters from seed {order.seed}",)
        return table.init(cfg, generator, order.dtype), None, told
    told = ()
    if cfg.mtp and not has_drafts(load.inspect(order.source, cfg)):
        cfg = dataclasses.replace(cfg, mtp=0)
        told = ("the files hold no draft module (mtp.*): backbone only",)
    params, report = load.load(
        order.source, cfg, order.dtype, drafts=bool(cfg.mtp), progress=order.progress
    )
    return params, report, told


def has_drafts(report: LoadReport) -> bool:
    """Whether a checkpoint holds any part of the draft module."""
    return any(path.startswith("mtp.") for use in report.used for path in use.paths)
