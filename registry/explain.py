"""What would run, and why: the facts behind `dsv4 explain`, as JSON types with stable keys.

Nothing is loaded: weights are judged by their headers, sizes come from the tables.
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from compiler import backend as backends
from compiler.backend import NAMES
from dsv4 import config_json, state, table
from dsv4.config import Config, preset
from dsv4.config_fields import Decision
from dsv4.config_json import Reading
from dsv4.mesh import ONE
from dsv4.ops import PLAIN, Ops
from dsv4.tree import paths
from registry import builtin_model
from registry.build import Resolved, read_config, resolve
from registry.deepseek_v4 import has_drafts
from registry.registry import Registry, default_registry
from runtime import load, pools_report
from runtime.load import CheckpointError, LoadReport
from runtime.pools import PoolPlan

LENGTHS = (8192, 131072, 1048576)  # tokens
SHOWN = 20  # faults of one kind

# The first marker that a parameter's path holds names its group.
_GROUPS = (
    ("mtp.", "mtp"),
    ("hc_", "mhc"),
    (".attn.indexer.", "indexer"),
    (".attn.compressor.", "compressor"),
    (".attn.", "attention"),
    (".ffn.shared.", "shared"),
    (".ffn.w", "experts"),
    (".ffn.", "router"),
    ("embed", "embed"),
    ("head", "head"),
    ("norm", "norms"),
)


def explain(
    source: str | None = None,
    *,
    architecture: str | None = None,
    backend: str = "eager",
    dtype: torch.dtype = torch.bfloat16,
    registry: Registry | None = None,
    plan: Callable[[Config, torch.dtype], PoolPlan] | None = None,
) -> dict[str, Any]:
    """Everything that decides about `source`: a directory, a preset's name, or the built-in model.

    With `plan`, which is handed the config that the weights serve, also what pools it makes.
    Raises ValueError where `build` and `plan` would, except for weights that do not fit: those are
    told.
    """
    registry = registry or default_registry()
    origin, folder, raw = _open(source)
    found = resolve(raw, architecture, registry)
    cfg = found.reading.cfg
    weights = _weights(folder, cfg)
    runs = _backend(backend)
    stored = dataclasses.replace(cfg, mtp=cfg.mtp if (weights or {}).get("drafts", True) else 0)
    return {
        "source": origin,
        "architecture": _architecture(found, registry),
        "config": _config(found.reading),
        "layers": _layers(found.reading),
        "parameters": _parameters(cfg, dtype),
        "cache": _cache(cfg, dtype),
        **({"pools": pools_report.facts(plan(stored, dtype))} if plan else {}),
        "weights": weights,
        "backend": runs,
        "refuses": {"now": _now(weights, runs), "if": _if(cfg)},
    }


def names(registry: Registry | None = None) -> dict[str, Any]:
    """The registry of this process: its digest, every name, and what was replaced."""
    registry = registry or default_registry()
    taken = registry.snapshot()
    return {
        "digest": registry.digest(),
        "names": [dataclasses.asdict(entry) for entry in taken.entries],
        "overrides": [dataclasses.asdict(override) for override in taken.overrides],
    }


def _open(source: str | None) -> tuple[str, Path | None, dict[str, Any]]:
    """Where it comes from, its directory if it has one, and its config.json."""
    if source is None:
        folder = builtin_model.path()
        return f"built-in model, {folder}", folder, read_config(folder)
    if not Path(source).exists():
        try:
            return f"preset {source}", None, config_json.write(preset(source))
        except ValueError as error:
            raise ValueError(f"no such model directory: {source}; {error}") from error
    return str(Path(source).resolve()), Path(source), read_config(source)


def _architecture(found: Resolved, registry: Registry) -> dict[str, Any]:
    entry = registry.lookup(found.choice.name)
    losers = [override.loser for override in registry.overrides(entry.name)]
    why = [*found.choice.why]
    if entry.name != found.choice.name:
        why.append(f"{found.choice.name} is an alias of {entry.name}")
    why.append("explicit override" if losers else f"the only entry named {entry.name}")
    return {
        "name": found.choice.name,
        "entry": entry.name,
        "target": entry.target,
        "version": entry.version,
        "why": why,
        "losers": losers,
        "digest": registry.digest(),
    }


def _json(value: Any) -> Any:
    """Our values as JSON types."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_json(v) for v in value]
    return value


def _decision(made: Decision) -> dict[str, Any]:
    return {"value": _json(made.value), "fields": list(made.fields), "rule": made.rule}


def _config(reading: Reading) -> dict[str, Any]:
    return {
        "decisions": {made.name: _decision(made) for made in reading.decisions},
        "ignored": dict(reading.ignored),
        "unread": list(reading.unread),
        "notes": list(reading.notes),
    }


