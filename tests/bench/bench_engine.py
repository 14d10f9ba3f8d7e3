"""What the engine costs, and what its prefix cache and drafts bring. On the CPU, in one run.

    python tests/bench/bench_engine.py [host|prefix|drafts ...] [--threads 2]

host    256 requests that decode at about 600 tokens of context each (random weights, bench_100m,
        bfloat16): milliseconds per step of planning, assembling and committing. "between": beside
        the model's own step on this CPU, which leaves the host's data cold; "loop": with an answer
        at hand instead, as with a model on another device. Goal: 1 ms in all.
prefix  time to first token of a prompt of 2,048 tokens, cold and then once more, in turn.
drafts  the built-in trained model, greedy, without drafts and with 1 .. 3, in turn: tokens per
        step of a request, tokens per second, and the share of drafts accepted.

Medians of the rounds. Not measured here: compiled programs, other machines.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from dsv4 import config
from registry.build import build
from registry.builtin_model import path
from registry.model import CompiledModel
from registry.tokenizer import load
from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.pages import fit
from runtime.plan import Plan, Ran
from runtime.request import Limits, Request, Sampled

RUNNING = 256
NEW_TOKENS = 512  # of a running request, at most
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
    sizes = fit(cfg, [CONTEXT + NEW_TOKENS] * RUNNING, most=512)
    engine = Engine(model, sizes, chunk=512, budget=4096)
    limits = Limits(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for i in range(RUNNING):
        engine.add(Request(prompt=prompt(CONTEXT, i % 8, cfg.vocab), limits=limits))
    runner = engine._runner
    between = _host_costs(engine, rounds, runner.run)

    def at_hand(plan: Plan) -> list[Ran]:
        return [Ran([Sampled(5)] * w.wanted) for w in plan.work]

    loop = _host_costs(engine, 10 * rounds, at_hand)
    print(f"host: {RUNNING} running requests, one row each, {CONTEXT} tokens of context")
    print("               between       loop")
    for i, name in enumerate(("plan", "assemble", "commit")):
        print(f"  {name:9} {between[i] * 1e3:8.3f} ms {loop[i] * 1e3:7.3f} ms")
    host_s, step_s = sum(between[:3]), between[3] - between[1]
    print(f"  {'sum':9} {host_s * 1e3:8.3f} ms {sum(loop[:3]) * 1e3:7.3f} ms  (goal 1 ms)")
    print(f"  {'step':9} {step_s * 1e3:8.1f} ms  sum / step = {host_s / step_s:.5f}")


def _host_costs(
    engine: Engine, rounds: int, run: Callable[[Plan], list[Ran]]
) -> tuple[float, float, float, float]:
    """Median seconds to plan, assemble, commit and run (which assembles again) decode steps."""
    scheduler, runner = engine._scheduler, engine._runner
    times: list[tuple[float, float, float, float]] = []
    while len(times) < rounds + 3:
        begin = time.perf_counter()
        plan = scheduler.plan()
        assert plan is not None
        planned = time.perf_counter()
        runner._batch(plan)
        assembled = time.perf_counter()
        ran = run(plan)
        done = time.perf_counter()
        scheduler.commit(plan, ran)
        end = time.perf_counter()
        if plan.decode and len(plan.work) == RUNNING:
            times.append((planned - begin, assembled - planned, end - done, done - assembled))
    a, b, c, d = (statistics.median(t) for t in zip(*times[3:], strict=True))
    return a, b, c, d


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
