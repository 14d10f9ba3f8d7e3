"""`dsv4 generate`: text from a model on disk."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from registry import cli_observe, cli_progress
from registry.generation_config import GENERATION_CONFIG, sampling_defaults
from registry.startup import StartUp

if TYPE_CHECKING:
    from compiler.store import Store
    from dsv4.config import Config
    from dsv4.state import PoolSizes
    from registry.cli_observe import Observation
    from registry.model import CompiledModel
    from registry.tokenizer import Tokenizer
    from runtime.engine import Engine
    from runtime.request import Logprobs, Request, Sampling

_MOST_THREADS = 1024
_AT_ONCE = 16  # prompts that run at the same time; the others wait


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `dsv4 generate`."""
    add = parser.add_argument
    add("--model", metavar="PATH", help="model directory; default: the built-in model")
    add("--prompt", metavar="TEXT", nargs="+", action="extend", help="one or more prompts")
    add(
        "--token-ids",
        metavar="1,2,3",
        nargs="+",
        action="extend",
        help="prompts as token ids, used as they are (no BOS is added)",
    )
    add("--no-bos", action="store_true", help="do not begin text prompts with the BOS token")
    add("--max-new-tokens", metavar="N", type=int, default=128, help="default: %(default)s")
    add("--temperature", metavar="T", type=float, help="0 is greedy; default: the model's, or 0")
    add("--top-k", metavar="K", type=int, help="draw from the K likeliest; 0: all")
    add("--top-p", metavar="P", type=float, help="draw from the likeliest with mass P")
    add("--min-p", metavar="P", type=float, help="relative to the likeliest")
    add("--seed", metavar="N", type=int, default=0, help="of every prompt; default: %(default)s")
    add("--stop", metavar="TEXT", action="append", default=[], help="end before TEXT; repeatable")
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    add("--chunk", metavar="N", type=int, default=512, help="prompt tokens per step [%(default)s]")
    add("--drafts", metavar="K", type=int, default=0, help="drafts per step, 0 to 8 [%(default)s]")
    add("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float64"))
    add(
        "--backend",
        default="eager",
        metavar="NAME",
        help="how steps run: eager, kernels, inductor, torchair, or auto [%(default)s]",
    )
    add("--cache-dir", metavar="DIR", help="where programs are kept; default: see dsv4 cache ls")
    add("--threads", metavar="N", type=int, help="CPU threads; default: torch's choice")
    add("--logprobs", metavar="N", type=int, help="of each token and of the N likeliest")
    add("--json", action="store_true", help="one JSON object on stdout, and nothing else")
    cli_observe.add_arguments(parser)


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """One prompt of the command line."""

    text: str | None
    ids: list[int]

    @property
    def label(self) -> str:
        shown = self.text if self.text is not None else ",".join(map(str, self.ids))
        return repr(shown if len(shown) <= 60 else shown[:57] + "...")


def _parse_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise ValueError(f"--token-ids {text!r}: write whole numbers with commas: 1,2,3") from None
    if not ids:
        raise ValueError(f"--token-ids {text!r} is empty; a prompt has at least one token")
    return ids