def _layers(reading: Reading) -> list[dict[str, Any]]:
    return [
        {
            "name": rule.name,
            "kind": _decision(rule.kind),
            "rate": _decision(rule.rate),
            "router": _decision(rule.router),
            "rope": _decision(rule.rope),
        }
        for rule in reading.layer_rules
    ]


def _group(path: str) -> str:
    return next(group for marker, group in _GROUPS if marker in path)


def _parameters(cfg: Config, dtype: torch.dtype) -> dict[str, Any]:
    spec = table.spec(cfg)
    by_group: dict[str, list[table.Leaf]] = collections.defaultdict(list)
    for path, leaf in paths(spec).items():
        by_group[_group(path)].append(leaf)
    total = table.count(spec)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "groups": {
            group: {"count": table.count(leaves), "bytes": table.size_bytes(leaves, dtype)}
            for group, leaves in by_group.items()
        },
        "count": total,
        "backbone": total - table.count(by_group["mtp"]),
        "bytes": table.size_bytes(spec, dtype),
        "checkpoint_tensors": table.official_tensors(spec),
    }


def _cache(cfg: Config, dtype: torch.dtype) -> dict[str, Any]:
    page = cfg.page_tokens
    one, two = (state.sequence_bytes(cfg, n * page, dtype) for n in (1, 2))
    growth = {kind: (two[kind] - one[kind]) / page for kind in one}
    constant = state.sequence_bytes(cfg, 0, dtype)
    sizes = {n: state.sequence_bytes(cfg, n, dtype) for n in LENGTHS}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "bytes_per_token": {**growth, "total": sum(growth.values())},
        "bytes_per_sequence": {**constant, "total": sum(constant.values())},
        "bytes_at": {str(n): {**kinds, "total": sum(kinds.values())} for n, kinds in sizes.items()},
        "max_positions": cfg.max_positions,
        "page_tokens": page,
    }


def _weights(folder: Path | None, cfg: Config) -> dict[str, Any] | None:
    """The load report from headers, counted; None for a preset."""
    if folder is None:
        return None
    try:
        report = load.inspect(folder, cfg)
        drafts = has_drafts(report)
        report = report if drafts or not cfg.mtp else load.inspect(folder, cfg, drafts=False)
    except CheckpointError as error:
        return {"faults": {"broken": {"count": 1, "shown": [str(error)]}}}
    return _report(report, drafts)


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(collections.Counter(values).most_common())


def _report(report: LoadReport, drafts: bool) -> dict[str, Any]:
    return {
        "files": len(report.files),
        "family": report.family,
        "used": len(report.used),
        "bytes": report.num_bytes,
        "formats": _count(use.stored for use in report.used),
        "skipped": _count(fault.detail for fault in report.skipped),
        "drafts": drafts,
        "faults": {
            kind: {"count": len(faults), "shown": [str(fault) for fault in faults[:SHOWN]]}
            for kind, faults in report.faults().items()
        },
        "hints": list(report.hints),
    }


def _backend(name: str) -> dict[str, Any]:
    record = backends.record(name)
    operators = {}
    for field in dataclasses.fields(Ops):
        lowering = getattr(record.ops, field.name)
        operators[field.name] = {
            "lowering": f"{lowering.__module__}.{lowering.__name__}",
            "fallback": lowering is getattr(PLAIN, field.name),
        }
    return {
        "name": record.name,
        "why": record.why,
        "operators": operators,
        "compiles": record.compile is not None,
        "missing": backends.states(),
    }


def _now(weights: dict[str, Any] | None, backend: dict[str, Any]) -> list[str]:
    """What makes `build` refuse this very model."""
    faults = (weights or {}).get("faults", {})
    told = [
        f"{kind.replace('_', ' ')}: {told['count']}, first {told['shown'][0]}"
        for kind, told in faults.items()
    ]
    lacks = backend["missing"][backend["name"]]
    return [*told, f"backend {backend['name']}: {lacks}"] if lacks else told


def _if(cfg: Config) -> list[str]:
    """What would make it refuse."""
    fixed = ", ".join(f"{name} = {value!r}" for name, value, _ in config_json.FIXED)
    told = [
        f"a config.json with another value than {fixed}",
        "two spellings of one fact that disagree, or a fact in an unknown form",
        "a tensor that is missing, unexpected, of a wrong shape or dtype, or in a broken file",
        f"a mesh axis above 1 (axes {', '.join(ONE.axes)})",
        f"a backend that lacks something on this machine, or another than {', '.join(NAMES)}",
        f"a prompt above {cfg.max_positions} tokens (an answer ends there), or an empty one",
        f"a token id outside 0 to {cfg.vocab - 1}",
        f"a page of tokens that is no multiple of {cfg.page_tokens}",
    ]
    return told if cfg.mtp else [*told, "drafts: config.json has no draft stage"]
