"""What a pool plan says: as facts for machines, and as text for people."""

import dataclasses
from typing import Any

from runtime.columns import columns, size
from runtime.layout import GROUPS
from runtime.pools import PoolPlan

LENGTHS = (1024, 8192, 131072, 1048576)  # tokens of a sequence
TOGETHER = (1, 4, 16, 64, 256)  # sequences at once


def facts(plan: PoolPlan) -> dict[str, Any]:
    """Everything as JSON types. Sizes in bytes, lengths in tokens."""
    layout, page = plan.layout, plan.layout.page_tokens
    lengths = sorted({n for n in LENGTHS if n <= plan.cfg.max_positions} | {plan.max_model_len})
    slots = plan.usable("slots")
    together = sorted({n for n in TOGETHER if n < slots} | {slots})
    per_token = {kind: n / page for kind, n in layout.kinds["history_pages"].items()}
    cached, history = plan.cached_windows, plan.usable("history_pages")
    return {
        "dtype": str(layout.dtype).removeprefix("torch."),
        "memory": dataclasses.asdict(plan.memory),
        "max_model_len": plan.max_model_len,
        "chunk": layout.chunk,
        "draft_module": bool(plan.cfg.mtp),
        "sizes": dataclasses.asdict(plan.sizes),
        "bytes": plan.num_bytes,
        "groups": {group: _group(plan, group) for group in GROUPS},
        "bytes_per_token": {**per_token, "total": plan.bytes_per_token},
        "window_pages": {
            "prefill": layout.needs(plan.max_model_len)["window_pages"],
            "decode": min(layout.width(1), layout.needs(plan.max_model_len)["window_pages"]),
        },
        "waste": {
            "padding": layout.num_bytes(dict.fromkeys(GROUPS, 1)),
            "unused": plan.memory.num_bytes - plan.num_bytes,
            "last_page_mean": (page - 1) / 2 * plan.bytes_per_token,
            "last_page_most": (page - 1) * plan.bytes_per_token,
        },
        "lengths": {str(n): _length(plan, n) for n in lengths},
        "largest_request": plan.largest(),
        "largest": {str(n): plan.largest(n) for n in together},
        "prefix_cache": {
            "window_pages": cached,
            "tokens_per_window_page": history * page / cached if cached else None,
            "hit_tokens": page,
            "rule": plan.hit_rule,
        },
    }


def _group(plan: PoolPlan, group: str) -> dict[str, Any]:
    count, price = getattr(plan.sizes, group), plan.layout.price(group)
    kinds = dict(plan.layout.kinds[group])
    return {"count": count, "each": price, "bytes": count * price, "kinds": kinds}


def _length(plan: PoolPlan, tokens: int) -> dict[str, Any]:
    rests, prefix = plan.rests_bytes(tokens), plan.prefix_bytes(tokens)
    return {
        "fits": plan.fits(tokens),
        "bytes": rests,
        "bytes_per_token": rests / tokens,
        "waste": plan.waste(tokens),
        "bytes_at_most": plan.needs_bytes(tokens),
        "prefix_bytes": prefix,
        "prefix_bytes_per_token": prefix / tokens,
    }


def lines(told: dict[str, Any]) -> list[str]:
    """The text of `facts`."""
    memory, sizes = told["memory"], told["sizes"]
    module = "" if told["draft_module"] else " (no caches for a draft module)"
    return [
        f"{size(memory['num_bytes'])} for caches alone ({memory['source']}), in {told['dtype']}; "
        f"max_model_len {told['max_model_len']:,}",
        f"pages of {sizes['page_tokens']} tokens, chunks of {told['chunk']:,} tokens, "
        f"{sizes['drafts']} drafts{module}",
        *_groups(told["groups"]),
        *_rest(told),
        *_lengths(told["lengths"]),
        f"largest request: {told['largest_request']:,} tokens; when several run at once: "
        + ", ".join(f"{int(n):,} of {most:,}" for n, most in told["largest"].items()),
        *_prefix_cache(told["prefix_cache"]),
    ]


def _groups(groups: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [("group", "count", "in all", "each", "of it")]
    for name, has in groups.items():
        kinds = ", ".join(f"{kind} {size(num)}" for kind, num in has["kinds"].items())
        total = (f"{has['count']:,}", size(has["bytes"]), size(has["each"]))
        rows.append((name.replace("_", " "), *total, kinds))
    return columns(rows, right=(1, 2, 3))


def _rest(told: dict[str, Any]) -> list[str]:
    waste, grows, windows = told["waste"], told["bytes_per_token"], told["window_pages"]
    kinds = ", ".join(f"{kind} {num:g}" for kind, num in grows.items() if kind != "total")
    padding, unused = size(waste["padding"]), size(waste["unused"])
    mean, most = size(waste["last_page_mean"]), size(waste["last_page_most"])
    return [
        f"waste: index 0 of each group {padding}, left over {unused}; last page of a sequence "
        f"{mean} on average, {most} at most",
        f"a sequence grows by {grows['total']:g} B per token"
        + (f" ({kinds})" if kinds else "")
        + f", and holds 1 slot and up to {windows['prefill']:,} window pages "
        f"({windows['decode']:,} once its prompt is done)",
    ]


def _lengths(lengths: dict[str, Any]) -> list[str]:
    head = (
        "one sequence of", "fit at once", "holds", "per token", "waste", "at most",
        "as stored prefix", "per token",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [head]
    for tokens, has in lengths.items():
        rows.append(
            (
                f"{int(tokens):,} tokens",
                f"{has['fits']:,}",
                size(has["bytes"]),
                f"{has['bytes_per_token']:,.1f} B",
                f"{has['waste']:.2%}",
                size(has["bytes_at_most"]),
                size(has["prefix_bytes"]),
                f"{has['prefix_bytes_per_token']:,.1f} B",
            )
        )
    return columns(rows, right=tuple(range(1, len(head))))


def _prefix_cache(cache: dict[str, Any]) -> list[str]:
    told = f"prefix cache: {cache['window_pages']:,} window pages beyond the running need"
    if cache["window_pages"]:
        told += f", one per {cache['tokens_per_window_page']:,.0f} tokens of history"
    return [told, cache["rule"]]
