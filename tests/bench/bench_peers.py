"""Our speed on the CPU against what a user would pick instead, and against the machine's limits.

    python -m tests.bench.bench_peers [--config NAME ...] [--cases short|default|full|CASE ...]
        [--vllm-python PATH] [--backend eager] [--threads 2] [--rounds 5] [--json FILE]

Peers: vLLM's own CPU DeepSeek V4 (from the virtual environment whose python `--vllm-python` names)
and transformers in eager mode. All load one checkpoint with random weights in bfloat16, each in a
process of its own; they must agree on the logits of a prompt and of tokens decoded after it before
they are timed (`agree.py`). Rounds go around: one sample of each contestant in turn. Ratios are
paired: medians over the rounds of peer's seconds over ours in that round. The clock holds what a
model does from its inputs to its logits: no scheduling, no sampling, no assembling of a step.

The limits are measured in the same run (`machine.py`): for decode, the bytes a step must move over
the read bandwidth; for prefill, its operations over the GEMM peak (`work.py`).
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dsv4 import config, config_json, table
from dsv4.config import Config
from runtime.save import save
from tests.bench import agree, machine, work
from tests.bench.agree import Agreement
from tests.bench.case import DEFAULT, FULL, SHORT, Case, longest, parse
from tests.bench.contestant import Remote
from tests.bench.machine import Limits
from tests.bench.peer_vllm import environment

TOKEN, STEPS = 77, 5  # of the check: past the boundary of a group
SETS = {"short": SHORT, "default": DEFAULT, "full": FULL}
REST_S = 0.2  # between contestants, so that threads of the last one are asleep
DTYPE = torch.bfloat16
Check = tuple[dict[str, Agreement], dict[str, float]]  # by contestant, and by control


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One case: seconds per step of each contestant, in rounds, and why others have none."""

    case: Case
    samples: dict[str, list[dict[str, float]]]
    absent: dict[str, str]

    def seconds(self, name: str) -> float:
        """Median seconds per step."""
        return statistics.median(s["step_s"] for s in self.samples[name])

    def rate(self, name: str) -> float:
        """Tokens per second."""
        return self.case.step_tokens / self.seconds(name)

    def ratios(self, peer: str) -> list[float]:
        """Peer's seconds over ours, round by round."""
        pairs = zip(self.samples[peer], self.samples["ours"], strict=True)
        return [theirs["step_s"] / ours["step_s"] for theirs, ours in pairs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All that was found out about one config."""

    name: str
    cfg: Config
    told: dict[str, dict[str, Any]]
    missing: dict[str, str]  # contestants that did not start or do not agree, and why
    checks: dict[int, Check]  # by tokens of the prompt
    timings: list[Timing]
    limits: Limits


def checked(cases: list[Case]) -> list[int]:
    """Tokens of the prompts of the check; with long cases also one in which the indexer chooses."""
    return [700, 2300] if longest(cases) > 2304 else [700]


def checkpoint(cfg: Config, folder: Path) -> None:
    """One checkpoint for everybody: official names, bfloat16, random weights."""
    params = table.init(cfg, torch.Generator().manual_seed(0), DTYPE)
    save(params, cfg, folder, dtype=DTYPE)
    (folder / "config.json").write_text(json.dumps(config_json.write(cfg)))


def start(args: argparse.Namespace, folder: Path, cases: list[Case]) -> dict[str, Remote]:
    """All contestants, each in its process, ours first."""
    threads = str(args.threads)
    env = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}

    def remote(name: str, python: str, *rest: str, more: dict[str, str] | None = None) -> Remote:
        module = f"tests.bench.{'ours' if name == 'ours' else 'peer_' + name}"
        command = [python, "-m", module, str(folder), *rest]
        return Remote(name, command, {**env, **(more or {})}, folder / f"{name}.log")

    own = ["--threads", threads, "--backend", args.backend]
    own += ["--chunk", str(args.chunk), "--block", str(args.block)]
    remotes = {"ours": remote("ours", sys.executable, *own)}
    if args.vllm_python:
        most = max(c.batch for c in cases)
        most_tokens = max(longest(cases), checked(cases)[-1] + STEPS + 1)
        room = ["--longest", str(most_tokens), "--seqs", str(most)]
        more = environment(args.threads, str(folder / "scratch"))
        remotes["vllm"] = remote("vllm", args.vllm_python, *room, more=more)
    remotes["transformers"] = remote("transformers", sys.executable, "--threads", threads)
    return remotes


def greet(remotes: dict[str, Remote], missing: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What each says of itself; those that cannot start go to `missing`."""
    told = {}
    for name, remote in list(remotes.items()):
        try:
            told[name] = remote.ask("hello")
        except RuntimeError as error:
            if name == "ours":
                raise
            missing[name] = str(error)
            remotes.pop(name).close()
    return told


def check(remotes: dict[str, Remote], cfg: Config, folder: Path, length: int) -> Check:
    """Agreement of each contestant, and distances of things that must not pass."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(2, cfg.vocab, (length,), generator=generator).tolist()
    asked = {"prompt": prompt, "token": TOKEN, "steps": STEPS}

    def logits(name: str, method: str = "logits", **more: Any) -> torch.Tensor:
        file = str(folder / "logits.pt")
        remotes[name].ask(method, **{**asked, **more}, file=file)
        return torch.load(file)

    def reference(dtype: str, qat: bool, **more: Any) -> torch.Tensor:
        return logits("ours", "reference", dtype=dtype, qat=qat, **more)

    exact = {qat: reference("float32", qat) for qat in (False, True)}
    noise = {qat: agree.distance(reference("bfloat16", qat), exact[qat]) for qat in exact}
    found = {}
    for name in remotes:
        rounded = name == "vllm"  # its CPU kernels know fp8 caches only
        found[name] = agree.compare(logits(name), exact[rounded], noise[rounded], rounded)
    half = length // 2
    reversed_half = [*prompt[:half][::-1], *prompt[half:]]
    other = reference("float32", False, prompt=reversed_half)
    controls = {
        "first half of the prompt reversed": agree.distance(other, exact[False]),
        "caches rounded to fp8, or not": agree.distance(exact[True], exact[False]),
    }
    return found, controls


def one(remote: Remote, quiet_s: float) -> dict[str, float]:
    """One sample, and how many cores other processes used meanwhile."""
    machine.wait_quiet(quiet_s)
    before, begin = machine.busy_s(), time.perf_counter()
    found = remote.ask("run")
    wall_s = time.perf_counter() - begin
    own_s = found["cpu_s"]
    return {**found, "others": max(0.0, machine.busy_s() - before - own_s) / wall_s}


def measure(remotes: dict[str, Remote], case: Case, rounds: int, quiet_s: float) -> Timing:
    """Time one case: a warm-up of each, then rounds in turn, a different one first each time."""
    absent, ready = {}, []
    for name, remote in remotes.items():
        why = remote.ask("prepare", **dataclasses.asdict(case))
        if why is None:
            remote.ask("run")
            ready.append(name)
        else:
            absent[name] = f"not measured: {why}"
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
    for i in range(rounds):
        for name in (*ready[i % len(ready) :], *ready[: i % len(ready)]):
            time.sleep(REST_S)
            samples[name].append(one(remotes[name], quiet_s))
    for name in ready:
        remotes[name].ask("release")
    return Timing(case=case, samples=samples, absent=absent)


def bench(name: str, cases: list[Case], args: argparse.Namespace, folder: Path) -> Report:
    """Everything about one config."""
    cfg = config.preset(name)
    checkpoint(cfg, folder)
    limits = machine.measure(DTYPE)
    missing = {} if args.vllm_python else {"vllm": "not run: give --vllm-python"}
    remotes: dict[str, Remote] = {}
    with contextlib.ExitStack() as stack:
        remotes = start(args, folder, cases)
        for remote in remotes.values():
            stack.callback(remote.close)
        told = greet(remotes, missing)
        checks = {length: check(remotes, cfg, folder, length) for length in checked(cases)}
        for agreements, _ in checks.values():
            for who, agreement in agreements.items():
                if agreement.holds:
                    continue
                if who == "ours":
                    raise RuntimeError(f"our own model is wrong: {agreement.line()}")
                missing[who] = f"not timed: distance {agreement.distance:.3f}"
        for who in missing:
            if who in remotes:
                remotes.pop(who).close()
        timings = []
        for case in cases:
            timings.append(measure(remotes, case, args.rounds, args.quiet))
            limits = limits.best(machine.measure(DTYPE, tries=1))
            print(f"  {name} {case.name} done", file=sys.stderr)
    return Report(
        name=name,
        cfg=cfg,
        told=told,
        missing=missing,
        checks=checks,
        timings=timings,
        limits=limits,
    )


def share(report: Report, timing: Timing, *, held: bool) -> float:
    """Part of the machine's limit that ours reaches."""
    if timing.case.decode:
        moved = work.step_bytes(report.cfg, timing.case, DTYPE, held=held)
        return moved / report.limits.read / timing.seconds("ours")
    return work.step_flops(report.cfg, timing.case) / report.limits.gemm / timing.seconds("ours")


def peer_cells(report: Report, timing: Timing, peer: str) -> list[str]:
    """Rate and ratio of a peer, or why there are none."""
    why = report.missing.get(peer) or timing.absent.get(peer)
    if why is not None:
        return [why, ""]
    ratios = timing.ratios(peer)
    span = f"{min(ratios):.2f} .. {max(ratios):.2f}"
    return [f"{timing.rate(peer):,.0f}", f"{statistics.median(ratios):.2f} ({span})"]


def show(report: Report, args: argparse.Namespace) -> None:
    """Print one config's part: who ran and how, whether they agree, and the table."""
    gb, gf = report.limits.read / 1e9, report.limits.gemm / 1e9
    count = table.count(table.spec(report.cfg)) / 1e6
    print(f"\n### {report.name} ({count:,.0f} M parameters)\n")
    print(f"Limits measured in this run: read {gb:.1f} GB/s, bfloat16 GEMM {gf:.0f} GFLOP/s.\n")
    for name, told in report.told.items():
        print(f"- {name}: {told['versions']}, {told['threads']} threads; {told['how']}")
        for line in told["workarounds"]:
            print(f"  - made to run: {line}")
    for name, why in report.missing.items():
        print(f"- {name}: {why}")
    for length, (agreements, controls) in report.checks.items():
        print(f"\nLogits after {length:,} tokens and {STEPS} more, against ours in float32:\n")
        for name, agreement in agreements.items():
            print(f"- {name}: {agreement.line()}")
        for name, distance in controls.items():
            print(f"- for comparison, {name}: distance {distance:.4f}")
    others = [s["others"] for t in report.timings for own in t.samples.values() for s in own]
    print(f"\nTokens/s, medians of {args.rounds} rounds; ratio = ours over peer (least .. most).")
    used = {
        name: statistics.median(s["cores"] for t in report.timings for s in t.samples.get(name, []))
        for name in report.told
        if any(name in t.samples for t in report.timings)
    }
    print("Cores used: " + ", ".join(f"{name} {n:.1f}" for name, n in used.items()) + ".")
    print(
        f"Meanwhile other processes used {statistics.median(others):.1f} cores (median of samples; "
        f"most {max(others):.1f}).\n"
    )
    print("| | ours | vLLM CPU | ratio | transformers | ratio | of the machine's limit |")
    print("|---|---|---|---|---|---|---|")
    for timing in report.timings:
        cells = [timing.case.title, f"{timing.rate('ours'):,.0f}"]
        cells += peer_cells(report, timing, "vllm") + peer_cells(report, timing, "transformers")
        part = f"{share(report, timing, held=False):.2f} of GEMM peak"
        if timing.case.decode:
            held = share(report, timing, held=True)
            part = f"{share(report, timing, held=False):.2f} of reads ({held:.2f} as held)"
        print("| " + " | ".join([*cells, part]) + " |")


def record(report: Report) -> dict[str, Any]:
    """The same for machines."""
    rows = [
        {
            "case": t.case.name,
            "samples": t.samples,
            "absent": t.absent,
            "ratios": {p: t.ratios(p) for p in t.samples if p != "ours"},
            "limit_share": share(report, t, held=False),
            "flops": work.step_flops(report.cfg, t.case),
            "bytes": work.step_bytes(report.cfg, t.case, DTYPE) if t.case.decode else None,
            "bytes_held": work.step_bytes(report.cfg, t.case, DTYPE, held=True)
            if t.case.decode
            else None,
        }
        for t in report.timings
    ]
    return {
        "config": report.name,
        "limits": dataclasses.asdict(report.limits),
        "contestants": report.told,
        "missing": report.missing,
        "checks": {
            length: {"controls": controls, **{n: dataclasses.asdict(a) for n, a in found.items()}}
            for length, (found, controls) in report.checks.items()
        },
        "cases": rows,
    }


def options() -> tuple[argparse.Namespace, list[Case]]:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", nargs="+", default=["bench_100m"], help="presets")
    parser.add_argument("--cases", nargs="+", default=["default"], metavar="CASE")
    parser.add_argument("--vllm-python", metavar="PATH", help="python of an environment with vLLM")
    parser.add_argument("--backend", default="eager", help="ours")
    parser.add_argument("--chunk", type=int, default=2**20, help="ours: tokens per prefill step")
    parser.add_argument("--block", type=int, default=16, help="ours: tokens per query block")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quiet", type=float, default=0.0, metavar="S", help="wait so long for an idle machine"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    args = parser.parse_args()
    try:
        cases = [parse(c) for name in args.cases for c in SETS.get(name, (name,))]
        for name in args.config:
            config.preset(name)
    except ValueError as error:
        parser.error(str(error))
    return args, cases


def main() -> None:
    """Run everything and print it."""
    args, cases = options()
    torch.set_num_threads(args.threads)
    print(f"{time.strftime('%Y-%m-%d')}, {machine.describe()}, {args.threads} threads, bfloat16")
    records = []
    for name in args.config:
        with tempfile.TemporaryDirectory() as folder:
            report = bench(name, cases, args, Path(folder))
        show(report, args)
        records.append(record(report))
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
