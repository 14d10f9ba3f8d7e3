"""One table of every tensor of a model.

`spec(cfg)` is a `Params` tree whose leaves are `Leaf`: shape, dtype class, logical axes,
initialiser, and the names under which the two checkpoint families store it. Initialisation,
loading, writing, sharding, byte budgets and checks are maps over that tree. Spec section 2.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from dsv4.config import Config, Kind, LayerPlan, Router
from dsv4.mesh import P
from dsv4.norm import wide_dtype
from dsv4.params import (
    Attention,
    Compressor,
    Hyper,
    HyperHead,
    Indexer,
    Layer,
    Mlp,
    Moe,
    Mtp,
    Params,
)
from dsv4.tree import leaves, paths, tmap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One tensor, declared. A leaf of the spec tree."""

    shape: tuple[int, ...]
    axes: P  # logical axis or None, one per dim
    official: str  # checkpoint name; "{x}" stands for the expert number
    hf: str  # transformers' name; "" if that family has no such tensor
    role: str = "model"  # dtype class: "model", "wide" or "int32"
    init: str = "normal"  # "normal" (init_std), "ones", "zeros", or "hash" (distinct experts)
    stored: str = "bf16"  # released format: bf16, f32, fp8, fp4 (both with a scale), i64
    hf_rows: tuple[int, int] | None = None  # rows of hf's tensor that are ours (dim 1)
    operand: bool = False  # only ops.linear, linear_wide or experts read it: may be laid out

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """The dtype of this tensor in a model of dtype `model`."""
        if self.role == "int32":
            return torch.int32
        return wide_dtype(model) if self.role == "wide" else model

    @property
    def stacked(self) -> bool:
        """Whether the official family stores one tensor per expert (our dim 0)."""
        return "{x}" in self.official

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def official_tensors(self) -> int:
        """How many tensors of a released checkpoint this leaf is made of, scales included."""
        copies = self.shape[0] if self.stacked else 1
        return copies * (2 if self.stored in ("fp8", "fp4") else 1)


@dataclasses.dataclass(frozen=True)
class _Names:
    """Prefixes of one block in the two checkpoint families."""

    official: str
    hf: str  # "" if the family lacks the block

    # Any, not Leaf: a spec tree has the parameter tree's types, with Leaf where tensors go.
    def leaf(self, ours: str, theirs: str, shape: tuple[int, ...], axes: P, **rest: Any) -> Any:
        hf = self.hf + theirs if self.hf else ""
        return Leaf(shape=shape, axes=axes, official=self.official + ours, hf=hf, **rest)


def _hyper(cfg: Config, n: _Names, which: str) -> Hyper:
    m, d = cfg.streams, cfg.dim
    k = (2 + m) * m
    keep: dict[str, Any] = {"role": "wide", "stored": "f32"}
    o, h = f"hc_{which}_", f"{which}_hc."
    return Hyper(
        fn=n.leaf(o + "fn", h + "fn", (k, m * d), P(None, None), **keep),
        base=n.leaf(o + "base", h + "base", (k,), P(None), init="zeros", **keep),
        scale=n.leaf(o + "scale", h + "scale", (3,), P(None), init="ones", **keep),
    )


def _hyper_head(cfg: Config, n: _Names) -> HyperHead:
    m, d = cfg.streams, cfg.dim
    keep: dict[str, Any] = {"role": "wide", "stored": "f32"}
    return HyperHead(
        fn=n.leaf("hc_head_fn", "hc_head.hc_fn", (m, m * d), P(None, None), **keep),
        base=n.leaf("hc_head_base", "hc_head.hc_base", (m,), P(None), init="zeros", **keep),
        scale=n.leaf("hc_head_scale", "hc_head.hc_scale", (1,), P(None), init="ones", **keep),
    )


def _compressor(cfg: Config, n: _Names, plan: LayerPlan, width: int, hf: str) -> Compressor:
    cw, d = plan.overlap * width, cfg.dim
    o = "compressor."
    wide: dict[str, Any] = {"role": "wide", "operand": True}
    return Compressor(
        ape=n.leaf(
            o + "ape",
            hf + "position_bias",
            (plan.rate, cw),
            P(None, None),
            role="wide",
            init="zeros",
            stored="f32",
        ),
        wkv=n.leaf(o + "wkv.weight", hf + "kv_proj.weight", (cw, d), P(None, "embed"), **wide),
        wgate=n.leaf(
            o + "wgate.weight", hf + "gate_proj.weight", (cw, d), P(None, "embed"), **wide
        ),
        norm=n.leaf(o + "norm.weight", hf + "kv_norm.weight", (width,), P(None), init="ones"),
    )


