"""Small models with realistic numbers: configs, parameters, batches, and the same in transformers.

Every number comes from a seed and is drawn in float64, so that models of two dtypes differ by one
rounding of each parameter and by nothing else.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4 import ops, rope, table, tree
from dsv4.batch import Batch
from dsv4.config import Config, Kind, Yarn, hashed, kinds_of
from dsv4.params import Params
from dsv4.state import Pools, PoolSizes, init_pools
from runtime.assemble import Row, Shape, assemble
from tests import reference

_BASE = Config(
    vocab=160,
    dim=64,
    heads=4,
    head_dim=80,  # 64 dims without rotation: one fp8 block
    rope_dim=16,
    q_rank=48,
    o_groups=2,
    o_rank=32,
    kinds=kinds_of("wwchc"),
    hash_layers=hashed(2, 5),
    mtp=0,
    window=16,
    index_heads=16,
    index_dim=32,
    index_topk=8,
    experts=8,
    topk=2,
    expert_dim=48,
    yarn=Yarn(factor=16.0, original=48),
    max_positions=16 * 48,
)


def config(kinds: str = "wwchc", hash_layers: int = 2, **changes: object) -> Config:
    """A tiny config with YaRN active well inside its positions.

    Letters: w window, c CSA, h HCA.
    """
    own: dict = {"kinds": kinds_of(kinds), "hash_layers": hashed(hash_layers, len(kinds))}
    return dataclasses.replace(_BASE, **(own | changes))


def short(kinds: str = "wchc", hash_layers: int = 1, **changes: object) -> Config:
    """As `config`, with rates, window and top-k so small that 40 tokens meet every boundary."""
    own = {"hca_rate": 8, "window": 8, "index_topk": 4, "mtp": 1}
    return config(kinds, hash_layers, **(own | changes))


# Parameters.


def _draw(name: str, leaf: table.Leaf, cfg: Config, generator: torch.Generator) -> Tensor:
    def normal(std: float) -> Tensor:
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64) * std

    last = name.split(".")[-1]
    if leaf.init == "hash":
        noise = torch.rand(leaf.shape[0], cfg.experts, generator=generator)
        return noise.topk(leaf.shape[1], dim=-1).indices
    if last == "scale":
        return 1 + normal(0.3)
    if "norm" in last:
        return 1 + normal(0.2)
    if last in ("base", "ape", "attn_sink"):
        return normal(0.7)
    if last == "bias":
        return normal(0.3)
    if last == "embed":
        return normal(1.0)
    w = normal(leaf.shape[-1] ** -0.5)
    # One weight in 500 is an outlier, as in trained models.
    rare = torch.rand(leaf.shape, generator=generator) < 0.002
    return torch.where(rare, 6 * w, w)


def params(cfg: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters with spread norms, sinks, biases and a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    spec = table.spec(cfg)
    values = {
        name: _draw(name, leaf, cfg, generator).to(leaf.dtype(dtype))
        for name, leaf in tree.paths(spec).items()
    }
    return tree.from_paths(spec, values)


def cast(tree_: Params, dtype: torch.dtype) -> Params:
    """Every floating tensor in `dtype`; exact where `dtype` is wider."""
    return tree.tmap(lambda t: t.to(dtype) if t.is_floating_point() else t, tree_)


def tokens(cfg: Config, num_seqs: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids. [B, S]"""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, cfg.vocab, (num_seqs, length), generator=generator)


# The decisions of a run.


