"""`dsv4 explain`: what would run, and why."""

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

# Fields of `runtime.pools.PoolOptions`.
_OPTIONS = {
    "max_model_len": "tokens one sequence must be able to reach; default: the model's positions",
    "slots": "sequences that run at once; default: what an eighth of the memory pays for, up to 64",
    "chunk": "most prompt tokens of one sequence per step; default: 512",
    "drafts": "tokens drafted ahead; default: 0, and no caches for the draft module",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `dsv4 explain`."""
    parser.add_argument(
        "model",
        nargs="?",
        help="model directory, or flash, pro, tiny, bench_1b, bench_100m; default: the built-in",
    )
    parser.add_argument("--architecture", help="instead of the one that config.json names")
    parser.add_argument("--backend", default="eager", help="default: %(default)s")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "float64")
    )
    parser.add_argument("--json", action="store_true", help="the same facts for machines")
    pools = parser.add_argument_group("what an amount of memory serves")
    pools.add_argument(
        "--memory",
        metavar="SIZE",
        help="for the caches alone: 8GiB, 500MB, or a fraction of free memory, 0.5",
    )
    for name, told in _OPTIONS.items():
        pools.add_argument(f"--{name.replace('_', '-')}", metavar="N", type=int, help=told)
    parser.add_argument(
        "--registry", action="store_true", help="list the architectures this process knows"
    )


def run(args: argparse.Namespace) -> int:
    """Print the facts. Raises ValueError as `explain`."""
    # Late: `dsv4 --help` and the other commands do without.
    import torch

    from registry import explain, explain_text

    if args.registry:
        facts, text = explain.names(), explain_text.names_text
    else:
        facts = explain.explain(
            args.model,
            architecture=args.architecture,
            backend=args.backend,
            dtype=getattr(torch, args.dtype),
            plan=_plan(args),
        )
        text = explain_text.text
    print(json.dumps(facts, indent=2) if args.json else text(facts))
    return 0


def _plan(args: argparse.Namespace) -> Callable[..., Any] | None:
    """What `explain` plans pools by; None without --memory."""
    from runtime.memory import read_memory
    from runtime.pools import PoolOptions, plan_pools

    asked = {name: getattr(args, name) for name in _OPTIONS}
    asked = {name: value for name, value in asked.items() if value is not None}
    if args.memory is None:
        for name in asked:
            raise ValueError(f"--{name.replace('_', '-')} needs --memory, as --memory 8GiB")
        return None
    memory, options = read_memory(args.memory), PoolOptions(**asked)
    return functools.partial(plan_pools, memory=memory, options=options)
