"""Where the time of our eager step goes: by operator of torch, and by function of ours.

    python -m tests.bench.profile_ours [--config bench_100m] [--cases prefill:2048 decode:1x512 ...]

Two passes, since each slows the other down: torch's profiler for the operators (self time, without
the operators they call), then `sys.setprofile` for our functions (own time and that of torch in
them, without other functions of ours that they call). Random weights, as `bench_peers`.
"""

import argparse
import collections
import sys
import time
from collections.abc import Callable
from types import FrameType

import torch
from torch.profiler import ProfilerActivity, profile

from dsv4 import config
from registry.build import build
from tests.bench.case import parse
from tests.bench.contestant import timed
from tests.bench.ours import ours

OURS = ("dsv4.", "compiler.", "registry.")


def operators(run: Callable[[], object], count: int) -> dict[str, tuple[float, float]]:
    """Self milliseconds and calls per step, by operator."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(count):
            run()
    return {
        e.key: (e.self_cpu_time_total / 1e3 / count, e.count / count) for e in seen.key_averages()
    }


def functions(run: Callable[[], object], count: int) -> dict[str, tuple[float, float]]:
    """Own milliseconds and calls per step, by function of ours."""
    own: dict[str, float] = collections.defaultdict(float)
    calls: dict[str, int] = collections.defaultdict(int)
    stack: list[str] = []
    last = time.perf_counter()

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal last
        module = frame.f_globals.get("__name__", "")
        if event not in ("call", "return") or not module.startswith(OURS):
            return
        now = time.perf_counter()
        if stack:
            own[stack[-1]] += now - last
        last = now
        if event == "call":
            stack.append(f"{module}.{frame.f_code.co_qualname}")
            calls[stack[-1]] += 1
        elif stack:
            stack.pop()

    sys.setprofile(look)
    for _ in range(count):
        run()
    sys.setprofile(None)
    return {name: (own[name] * 1e3 / count, calls[name] / count) for name in own}


def show(title: str, found: dict[str, tuple[float, float]], most: int) -> None:
    """The largest parts and what they sum to."""
    whole = sum(ms for ms, _ in found.values())
    calls = sum(n for _, n in found.values())
    print(f"  {title}: {whole:.2f} ms per step in {calls:.0f} calls")
    for name, (ms, count) in sorted(found.items(), key=lambda item: -item[1][0])[:most]:
        print(f"    {ms / whole:5.1%} {ms:9.3f} ms {count:7.0f} x  {name}")


def main() -> None:
    """Profile each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="bench_100m")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["prefill:2048", "decode:1x512", "decode:8x512", "decode:32x512"],
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--most", type=int, default=14)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(config.preset(args.config), seed=0, drafts=False)
    for name in args.cases:
        case = parse(name)
        count = 16 if case.decode else 2
        run = ours(model, case, 2**20, args.block)
        with torch.no_grad():
            run()
            plain = min(timed(run) for _ in range(count))
            print(f"{args.config} {name}, {args.threads} threads: {plain * 1e3:.2f} ms unprofiled")
            show("operators", operators(run, count), args.most)
            show("functions", functions(run, count), args.most)


if __name__ == "__main__":
    main()
