"""`dsv4 explain`: what would run, and why."""

import argparse
import json


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
        )
        text = explain_text.text
    print(json.dumps(facts, indent=2) if args.json else text(facts))
    return 0
