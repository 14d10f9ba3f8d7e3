"""Each CPU kernel against the plain operator and against the machine's limit, in one run.

    python tests/bench/bench_ops.py [--config bench_100m] [--threads 2] [--only experts]

Plain and kernel run in turn on the same inputs; medians of the rounds. Weights are rotated through
copies larger than the caches, as a step's are. The limit of a case is the larger of the bytes it
must read over the measured read bandwidth and its FLOPs over the measured bfloat16 GEMM peak; both
are measured between the cases and the best is taken, so a noisy machine shows fractions too low.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from compiler.cpu_layout import lay_out
from compiler.cpu_ops import cpu_ops
from compiler.segments import experts_by_segment
from dsv4 import config, ops
from dsv4.config import Config
from dsv4.mesh import P
from dsv4.ops import Experts, Keys, Ops
from dsv4.params import Hyper
from dsv4.table import Leaf

BF16 = torch.bfloat16
ROTATE_BYTES = 2**28  # beyond any cache


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator at one shape: what it must move and multiply, and both forms of it."""

    name: str
    bytes: float
    flops: float
    plain: Callable[[], object]
    kernel: Callable[[], object]


def seconds(fn: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def panels(w: Tensor) -> Tensor:
    """`w` as the kernels read it."""
    leaf = Leaf(shape=tuple(w.shape), axes=P(), official="", hf="", operand=True)
    return lay_out(leaf, w, w.dtype)


class Rotation:
    """Copies of weights, another one on every call."""

    def __init__(self, *weights: Tensor) -> None:
        size = sum(w.numel() * w.element_size() for w in weights)
        self.copies = [
            [w.clone() for w in weights] for _ in range(max(2, min(200, ROTATE_BYTES // size)))
        ]
        self.at = 0

    def __call__(self) -> list[Tensor]:
        """The next copy."""
        self.at = (self.at + 1) % len(self.copies)
        return self.copies[self.at]


def products(cfg: Config, fast: Ops) -> Iterator[Case]:
    """Every projection of a layer and the head, for one token, few and many."""
    d, hc = cfg.dim, cfg.heads * cfg.head_dim
    shapes = {
        "wq_a": (cfg.q_rank, d),
        "wq_b": (hc, cfg.q_rank),
        "wkv": (cfg.head_dim, d),
        "wo_a": (cfg.o_groups, cfg.o_rank, hc // cfg.o_groups),
        "wo_b": (d, cfg.o_groups * cfg.o_rank),
        "gate": (cfg.experts, d),
        "head": (cfg.vocab, d),
    }
    for name, shape in shapes.items():
        w = torch.randn(shape).to(BF16)
        wide = name in ("gate", "head")  # float32 in the plain model, exact in bfloat16
        plain_w = Rotation(w.float() if wide else w)
        laid = Rotation(panels(w))
        plain = ops.linear_wide if wide else ops.linear
        kernel = fast.linear_wide if wide else fast.linear
        for tokens in (1, 8, 512):
            x = torch.randn(tokens, *shape[:-2], shape[-1]).to(BF16)
            yield Case(
                f"{name} {list(shape)} T={tokens}",
                w.numel() * 2,
                2.0 * tokens * w.numel(),
                lambda f=plain, x=x, r=plain_w: f(x, *r()),
                lambda f=kernel, x=x, r=laid: f(x, *r()),
            )


def experts(cfg: Config, fast: Ops) -> Iterator[Case]:
    """Routed experts; plain is the cheaper of gathers and the loop over segments."""
    shape = (cfg.experts, cfg.expert_dim, cfg.dim)
    parts = [torch.randn(shape), torch.randn(shape), torch.randn(shape).transpose(1, 2)]
    w = [(0.1 * p).to(BF16).contiguous() for p in parts]
    plain_w = Experts(*w, limit=10.0)
    fast_w = Experts(*(panels(p) for p in w), limit=10.0)
    for tokens in (1, 8, 32, 512):
        x, weights = torch.randn(tokens, cfg.dim).to(BF16), torch.rand(tokens, cfg.topk)
        slots = Rotation(*(torch.rand(tokens, cfg.experts).topk(cfg.topk, -1).indices,))
        for c in slots.copies:
            c[0] = torch.rand(tokens, cfg.experts).topk(cfg.topk, -1).indices
        hit = statistics.mean(len(c[0].unique()) for c in slots.copies[:20])
        plain = ops.experts if tokens * cfg.topk < cfg.experts else experts_by_segment
        yield Case(
            f"experts {list(shape)} T={tokens}",
            hit * 3 * cfg.dim * cfg.expert_dim * 2,
            6.0 * cfg.dim * cfg.expert_dim * tokens * cfg.topk,
            lambda f=plain, x=x, s=weights, r=slots: f(x, s, *r(), plain_w),
            lambda x=x, s=weights, r=slots: fast.experts(x, s, *r(), fast_w),
        )


def attention(cfg: Config, fast: Ops) -> Iterator[Case]:
    """Decode of 1 and 8 sequences, and blocks of 16 queries; a window and compressed entries."""
    c, h = cfg.head_dim, cfg.heads
    for u, z, far, own, seen_by in (
        (1, 1, 128, False, 1.0),
        (8, 1, 128, False, 1.0),
        (8, 1, cfg.index_topk, True, 1.0),
        (32, 16, 128, False, 1.0),
        (32, 16, cfg.index_topk, True, 1.0),
        (32, 16, 4 * cfg.index_topk, False, 0.25),
    ):
        near = cfg.window + z - 1
        pools = [
            torch.randn(rows, c).to(BF16) for rows in (u * near, u * far if z == 1 else 4 * far)
        ]
        slide = torch.arange(near) - torch.arange(z)[:, None]
        seen = ((slide >= 0) & (slide < cfg.window)).expand(u, z, near)
        shape = (u, z, far) if own else (u, far)
        keys = (
            Keys(pools[0], torch.arange(u * near).reshape(u, near), seen.contiguous()),
            Keys(pools[1], torch.randint(0, pools[1].shape[0], shape),
                 torch.rand(u, z, far) < seen_by),
        )  # fmt: skip
        q, sink = torch.randn(u * z, h, c).to(BF16), torch.zeros(h)
        place = torch.arange(u * z)
        spots = (place.reshape(u, z), place)
        read = u * (near + (z * far if own else far)) * c * 2
        kind = " own" if own else f" seen {seen_by:.0%}"
        yield Case(
            f"attend U={u} Z={z} far={far}{kind}",
            read,
            4.0 * u * z * h * c * (cfg.window + seen_by * far),
            lambda q=q, k=keys, s=sink, p=spots: ops.attend(q, *k, s, p),
            lambda q=q, k=keys, s=sink, p=spots: fast.attend(q, *k, s, p),
        )


def indexing(cfg: Config, fast: Ops) -> Iterator[Case]:
    """The router's choice, and index scores and choice over a context of 8,192 tokens."""
    entries, i, j = 2048, cfg.index_heads, cfg.index_dim
    pool = torch.randn(entries, j).to(BF16)
    for u, z in ((1, 1), (8, 16)):
        q, w = torch.randn(u * z, i, j).to(BF16), torch.randn(u * z, i)
        blocks = torch.arange(u * z).reshape(u, z)
        seen = torch.ones(u, z, entries, dtype=torch.bool)
        keys = Keys(pool, torch.arange(entries).expand(u, entries).contiguous(), seen)
        yield Case(
            f"scores U={u} Z={z} entries={entries}",
            u * entries * j * 2,
            2.0 * u * z * i * j * entries,
            lambda q=q, w=w, k=keys, b=blocks: ops.scores(q, w, k, b),
            lambda q=q, w=w, k=keys, b=blocks: fast.scores(q, w, k, b),
        )
    router, entry = (cfg.experts, cfg.topk), (entries, cfg.index_topk)
    for rows, (count, k) in ((1, router), (512, router), (1, entry), (128, entry)):
        s = torch.randn(rows, count)
        yield Case(
            f"pick {k} of {count}, {rows} rows", s.numel() * 4, 0.0,
            lambda s=s, k=k: ops.pick(s, k), lambda s=s, k=k: fast.pick(s, k),
        )  # fmt: skip


def streams(cfg: Config, fast: Ops) -> Iterator[Case]:
    """Hyper-connections: coefficients, into the sublayer and out of it."""
    m, d = cfg.streams, cfg.dim
    count = (2 + m) * m
    p = Hyper(fn=torch.randn(count, m * d) * 0.02, base=torch.zeros(count), scale=torch.ones(3))
    for tokens in (1, 8, 512):
        h, y = torch.randn(tokens, m, d).to(BF16), torch.randn(tokens, d).to(BF16)
        pre, post, comb = ops.PLAIN.mix(p, h, cfg)
        moved = h.numel() * 2
        yield Case(
            f"mix T={tokens}", moved + p.fn.numel() * 4, 2.0 * tokens * p.fn.numel(),
            lambda h=h: ops.PLAIN.mix(p, h, cfg), lambda h=h: fast.mix(p, h, cfg),
        )  # fmt: skip
        yield Case(
            f"collapse T={tokens}", moved, 0.0,
            lambda h=h, c=pre: ops.PLAIN.collapse(h, c), lambda h=h, c=pre: fast.collapse(h, c),
        )  # fmt: skip
        yield Case(
            f"expand T={tokens}", moved, 0.0,
            lambda a=(y, h, post, comb): ops.PLAIN.expand(*a),
            lambda a=(y, h, post, comb): fast.expand(*a),
        )  # fmt: skip


class Limits:
    """Best read bandwidth (bytes/s) and GEMM peak (FLOP/s) seen so far."""

    def __init__(self) -> None:
        self.big, self.square = (
            torch.ones(2**27, dtype=torch.int64),
            torch.ones(2048, 2048).to(BF16),
        )
        self.bandwidth = self.peak = 0.0

    def look(self) -> None:
        """Measure once more."""
        self.bandwidth = max(self.bandwidth, 2**30 / seconds(self.big.sum))
        self.peak = max(self.peak, 2 * 2048**3 / seconds(lambda: self.square @ self.square))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="bench_100m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--build", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cfg = config.preset(args.config)
    rows, limits = [], Limits()
    with tempfile.TemporaryDirectory() as room, torch.no_grad():
        fast = cpu_ops(args.build or Path(room))
        for kind in (products, experts, attention, indexing, streams):
            for case in kind(cfg, fast):
                if args.only not in case.name:
                    continue
                limits.look()
                repeat = max(1, int(2e-3 / max(seconds(case.kernel), 1e-5)))

                def several(fn: Callable[[], object], n: int = repeat) -> float:
                    return seconds(lambda: [fn() for _ in range(n)]) / n

                case.plain()
                turns = [(several(case.plain), several(case.kernel)) for _ in range(args.rounds)]
                rows.append((case, *(statistics.median(t) for t in zip(*turns, strict=True))))
    print(f"read {limits.bandwidth / 1e9:.1f} GB/s, GEMM {limits.peak / 1e9:.0f} GFLOP/s")
    print(f"{'case':44s} {'plain us':>9s} {'kernel us':>9s} {'gain':>6s} {'of limit':>8s}")
    for case, plain, kernel in rows:
        limit = max(case.bytes / limits.bandwidth, case.flops / limits.peak)
        bound = "read" if case.bytes / limits.bandwidth >= case.flops / limits.peak else "GEMM"
        print(
            f"{case.name:44s} {plain * 1e6:9.1f} {kernel * 1e6:9.1f} {plain / kernel:6.1f} "
            f"{limit / kernel:7.0%} {bound} {case.bytes / kernel / 1e9:6.1f} GB/s "
            f"{case.flops / kernel / 1e9:6.0f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