def _prompts(
    args: argparse.Namespace, folder: Path, tokenizer: "Tokenizer | None", bos: int | None
) -> list[_Prompt]:
    """Every prompt in token ids, texts first. Raises ValueError for an empty one."""
    out = []
    for text in args.prompt or []:
        if not text:
            raise ValueError("the prompt is empty; give it at least one character")
        if any("\ud800" <= c <= "\udfff" for c in text):  # how Python shows bytes of no encoding
            raise ValueError(f"the prompt {text!a} is not valid UTF-8")
        if tokenizer is None:
            raise ValueError(f"{folder} has no tokenizer; give the prompt as --token-ids 1,2,3")
        ids = tokenizer.encode(text)
        first = bos if bos is not None else tokenizer.bos
        if first is not None and not args.no_bos and ids[:1] != [first]:
            ids = [first, *ids]
        out.append(_Prompt(text, ids))
    return out + [_Prompt(None, _parse_ids(text)) for text in args.token_ids or []]


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for what can be seen from the arguments alone."""
    if not args.prompt and not args.token_ids:
        raise ValueError("nothing to generate from: give --prompt TEXT or --token-ids 1,2,3")
    if args.threads is not None and not 1 <= args.threads <= _MOST_THREADS:
        raise ValueError(f"--threads is {args.threads}; it must be from 1 to {_MOST_THREADS}")
    if args.chunk < 1:
        raise ValueError(f"--chunk is {args.chunk}; it must be at least 1 token")


def run(args: argparse.Namespace) -> int:
    """Generate. Raises ValueError for what the caller must change, before the model is loaded."""
    start = StartUp()
    with start.part("imports"):
        import torch

    from registry import builtin_model, tokenizer
    from registry.build import read_config, resolve
    from registry.registry import default_registry
    from runtime.request import Limits, Request

    _check(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    limits = Limits(
        max_new_tokens=args.max_new_tokens, stop=tuple(args.stop), ignore_eos=args.ignore_eos
    )
    source = args.model if args.model is not None else builtin_model.path()
    folder = Path(source)
    sampling, told = _sampling(args, folder)
    seen = cli_observe.observe(args, str(folder))
    with start.part("registry"), seen.span(3):
        cfg = resolve(read_config(source), None, default_registry()).reading.cfg
    _check_drafts(args.drafts, folder, cfg)
    words = tokenizer.load(folder)
    prompts = _prompts(args, folder, words, cfg.bos)
    requests = [
        Request(prompt=p.ids, sampling=sampling, limits=limits, logprobs=args.logprobs)
        for p in prompts
    ]
    for request in requests:
        request.check(cfg)
    model, engine = _start(args, folder, requests, words, (start, seen))
    load_s = start.ready_s
    assert load_s is not None, "the start has ended"
    if args.json:
        engine.generate(requests)
        facts = _facts(args, model, engine, requests, load_s)
        facts["outputs"] = [_output(p, r) for p, r in zip(prompts, requests, strict=True)]
        print(json.dumps(facts, allow_nan=False))
    else:
        _show(prompts, requests, engine, words)
        print(f"{_summary(engine, requests)}; {told}", file=sys.stderr)
        if engine.acceptance is not None:
            print(engine.acceptance.table(), file=sys.stderr)
    seen.write()
    return 0


def _start(
    args: argparse.Namespace,
    folder: Path,
    requests: "Sequence[Request]",
    words: "Tokenizer | None",
    watched: "tuple[StartUp, Observation]",
) -> "tuple[CompiledModel, Engine]":
    """Weights, programs and pools, each a part of the start; tells where the time went."""
    import torch

    from compiler.store import Store
    from registry.build import build

    start, seen = watched
    store = Store(Path(args.cache_dir).expanduser() if args.cache_dir else Store.default_root())
    with start.part("weights"), seen.span(4):
        model = build(
            folder,
            backend=args.backend,
            dtype=getattr(torch, args.dtype),
            drafts=args.drafts > 0,
            progress=cli_progress.bar("loading"),
            cache_dir=store.root,
        )
    sizes = _sizes(args, model.cfg, requests)
    with start.part("graphs"):
        model = _programs(args, model, sizes, store)
    with start.part("pools"), seen.span(8):
        engine = _engine(args, model, sizes, words, seen)
    seen.ready()
    start.ready()
    if model.backend.compile is not None and not args.json:
        print(f"{store.counts}\n{start.table()}", file=sys.stderr)
    return model, engine


def _check_drafts(depth: int, folder: Path, cfg: "Config") -> None:
    """Raise ValueError for drafts that this checkpoint cannot make; reads headers only."""
    from registry.deepseek_v4 import has_drafts
    from runtime import load
    from runtime.drafts import MOST

    if not 0 <= depth <= MOST:
        raise ValueError(f"--drafts is {depth}; it must be from 0 to {MOST}")
    if depth and not (cfg.mtp and has_drafts(load.inspect(folder, cfg))):
        raise ValueError(f"--drafts is {depth}, and {folder} has no draft module: leave it out")


def _sizes(args: argparse.Namespace, cfg: "Config", requests: "Sequence[Request]") -> "PoolSizes":
    """Pools for the longest of these requests, `_AT_ONCE` at a time."""
    from runtime.pages import fit

    lengths = sorted((r.longest(cfg) for r in requests), reverse=True)[:_AT_ONCE]
    return fit(cfg, lengths, most=min(args.chunk, lengths[0]), drafts=args.drafts)


def _programs(
    args: argparse.Namespace, model: "CompiledModel", sizes: "PoolSizes", store: "Store"
) -> "CompiledModel":
    """The model with its programs, found or made; each is told on stderr."""
    from registry.programs import compile_model, room

    asked = room(model.cfg, sizes, chunk=args.chunk)
    told = None if args.json else cli_progress.programs()
    return compile_model(model, asked, store, page_tokens=sizes.page_tokens, told=told)


def _engine(
    args: argparse.Namespace,
    model: "CompiledModel",
    sizes: "PoolSizes",
    words: "Tokenizer | None",
    seen: "Observation",
) -> "Engine":
    """An engine over pools of these sizes."""
    from runtime.drafts import Drafts
    from runtime.engine import Engine

    return Engine(
        model,
        sizes,
        chunk=args.chunk,
        decode=words.decode if words else None,
        drafts=Drafts(depth=args.drafts) if args.drafts else None,
        cache=not args.no_prefix_cache,
        watch=seen.watchers,
    )


def _show(
    prompts: Sequence[_Prompt],
    requests: "Sequence[Request]",
    engine: "Engine",
    words: "Tokenizer | None",
) -> None:
    """Stream one prompt as it comes; print several as labelled blocks."""
    if len(requests) == 1:
        for event in engine.stream(requests[0]):
            shown = event.text if words else "".join(f"{t} " for t in event.tokens)
            print(shown, end="", flush=True)
        print()
        _show_logprobs(requests[0], words)
        return
    engine.generate(requests)
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True), start=1):
        print(f"== {i}: {prompt.label}")
        print(request.text if words else " ".join(map(str, request.output)))
        _show_logprobs(request, words)


def _show_logprobs(request: "Request", words: "Tokenizer | None") -> None:
    def name(token: int) -> str:
        return f"{token} {words.decode([token])!r}" if words else str(token)

    for token, score in zip(request.output, request.scores, strict=False):
        rest = "".join(f"  [{name(t)} {v:.4f}]" for t, v in score.top)
        print(f"{name(token)} {score.token:.4f}{rest}")


def _sampling(args: argparse.Namespace, folder: Path) -> "tuple[Sampling, str]":
    """The settings in use, and where each comes from in words."""
    from runtime.request import Sampling

    given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    settings = sampling_defaults(folder) | {n: v for n, v in given.items() if v is not None}
    told = [
        f"{name} {value} ({'given' if given[name] is not None else GENERATION_CONFIG})"
        for name, value in settings.items()
    ]
    return Sampling(**settings, seed=args.seed), ", ".join(told) or "greedy"


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens and seconds > 0 else None


def _summary(engine: "Engine", requests: "Sequence[Request]") -> str:
    m = engine.meter
    first_s = min(r.first_s - r.added_s for r in requests)
    parts = [f"time to first token {first_s * 1000:.0f} ms"]
    for name, tokens, seconds in (
        ("prefill", m.prefill_tokens, m.prefill_s),
        ("decode", m.decode_tokens, m.decode_s),
    ):
        rate = _rate(tokens, seconds)
        if rate is not None:
            parts.append(f"{name} {tokens} tokens at {rate:.1f} tokens/s")
    return "; ".join(parts)


def _facts(
    args: argparse.Namespace,
    model: "CompiledModel",
    engine: "Engine",
    requests: "Sequence[Request]",
    load_s: float,
) -> dict[str, Any]:
    m, told = engine.meter, engine.acceptance
    return {
        "model": str(model.source),
        "architecture": model.architecture,
        "dtype": args.dtype,
        "sampling": dataclasses.asdict(requests[0].sampling),
        "acceptance": None
        if told is None
        else {
            "drafted_steps": told.steps,
            "proposed": told.proposed,
            "accepted": told.accepted,
            "mean_length_tokens": told.mean_length,
        },
        "timings": {
            "load_s": load_s,
            **dataclasses.asdict(m),
            "prefill_tokens_per_s": _rate(m.prefill_tokens, m.prefill_s),
            "decode_tokens_per_s": _rate(m.decode_tokens, m.decode_s),
        },
    }


def _output(prompt: _Prompt, request: "Request") -> dict[str, Any]:
    def listed(score: "Logprobs", token: int) -> dict[str, Any]:
        top = [{"token_id": t, "logprob": v} for t, v in score.top]
        return {"token_id": token, "logprob": score.token, "top": top}

    return {
        "prompt": prompt.text,
        "prompt_token_ids": prompt.ids,
        "token_ids": request.output,
        "text": request.text if request.stream is not None else None,
        "logprobs": None
        if request.logprobs is None
        else [listed(s, t) for s, t in zip(request.scores, request.output, strict=True)],
        "finish_reason": request.finish,
        "time_to_first_token_s": request.first_s - request.added_s,
        "total_s": request.finished_s - request.added_s,
    }