class Watch:
    """Ops that record the scores of every top-k: indexer selections and router choices."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self.seen: list[tuple[Tensor, int]] = []

    def _pick(self, scores: Tensor, k: int) -> Tensor:
        self.seen.append((scores.detach(), k))
        return ops.pick(scores, k)

    @property
    def ops(self) -> ops.Ops:
        """The plain operators, watched."""
        return dataclasses.replace(ops.PLAIN, pick=self._pick)


def gaps(scores: Tensor, k: int) -> Tensor:
    """By how much the k-th best of each row beats the next; inf where there is no choice."""
    if scores.shape[-1] <= k:
        return torch.full(scores.shape[:-1], math.inf, dtype=scores.dtype)
    best = scores.topk(k + 1, dim=-1).values
    gap = best[..., -2] - best[..., -1]
    return torch.where(best[..., -1] == -math.inf, math.inf, gap)


# Steps, and the float64 reference.


def batch(
    cfg: Config,
    chunks: Sequence[tuple[Tensor, int]],
    *,
    pages: int,
    block: int = 1,
    padding: int = 0,
    page_tokens: int | None = None,
) -> Batch:
    """One step over `chunks`: each the tokens of one sequence and the position of the first.

    Sequence b has table row and slot b + 1 and pages 1 + b * pages .. (b + 1) * pages, so that the
    same list of sequences may be stepped again further on. `padding` tokens follow. Shapes depend
    on the lengths of the chunks alone, not on where they start, unless blocks are ragged.
    """
    rows, longest = [], max(len(ids) for ids, _ in chunks)
    for b, (ids, start) in enumerate(chunks):
        own = range(1 + b * pages, 1 + (b + 1) * pages)
        rows.append(
            Row(
                tokens=ids.tolist(),
                start=start,
                slot=b + 1,
                history_pages=own,
                window_pages=own,
                wanted=len(ids),
            )
        )
    shape = Shape(
        tokens=sum(len(ids) for ids, _ in chunks) + padding,
        closes=tuple(len(chunks) * -(-longest // rate) for rate in cfg.rates),
        history=pages,
        window=pages,
    )
    page = page_tokens or cfg.page_tokens
    return assemble(rows, cfg, page_tokens=page, block=block, shape=shape)


def pools(
    cfg: Config, num_seqs: int, pages: int, dtype: torch.dtype, page_tokens: int | None = None
) -> Pools:
    """Zeroed pools for `batch` with the same numbers."""
    page = page_tokens or cfg.page_tokens
    count = 1 + num_seqs * pages
    sizes = PoolSizes(history_pages=count, window_pages=count, slots=num_seqs + 1, page_tokens=page)
    return init_pools(cfg, sizes, dtype)


def run(cfg: Config, *, qat: bool = False) -> reference.Run:
    """The reference of `cfg`, at the float32 frequencies of the code under test."""
    plans = [cfg.mtp_plan, *(p for p in cfg.plans if p.rate)]
    plain, scaled = (rope.frequencies(p.rope, cfg.rope_dim).double() for p in (plans[0], plans[-1]))
    return reference.Run(cfg, plain, scaled, qat)


# transformers.

_LAYER_TYPE = {
    Kind.WINDOW: "sliding_attention",
    Kind.CSA: "compressed_sparse_attention",
    Kind.HCA: "heavily_compressed_attention",
}


def hf_config(cfg: Config) -> DeepseekV4Config:
    """The same architecture as a transformers config."""
    assert cfg.yarn is not None
    share = cfg.rope_dim / cfg.head_dim
    return DeepseekV4Config(
        vocab_size=cfg.vocab,
        hidden_size=cfg.dim,
        moe_intermediate_size=cfg.expert_dim,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads,
        head_dim=cfg.head_dim,
        q_lora_rank=cfg.q_rank,
        num_experts_per_tok=cfg.topk,
        n_routed_experts=cfg.experts,
        routed_scaling_factor=cfg.route_scale,
        max_position_embeddings=cfg.max_positions,
        layer_types=[_LAYER_TYPE[k] for k in cfg.kinds],
        compress_rates={
            "compressed_sparse_attention": cfg.csa_rate,
            "heavily_compressed_attention": cfg.hca_rate,
        },
        mlp_layer_types=["hash_moe" if h else "moe" for h in cfg.hash_layers],
        sliding_window=cfg.window,
        o_groups=cfg.o_groups,
        o_lora_rank=cfg.o_rank,
        index_n_heads=cfg.index_heads,
        index_head_dim=cfg.index_dim,
        index_topk=cfg.index_topk,
        qk_rope_head_dim=cfg.rope_dim,
        swiglu_limit=cfg.swiglu_limit,
        hc_mult=cfg.streams,
        hc_sinkhorn_iters=cfg.sinkhorn,
        hc_eps=cfg.hc_eps,
        rms_norm_eps=cfg.norm_eps,
        rope_parameters={
            "main": {
                "rope_type": "default",
                "rope_theta": cfg.rope_theta,
                "partial_rotary_factor": share,
            },
            "compress": {
                "rope_type": "yarn",
                "rope_theta": cfg.compress_theta,
                "factor": cfg.yarn.factor,
                "original_max_position_embeddings": cfg.yarn.original,
                "beta_fast": cfg.yarn.beta_fast,
                "beta_slow": cfg.yarn.beta_slow,
                "attention_factor": 1.0,
                "partial_rotary_factor": share,
            },
        },
    )


def hf_model(cfg: Config, values: Params) -> DeepseekV4ForCausalLM:
    """A transformers model with the same weights: float32, eager, every tensor of it set."""
    model = DeepseekV4ForCausalLM(hf_config(cfg)).float().eval()
    state = model.state_dict()
    unset = {name: torch.ones_like(t, dtype=torch.bool) for name, t in state.items()}
    given = tree.paths(values)
    for name, leaf in tree.paths(table.spec(cfg)).items():
        if not leaf.hf:  # the draft module
            continue
        rows = slice(None) if leaf.hf_rows is None else slice(*leaf.hf_rows)
        target = state[leaf.hf]
        target = target if leaf.hf_rows is None else target[:, rows]
        target.copy_(given[name].reshape(target.shape))
        flags = unset[leaf.hf]
        (flags if leaf.hf_rows is None else flags[:, rows]).fill_(False)
    left = [name for name, flags in unset.items() if flags.any()]
    assert not left, f"no tensor of ours fills {left}"
    return model