def _indexer(cfg: Config, n: _Names, plan: LayerPlan) -> Indexer:
    i, j = cfg.index_heads, cfg.index_dim
    inner = _Names(n.official + "indexer.", n.hf)
    hf = "compressor.indexer."
    return Indexer(
        wq_b=inner.leaf(
            "wq_b.weight",
            hf + "q_b_proj.weight",
            (i * j, cfg.q_rank),
            P("index_heads", None),
            stored="fp8",
            operand=True,
        ),
        weights_proj=inner.leaf(
            "weights_proj.weight",
            hf + "scorer.weights_proj.weight",
            (i, cfg.dim),
            P("index_heads", "embed"),
            operand=True,
        ),
        compressor=_compressor(cfg, inner, plan, j, hf),
    )


def _attention(cfg: Config, block: _Names, plan: LayerPlan) -> Attention:
    d, h, c, r = cfg.dim, cfg.heads, cfg.head_dim, cfg.q_rank
    g, o = cfg.o_groups, cfg.o_rank
    n = _Names(block.official + "attn.", block.hf + "self_attn." if block.hf else "")
    fp8: dict[str, Any] = {"stored": "fp8", "operand": True}
    return Attention(
        wq_a=n.leaf("wq_a.weight", "q_a_proj.weight", (r, d), P(None, "embed"), **fp8),
        q_norm=n.leaf("q_norm.weight", "q_a_norm.weight", (r,), P(None), init="ones"),
        wq_b=n.leaf("wq_b.weight", "q_b_proj.weight", (h * c, r), P("heads", None), **fp8),
        wkv=n.leaf("wkv.weight", "kv_proj.weight", (c, d), P(None, "embed"), **fp8),
        kv_norm=n.leaf("kv_norm.weight", "kv_norm.weight", (c,), P(None), init="ones"),
        wo_a=n.leaf(
            "wo_a.weight", "o_a_proj.weight", (g, o, h * c // g), P("groups", None, None), **fp8
        ),
        wo_b=n.leaf("wo_b.weight", "o_b_proj.weight", (d, g * o), P("embed", "groups"), **fp8),
        attn_sink=n.leaf(
            "attn_sink", "sinks", (h,), P("heads"), role="wide", init="zeros", stored="f32"
        ),
        compressor=_compressor(cfg, n, plan, c, "compressor.") if plan.rate else None,
        indexer=_indexer(cfg, n, plan) if plan.kind is Kind.CSA else None,
    )


def _moe(cfg: Config, block: _Names, plan: LayerPlan) -> Moe:
    x, f, d, k = cfg.experts, cfg.expert_dim, cfg.dim, cfg.topk
    n = _Names(block.official + "ffn.", block.hf + "mlp." if block.hf else "")
    up, down = P("experts", None, "embed"), P("experts", "embed", None)
    fp4: dict[str, Any] = {"stored": "fp4", "operand": True}
    fp8: dict[str, Any] = {"stored": "fp8", "operand": True}
    fused = "experts.gate_up_proj"
    bias = n.leaf(
        "gate.bias",
        "gate.e_score_correction_bias",
        (x,),
        P("experts"),
        role="wide",
        init="zeros",
        stored="f32",
    )
    table = n.leaf(
        "gate.tid2eid",
        "gate.tid2eid",
        (cfg.vocab, k),
        P(None, None),
        role="int32",
        init="hash",
        stored="i64",
    )
    shared = "shared_experts."
    return Moe(
        gate=n.leaf(
            "gate.weight", "gate.weight", (x, d), P("experts", "embed"), role="wide", operand=True
        ),
        bias=None if plan.router is Router.HASH else bias,
        tid2eid=table if plan.router is Router.HASH else None,
        w1=n.leaf("experts.{x}.w1.weight", fused, (x, f, d), up, hf_rows=(0, f), **fp4),
        w3=n.leaf("experts.{x}.w3.weight", fused, (x, f, d), up, hf_rows=(f, 2 * f), **fp4),
        w2=n.leaf("experts.{x}.w2.weight", "experts.down_proj", (x, d, f), down, **fp4),
        shared=Mlp(
            w1=n.leaf(
                shared + "w1.weight", shared + "gate_proj.weight", (f, d), P(None, "embed"), **fp8
            ),
            w3=n.leaf(
                shared + "w3.weight", shared + "up_proj.weight", (f, d), P(None, "embed"), **fp8
            ),
            w2=n.leaf(
                shared + "w2.weight", shared + "down_proj.weight", (d, f), P("embed", None), **fp8
            ),
        ),
    )


def _layer(cfg: Config, n: _Names, plan: LayerPlan) -> Layer:
    d = cfg.dim
    post = "post_attention_layernorm.weight"
    return Layer(
        attn_norm=n.leaf(
            "attn_norm.weight", "input_layernorm.weight", (d,), P("embed"), init="ones"
        ),
        ffn_norm=n.leaf("ffn_norm.weight", post, (d,), P("embed"), init="ones"),
        hc_attn=_hyper(cfg, n, "attn"),
        hc_ffn=_hyper(cfg, n, "ffn"),
        attn=_attention(cfg, n, plan),
        ffn=_moe(cfg, n, plan),
    )


def _mtp(cfg: Config) -> Mtp:
    d = cfg.dim
    n = _Names("mtp.0.", "")
    square = (d, d)
    fp8: dict[str, Any] = {"stored": "fp8", "operand": True}
    return Mtp(
        e_proj=n.leaf("e_proj.weight", "", square, P("embed", None), **fp8),
        h_proj=n.leaf("h_proj.weight", "", square, P("embed", None), **fp8),
        enorm=n.leaf("enorm.weight", "", (d,), P("embed"), init="ones"),
        hnorm=n.leaf("hnorm.weight", "", (d,), P("embed"), init="ones"),
        norm=n.leaf("norm.weight", "", (d,), P("embed"), init="ones"),
        hc_head=_hyper_head(cfg, n),
        block=_layer(cfg, n, cfg.mtp_plan),
    )


def spec(cfg: Config) -> Params:
    """The table: a `Params` tree whose leaves are `Leaf`."""
    top, model = _Names("", ""), _Names("", "model.")
    v, d = cfg.vocab, cfg.dim
    table = P("vocab", "embed")
    layers = tuple(
        _layer(cfg, _Names(f"layers.{i}.", f"model.layers.{i}."), plan)
        for i, plan in enumerate(cfg.plans)
    )
    head = dataclasses.replace(
        top.leaf("head.weight", "", (v, d), table, role="wide", operand=True), hf="lm_head.weight"
    )
    return Params(
        embed=model.leaf("embed.weight", "embed_tokens.weight", (v, d), table),
        head=head,
        norm=model.leaf("norm.weight", "norm.weight", (d,), P("embed"), init="ones"),
        hc_head=_hyper_head(cfg, model),
        layers=layers,
        mtp=_mtp(cfg) if cfg.mtp else None,
    )


def _fill(leaf: Leaf, cfg: Config, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    own = leaf.dtype(dtype)
    if leaf.init == "zeros":
        return torch.zeros(leaf.shape, dtype=own)
    if leaf.init == "ones":
        return torch.ones(leaf.shape, dtype=own)
    if leaf.init == "hash":  # distinct experts per token id
        noise = torch.rand(leaf.shape[0], cfg.experts, generator=generator)
        return noise.topk(leaf.shape[1], dim=-1).indices.to(own)
    values = torch.randn(leaf.shape, generator=generator).mul_(cfg.init_std)
    # As from a checkpoint: wide values of a bfloat16 model are those that its file can hold.
    return (values.to(dtype) if leaf.stored == "bf16" else values).to(own)


def init(cfg: Config, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters in a model of dtype `dtype`, drawn from `generator` in table order."""
    return tmap(lambda leaf: _fill(leaf, cfg, generator, dtype), spec(cfg))


def check(params: Params, cfg: Config) -> None:
    """Raise ValueError naming the first tensor whose shape differs from the table."""
    want, have = paths(spec(cfg)), paths(params)
    if want.keys() != have.keys():
        raise ValueError(f"parameters differ from the table: {sorted(want.keys() ^ have.keys())}")
    for name, leaf in want.items():
        if tuple(have[name].shape) != leaf.shape:
            raise ValueError(f"{name} has shape {tuple(have[name].shape)}, expected {leaf.shape}")


def count(tree: Any) -> int:
    """Elements in a spec tree; routing tables are not parameters and do not count."""
    return sum(leaf.count for leaf in leaves(tree) if leaf.role != "int32")


def size_bytes(tree: Any, dtype: torch.dtype) -> int:
    """Bytes of a spec tree's tensors in a model of dtype `dtype`."""
    return sum(leaf.count * leaf.dtype(dtype).itemsize for leaf in leaves(tree))


def official_tensors(tree: Any) -> int:
    """Tensors of a released checkpoint, scales included."""
    return sum(leaf.official_tensors for leaf in leaves(tree))
