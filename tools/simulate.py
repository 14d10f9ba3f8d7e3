"""Replays requests over data-parallel ranks in lock step, and compares balance policies.

    python -m tools.simulate --ranks 8 --policy all --arrivals poisson,burst,tail --rate 26

Decisions are those of `runtime.balance_dp`; `tools.lockstep` says what is simulated and
`tools.arrivals` what arrives. The figures order policies; they predict no machine.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from runtime.balance_dp import (
    Costs,
    align,
    always,
    frozen_when_full,
    least_work,
    shortest_queue,
)
from tools.arrivals import KINDS, Load, draw, read
from tools.lockstep import Machine, Policy, Run, simulate

POLICIES = (
    Policy("open", shortest_queue, always),
    Policy("seed", shortest_queue, frozen_when_full),
    Policy("seed+work", least_work, frozen_when_full),
    Policy("work", least_work, always),
    Policy("align", shortest_queue, align),
    Policy("align+work", least_work, align),
)


def weighted_percentile(values: np.ndarray, weights: np.ndarray, percent: float) -> float:
    """The smallest value with at least `percent` of the weight at or below it; 0 of nothing."""
    order = values.argsort()
    total = weights[order].cumsum()
    if not len(total) or total[-1] == 0:
        return 0.0
    return float(values[order][np.searchsorted(total, percent / 100 * total[-1])])


def report(run: Run, costs: Costs) -> dict[str, float]:
    """The columns of the table by name.

    tok/s: output tokens by the time from the first arrival to the last token. TTFT: from arrival to
    the first token. TPOT: mean time of a request's further tokens. ITL: of all gaps between tokens.
    max/mean: the largest work of a rank by the mean, over steps with work. idle: share of time
    that a rank waits for the slowest one. frozen: share of steps in which a gate held back a rank.
    """
    at = np.array([a.arrival_s for a in run.arrivals])
    new = np.array([a.new_tokens for a in run.arrivals])
    ttft = run.first_s - at
    tpot = 1e3 * ((run.end_s - run.first_s) / np.maximum(new - 1, 1))[new > 1]
    tpot = tpot if len(tpot) else np.zeros(1)
    prompt = np.array([s.prompt_tokens for s in run.steps])
    rows = np.array([[x.decoding for x in s.states] for s in run.steps])
    work = costs.prefill_ns * prompt + costs.decode_ns * rows
    most, mean = work.max(1), work.mean(1)
    busy = most > 0
    uneven = most[busy] / mean[busy] if busy.any() else np.ones(1)
    seconds = np.array([s.seconds for s in run.steps])
    shut = [
        any(x.waiting and not x.full if s.decision.prefill else x.ready for x in s.states)
        for s in run.steps
        if not s.decision.admit
    ]
    return {
        "tok/s": float(new.sum() / (run.end_s.max() - at[0])),
        "TTFT50 s": float(np.percentile(ttft, 50)),
        "TTFT99 s": float(np.percentile(ttft, 99)),
        "TPOT50 ms": float(np.percentile(tpot, 50)),
        "TPOT99 ms": float(np.percentile(tpot, 99)),
        "ITL99 ms": weighted_percentile(1e3 * seconds, rows.sum(1), 99),
        "max/mean": float(uneven.mean()),
        "idle": float(1e-9 * (most - mean).sum() / seconds.sum()),
        "frozen": sum(shut) / len(run.steps),
    }


class _Parser(argparse.ArgumentParser):
    """Errors in arguments are ours: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tools.simulate",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = ", ".join(p.name for p in POLICIES)
    parser.add_argument("--policy", default="all", help=f"all, or some of: {names}")
    kinds = ", ".join(KINDS)
    parser.add_argument("--arrivals", default="poisson", help=f"trace, or some of: {kinds}")
    parser.add_argument("--trace", type=Path, help="JSON lines, for --arrivals trace")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=1, help="means over so many seeds")
    for record in (Load(), Machine(), Costs()):
        for f in dataclasses.fields(record):
            value = getattr(record, f.name)
            if isinstance(value, int | float):
                flag = "--" + f.name.replace("_", "-")
                told = f"of {type(record).__name__}, see its definition"
                parser.add_argument(flag, type=type(value), default=value, help=told)
    return parser


def chosen(names: str, known: Sequence[str], flag: str) -> list[str]:
    """The names in a list with commas, each of `known`. Raises ValueError for another."""
    found = names.split(",")
    for name in found:
        if name not in known:
            raise ValueError(f"{flag} is {name!r}; it must be of {', '.join(known)}")
    return found


def _taken(record: Any, args: argparse.Namespace) -> dict[str, Any]:
    names = (f.name for f in dataclasses.fields(record))
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def lines(args: argparse.Namespace) -> Iterator[str]:
    """The table. Raises ValueError for arguments that make no sense."""
    machine = Machine(**_taken(Machine, args), costs=Costs(**_taken(Costs, args)))
    load = Load(**_taken(Load, args))
    by_name = {p.name: p for p in POLICIES}
    picked = list(by_name) if args.policy == "all" else chosen(args.policy, [*by_name], "--policy")
    kinds = chosen(args.arrivals, [*KINDS, "trace"], "--arrivals")
    if ("trace" in kinds) != (args.trace is not None):
        raise ValueError("--arrivals trace and --trace FILE go together; give both or neither")
    if args.seeds < 1 or args.seed < 0:
        raise ValueError(
            f"--seeds is {args.seeds} and --seed is {args.seed}; "
            f"they must be at least 1 and at least 0"
        )
    head = None
    for kind in kinds:
        seeds = range(args.seed, args.seed + (1 if kind == "trace" else args.seeds))
        replays = [read(args.trace) if kind == "trace" else draw(kind, load, s) for s in seeds]
        for name in picked:
            rows = [report(simulate(a, machine, by_name[name]), machine.costs) for a in replays]
            if head is None:
                head = " ".join(f"{column:>9}" for column in rows[0])
                yield f"{'arrivals':8} {'policy':10} {head}"
            means = [sum(row[column] for row in rows) / len(rows) for column in rows[0]]
            figures = " ".join(f"{m:9.0f}" if m >= 1000 else f"{m:9.2f}" for m in means)
            yield f"{kind:8} {name:10} {figures}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = _parser()
    try:
        for line in lines(parser.parse_args(argv)):
            print(line, flush=True)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
