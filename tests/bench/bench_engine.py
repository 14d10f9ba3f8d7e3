"""What the engine costs, and what its prefix cache and drafts bring. On the CPU, in one run.

    python tests/bench/bench_engine.py [host|prefix|drafts ...] [--threads 2]

host    256 requests that decode at about 600 tokens of context each (random weights, bench_100m,
        bfloat16): milliseconds per step of planning, assembling and committing, beside the model's
        own step, in turn in the same steps. Goal: 1 ms in all.
prefix  time to first token of a prompt of 2,048 tokens, cold and then once more, in turn.
drafts  the built-in trained model, greedy, without drafts and with 1 .. 3, in turn: tokens per
        step of a request, tokens per second, and the share of drafts accepted.

Medians of the rounds. Not measured here: compiled programs, other machines.
"""

import argparse
import itertools
import statistics
import time

import torch

from dsv4 import config
from registry.build import build
from registry.builtin_model import path
from registry.model import CompiledModel
from registry.tokenizer import load
from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.pages import fit
from runtime.request import Limits, Request

RUNNING = 256
CONTEXT = 600  # tokens
PROMPT = 2048  # tokens
DEPTHS = (0, 1, 2, 3)  # drafts
NEW = 64  # tokens
TEXTS = (
    "The history of the town begins",
    "In the morning she went down to the river and",
    "There are three reasons why",
    "He looked at the letter again.",
)


def prompt(length: int, seed: int, vocab: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


def host(model: CompiledModel, rounds: int) -> None:
    """Host cost of a step at 256 running requests, beside the model's step."""
    cfg = model.cfg
    sizes = fit(cfg, [CONTEXT + 256] * RUNNING, most=512)
    engine = Engine(model, sizes, chunk=512, budget=4096)
    limits = Limits(max_new_tokens=256, ignore_eos=True)
    for i in range(RUNNING):
        engine.add(Request(prompt=prompt(CONTEXT, i % 8, cfg.vocab), limits=limits))
    scheduler, runner = engine._scheduler, engine._runner
    times: list[tuple[float, ...]] = []
    while len(times) < rounds + 3:
        marks = [time.perf_counter()]
        plan = scheduler.plan()
        assert plan is not None
        marks.append(time.perf_counter())
        runner._batch(plan)
        marks.append(time.perf_counter())
        ran = runner.run(plan)
        marks.append(time.perf_counter())
        scheduler.commit(plan, ran)
        marks.append(time.perf_counter())
        if plan.decode and len(plan.work) == RUNNING:
            times.append(tuple(b - a for a, b in itertools.pairwise(marks)))
    plan_s, batch_s, run_s, commit_s = (statistics.median(t) for t in zip(*times[3:], strict=True))
    host_s, step_s = plan_s + batch_s + commit_s, run_s - batch_s
    print(f"host: {RUNNING} running requests, one row each, {CONTEXT} tokens of context")
    for name, seconds in (("plan", plan_s), ("assemble", batch_s), ("commit", commit_s)):
        print(f"  {name:9} {seconds * 1e3:8.3f} ms")
    print(f"  {'sum':9} {host_s * 1e3:8.3f} ms  (goal 1 ms)")
    print(f"  {'step':9} {step_s * 1e3:8.1f} ms  sum / step = {host_s / step_s:.5f}")


def prefix(model: CompiledModel, rounds: int) -> None:
    """Time to first token, cold and after a hit."""
    cfg = model.cfg
    engine = Engine(model, fit(cfg, [PROMPT + 8] * 2, most=512), chunk=512)
    cold, hit = [], []
    for i in range(rounds + 1):
        ids = prompt(PROMPT, 100 + i, cfg.vocab)
        for seen in (cold, hit):
            (r,) = engine.generate([Request(prompt=ids, limits=Limits(max_new_tokens=1))])
            seen.append(r.first_s - r.added_s)
    report = engine.cache_report(r)
    cold_s, hit_s = statistics.median(cold[1:]), statistics.median(hit[1:])
    print(f"prefix: a prompt of {PROMPT} tokens, time to first token")
    print(f"  cold {cold_s * 1e3:8.1f} ms")
    print(f"  hit  {hit_s * 1e3:8.1f} ms  ratio {cold_s / hit_s:.1f}; {report.why}")


def drafts(rounds: int) -> None:
    """Greedy text of the built-in model, with and without drafts."""
    model, words = build(path(), drafts=True), load(path())
    assert words is not None
    assert model.cfg.bos is not None
    prompts = [[model.cfg.bos, *words.encode(text)] for text in TEXTS]
    limits = Limits(max_new_tokens=NEW, ignore_eos=True)
    for at_once in (1, len(TEXTS)):
        seen: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        told: dict[int, str] = {}
        outputs: dict[int, list[list[int]]] = {}
        for _ in range(rounds + 1):
            for depth in seen:
                sizes = fit(model.cfg, [256] * at_once, most=64, drafts=depth)
                engine = Engine(
                    model,
                    sizes,
                    chunk=64,
                    drafts=Drafts(depth=depth, adaptive=False) if depth else None,
                )
                made = engine.generate([Request(prompt=ids, limits=limits) for ids in prompts])
                m, acceptance = engine.meter, engine.acceptance
                seen[depth].append(m.decode_tokens / m.decode_s)
                outputs[depth] = [r.output for r in made]
                if acceptance is not None:
                    shares = " ".join(f"{s:.0%}" for s in acceptance.shares)
                    told[depth] = f"{acceptance.mean_length:.2f} tokens/step, accepted {shares}"
        print(f"drafts: built-in model, greedy, {at_once} at once; {len(TEXTS)} x {NEW} tokens")
        plain = statistics.median(seen[0][1:])
        for depth, rates in seen.items():
            rate = statistics.median(rates[1:])
            same = "same tokens" if outputs[depth] == outputs[0] else "OTHER TOKENS"
            print(
                f"  {depth} {rate:7.1f} tokens/s, ratio {rate / plain:.2f}, {same}; "
                f"{told.get(depth, '1.00 tokens/step')}"
            )


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description="What the engine costs and brings, on the CPU")
    parser.add_argument("parts", nargs="*", metavar="PART", help="host, prefix, drafts; all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    parts = args.parts or ["host", "prefix", "drafts"]
    if not set(parts) <= {"host", "prefix", "drafts"}:
        parser.error(f"parts are {parts}; allowed: host, prefix, drafts")
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, bfloat16, medians of {args.rounds}")
    if {"host", "prefix"} & set(parts):
        model = build(config.preset("bench_100m"), seed=0, drafts=False)
        if "host" in parts:
            host(model, args.rounds)
        if "prefix" in parts:
            prefix(model, args.rounds)
    if "drafts" in parts:
        drafts(args.rounds)


if __name__ == "__main__":
    main()
