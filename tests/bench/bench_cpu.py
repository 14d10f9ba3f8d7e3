"""Tokens per second on the CPU, paired with transformers in one run and with the machine's limits.

    python tests/bench/bench_cpu.py [--config bench_100m] [--dtype bfloat16] [--threads 2]

Same random weights, same prompts, same machine, in turn A B A B; medians. Prefill is one prompt of
512 tokens; decode is one token for each of 1 and 8 sequences that hold 512 tokens. The limits are
measured in the same run: read bandwidth by a matrix-vector product over 1 GiB, GEMM peak by a
2,048-cube product in the model dtype. A fraction is (bytes that must move / measured bandwidth) or
(FLOPs / measured peak) over the time taken. Not measured here: compiled programs, other machines.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from compiler.backend import EAGER
from dsv4 import config, model, table
from dsv4.config import Config, Kind
from dsv4.config_json import write
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools, PoolSizes, init_pools, sequence_bytes
from dsv4.tree import paths
from runtime.assemble import Row, assemble

CONTEXT = 512  # tokens
PAGES = 1 + 8 * 6


def seconds(fn: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def paired(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> list[float]:
    """Median seconds of both, called in turn after one warm-up each."""
    ours(), theirs()
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    return [statistics.median(t) for t in zip(*times, strict=True)]


def peer(cfg: Config, params: Params, dtype: torch.dtype) -> DeepseekV4ForCausalLM:
    """transformers' model with the very same weights."""
    theirs = DeepseekV4ForCausalLM(DeepseekV4Config(**write(cfg))).to(dtype).eval()
    state = theirs.state_dict()
    ours = paths(params)
    for name, leaf in paths(table.spec(cfg)).items():
        target = state[leaf.hf]
        if leaf.hf_rows is not None:
            target = target[:, slice(*leaf.hf_rows)]
        target.copy_(ours[name].reshape(target.shape))
    return theirs


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """Read bandwidth (bytes/s) and GEMM peak (FLOP/s) of this machine, best of several."""
    matrix = torch.ones(2**30 // (4096 * dtype.itemsize), 4096, dtype=dtype)
    vector = torch.ones(4096, dtype=dtype)
    bandwidth = 2**30 / min(seconds(lambda: matrix @ vector) for _ in range(5))
    a = torch.ones(2048, 2048, dtype=dtype)
    peak = 2 * 2048**3 / min(seconds(lambda: a @ a) for _ in range(5))
    return bandwidth, peak


def linear_flops(cfg: Config) -> float:
    """FLOPs per token of all matrix products with weights, logits excluded. Spec section 17."""
    d, c = cfg.dim, cfg.head_dim
    hc, o = cfg.heads * c, cfg.o_rank
    total = 0
    for plan in cfg.plans:
        total += cfg.q_rank * d + hc * cfg.q_rank + c * d + o * hc + d * cfg.o_groups * o
        total += 48 * cfg.streams * d + cfg.experts * d + 3 * d * cfg.expert_dim * (cfg.topk + 1)
        total += 2 * plan.overlap * c * d if plan.rate else 0
        if plan.kind is Kind.CSA:
            total += 4 * cfg.index_dim * d
    return 2.0 * total


def attention_flops(cfg: Config, context: int) -> float:
    """FLOPs of one query's attention at a context length. Spec section 17."""
    keys = 0
    for plan in cfg.plans:
        keys += min(cfg.window, context)
        entries = context // plan.rate if plan.rate else 0
        keys += min(cfg.index_topk, entries) if plan.kind is Kind.CSA else entries
    return 4.0 * cfg.heads * cfg.head_dim * keys


def step_bytes(cfg: Config, params: Params, seqs: int) -> float:
    """Bytes a decode step must read: weights once, chosen experts once, each sequence's caches."""
    named = paths(params)
    total = 0.0
    hit = 1 - (1 - cfg.topk / cfg.experts) ** seqs  # share of experts touched, uniform routing
    for name, t in named.items():
        if name == "embed" or name.endswith("tid2eid"):
            continue
        routed = ".ffn.w" in name
        total += t.numel() * t.element_size() * (hit if routed else 1.0)
    held = sequence_bytes(cfg, CONTEXT, params.embed.dtype)
    return total + seqs * (sum(held.values()) - held["open inputs"])


class Ours:
    """Our side: one step over fresh pools, or over pools that hold the context."""

    def __init__(self, cfg: Config, params: Params) -> None:
        self.cfg, self.params, self.ctx = cfg, params, Ctx(cfg, ops=EAGER.ops)
        self.sizes = PoolSizes(history_pages=PAGES, window_pages=PAGES, slots=9)
        self.pools: Pools = init_pools(cfg, self.sizes, params.embed.dtype)

    def rows(self, ids: torch.Tensor, start: int) -> list[Row]:
        """One row per sequence, six pages each."""
        out = []
        for i, tokens in enumerate(ids.tolist()):
            pages = list(range(1 + 6 * i, 7 + 6 * i))[: -(-(start + len(tokens)) // 128)]
            out.append(Row(tokens, start, i + 1, pages, pages))
        return out

    def run(self, ids: torch.Tensor, start: int, block: int) -> torch.Tensor:
        """Logits of the last token of each sequence."""
        batch = assemble(self.rows(ids, start), self.cfg, page_tokens=128, block=block)
        out, self.pools = model.step(self.params, self.pools, batch, self.ctx)
        return out.logits


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="bench_100m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    cfg = config.preset(args.config)
    generator = torch.Generator().manual_seed(0)
    params = table.init(cfg, generator, dtype)
    ours, theirs = Ours(cfg, params), peer(cfg, params, dtype)
    prompt = torch.randint(2, cfg.vocab, (8, CONTEXT), generator=generator)
    after = torch.randint(2, cfg.vocab, (8, 1), generator=generator)
    result: dict[str, object] = {"config": args.config, "dtype": args.dtype}
    with torch.no_grad():
        bandwidth, peak = limits(dtype)
        result["read GB/s"], result["GEMM GFLOP/s"] = bandwidth / 1e9, peak / 1e9
        mean = sum(attention_flops(cfg, t) for t in range(1, CONTEXT + 1)) / CONTEXT
        flops = CONTEXT * (linear_flops(cfg) + mean)
        t = paired(
            lambda: ours.run(prompt[:1], 0, args.block),
            lambda: theirs(prompt[:1], use_cache=True, logits_to_keep=1),
            args.rounds,
        )
        result["prefill 512"] = line(t, CONTEXT, flops / peak)
        for seqs in (1, 8):
            ours.run(prompt[:seqs], 0, args.block)
            held = theirs(prompt[:seqs], use_cache=True, logits_to_keep=1).past_key_values
            # Each call appends one token to the peer's cache: contexts drift by a few tokens.
            t = paired(
                lambda n=seqs: ours.run(after[:n], CONTEXT, 1),
                lambda n=seqs, kv=held: theirs(after[:n], past_key_values=kv, use_cache=True),
                3 * args.rounds,
            )
            result[f"decode batch {seqs}"] = line(
                t, seqs, step_bytes(cfg, params, seqs) / bandwidth
            )
    print(json.dumps(result, indent=1))


def line(times_s: list[float], tokens: int, limit_s: float) -> dict[str, float]:
    """Rates of both sides, their ratio, and the fraction of the machine's limit we reach."""
    mine, peers = times_s
    return {
        "ours tok/s": round(tokens / mine, 1),
        "transformers tok/s": round(tokens / peers, 1),
        "ratio": round(peers / mine, 2),
        "fraction of limit": round(limit_s / mine, 3),
    }


if __name__ == "__main__":
    main()
