"""The layer plan from one `config.json`: kinds, rates, routers and rotary tables, with reasons.

The ratio of a layer says its kind; the kind says which rotary table it has. Spec section 1.2.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from dsv4.config import Config, Kind, LayerPlan, Router, Yarn
from dsv4.config_fields import Decision, Fields, Place, entries, number, refuse, same, table, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRule:
    """The plan of one layer and the reasons of its four choices."""

    name: str  # "layers.3" or "mtp.0"
    plan: LayerPlan
    kind: Decision
    rate: Decision
    router: Decision
    rope: Decision


_LABELS = (
    ("sliding_attention", Kind.WINDOW),
    ("compressed_sparse_attention", Kind.CSA),
    ("heavily_compressed_attention", Kind.HCA),
)
_EXPERTS = (("hash_moe", True), ("moe", False))

_ROPE_FIXED = (("attention_factor", 1), ("mscale", 1), ("mscale_all_dim", 1), ("truncate", True))
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_OFFICIAL_YARN = ("rope_factor", "original_seq_len", "beta_fast", "beta_slow")


def rate(f: Fields, kind: Kind, default: int) -> int:
    """Tokens per entry of one kind of compressor."""
    places: list[Place] = []
    for path, rates in f.get("compress_rates"):
        for key, value in table(path, rates).items():
            known = dict(_LABELS).get(key)
            if known is None or (known is Kind.WINDOW and value != 0):
                refuse(f"{path}.{key}", value, f"rates are of {_LABELS[1][0]} and {_LABELS[2][0]}")
            if known is kind and value is not None:
                places.append((f"{path}.{key}", value))
    places += f.get(f"compress_rate_{kind.value}")
    return f.decide(f"{kind.value}_rate", [(p, whole(p, v)) for p, v in places], default)


def _column(name: str, path: str, value: Any, words: Iterable[tuple[Any, Any]]) -> list[Decision]:
    """One choice per layer, from a list whose entries stand in `words`."""
    column = []
    for i, entry in enumerate(entries(path, value)):
        meant = [out for word, out in words if type(word) is type(entry) and word == entry]
        if not meant:
            allowed = ", ".join(str(word) for word, _ in words)
            refuse(f"{path}[{i}]", entry, f"it must be one of {allowed}")
        place = f"{path}[{i}]"
        rule = f"{entry} is {getattr(meant[0], 'value', 'hash' if meant[0] else 'top-k')}"
        column.append(Decision(name=name, value=meant[0], fields=(place,), rule=rule))
    return column


def _agreed(f: Fields, name: str, columns: list[tuple[str, list[Decision]]]) -> list[Decision]:
    """Layer by layer the choice on which all columns agree."""
    out = []
    for choices in zip(*(column for _, column in columns), strict=True):
        same([(field, c.value) for c in choices for field in c.fields])
        fields = tuple(field for c in choices for field in c.fields)
        rule = "; ".join(c.rule for c in choices)
        out.append(dataclasses.replace(choices[0], fields=fields, rule=rule))
    whole_column = tuple(c.value for c in out)
    places = [(path, whole_column) for path, _ in columns if path]
    f.decide(name, places, whole_column, "one entry per layer")
    return out


def _check_length(path: str, value: Any, layers: int) -> None:
    if len(entries(path, value)) != layers:
        refuse(path, value, f"it has {len(value)} entries for {layers} layers")


def routers(f: Fields, layers: int) -> list[Decision]:
    """Whether each layer is hash-routed."""
    columns: list[tuple[str, list[Decision]]] = []
    for path, value in f.get("mlp_layer_types"):
        _check_length(path, value, layers)
        columns.append((path, _column("router", path, value, _EXPERTS)))
    counts = f.get("num_hash_layers") or ([] if columns else [("", min(3, layers))])
    for path, value in counts:
        count = whole(path, value, least=0)
        if count > layers:
            refuse(path, value, f"there are {layers} layers")
        rules = ("in the first {}: hash", "after the first {}: top-k")
        column = [
            Decision(
                name="router",
                value=i < count,
                fields=(path,) if path else (),
                rule=rules[i >= count].format(count) + ("" if path else " (default)"),
            )
            for i in range(layers)
        ]
        columns.append((path, column))
    return _agreed(f, "hash_layers", columns)


def kinds(f: Fields, layers: int, csa: int, hca: int) -> tuple[list[Decision], list[Place]]:
    """The kind of every layer, and the number of draft stages where `compress_ratios` tells it."""
    columns, stages = [], []
    for path, value in f.get("compress_ratios"):
        column = _column("kind", path, value, ((0, Kind.WINDOW), (csa, Kind.CSA), (hca, Kind.HCA)))
        if len(column) < layers:
            refuse(path, value, f"it has {len(column)} entries for {layers} layers")
        for i, choice in enumerate(column[layers:], layers):
            if choice.value is not Kind.WINDOW:
                allowed = f"entries from {layers} on belong to draft stages and must be 0"
                refuse(f"{path}[{i}]", value[i], allowed)
        columns.append((path, column[:layers]))
        stages.append((path, len(column) - layers))
    for path, value in f.get("layer_types"):
        _check_length(path, value, layers)
        columns.append((path, _column("kind", path, value, _LABELS)))
    return _agreed(f, "kinds", columns), stages


def _yarn(f: Fields, path: str, rope: Mapping[str, Any]) -> Yarn | None:
    """The interpolation that a rope object asks for."""
    types = [(f"{path}.{k}", rope[k]) for k in ("rope_type", "type") if rope.get(k) is not None]
    _, kind = same(types) or ((), "default")
    if kind not in ("default", "yarn"):
        refuse(types[0][0], kind, "a rope type must be default or yarn")
    known = ["rope_type", "type", "rope_theta", "partial_rotary_factor"]
    known += [*_YARN, *(key for key, _ in _ROPE_FIXED)] if kind == "yarn" else []
    f.inner_unread += [f"{path}.{key}" for key in rope if key not in known]
    if kind == "default":
        return None
    for key, allowed in _ROPE_FIXED:
        value = rope.get(key)
        if value is not None and (value != allowed or (value is True) != (allowed is True)):
            refuse(f"{path}.{key}", value, f"only {allowed} is supported; V4 scales nothing else")
    lacking = [key for key in _YARN[:2] if rope.get(key) is None]
    if lacking:
        raise ValueError(f"config.json: {path} lacks {', '.join(lacking)}; YaRN needs them")
    betas = {k: number(f"{path}.{k}", rope[k]) for k in _YARN[2:] if rope.get(k) is not None}
    original = whole(f"{path}.{_YARN[1]}", rope[_YARN[1]])
    return Yarn(factor=number(f"{path}.factor", rope["factor"]), original=original, **betas)


def _rope_objects(f: Fields) -> tuple[list[Place], list[Place], list[Place]]:
    """Rope objects of plain layers, of compressed ones, and un-nested ones (compressed too)."""
    main, compress, flat = [], [], []
    for path, rope in (*f.get("rope_scaling"), *f.get("rope_parameters")):
        labels = [k for k in ("main", "compress") if k in table(path, rope)]
        if len(labels) == 1:
            refuse(f"{path}.{labels[0]}", rope[labels[0]], "main and compress come together")
        if labels:
            main.append((f"{path}.main", table(f"{path}.main", rope["main"])))
            compress.append((f"{path}.compress", table(f"{path}.compress", rope["compress"])))
            f.inner_unread += [f"{path}.{key}" for key in rope if key not in labels]
        else:
            flat.append((path, rope))
    official = [(k, v) for k, n in zip(_YARN, _OFFICIAL_YARN, strict=True) for _, v in f.get(n)]
    if official:
        flat.append(("rope_factor, original_seq_len", {"type": "yarn", **dict(official)}))
    return main, compress, flat


def ropes(f: Fields, head_dim: int) -> dict[str, Any]:
    """Rotated width, both bases, and the interpolation of layers with a compressor."""
    main, compress, flat = _rope_objects(f)

    def inside(ropes: list[Place], key: str) -> list[Place]:
        return [(f"{path}.{key}", rope[key]) for path, rope in ropes if rope.get(key) is not None]

    for path, rope in main:
        if _yarn(f, path, rope) is not None:
            refuse(path, rope, "layers without a compressor are not interpolated: use default")
    yarns = [(path, _yarn(f, path, rope)) for path, rope in compress + flat]
    widths = [(p, whole(p, v)) for p, v in f.get("qk_rope_head_dim")]
    factor = "partial_rotary_factor"
    for path, value in f.get(factor) + inside(main + compress + flat, factor):
        width = head_dim * number(path, value)
        if abs(width - round(width)) > 1e-6:
            refuse(path, value, f"times head_dim ({head_dim}) it must be a whole number")
        widths.append((path, round(width)))
    theta = f.get("rope_theta") + inside(main + flat, "rope_theta")
    compress_theta = f.get("compress_rope_theta") + inside(compress, "rope_theta")
    return {
        "rope_dim": f.decide("rope_dim", widths, None),
        "rope_theta": f.decide("rope_theta", [(p, number(p, v)) for p, v in theta], 10000.0),
        "compress_theta": f.decide(
            "compress_theta", [(p, number(p, v)) for p, v in compress_theta], 160000.0
        ),
        "yarn": f.decide("yarn", yarns, None, "on layers with a compressor"),
    }


def _rope_rule(plan: LayerPlan, decided: Mapping[str, Decision]) -> Decision:
    name = "compress_theta" if plan.rate else "rope_theta"
    fields = decided[name].fields
    rule = "no compressor: plain"
    if plan.rate:
        fields = (*fields, *(f for f in decided["yarn"].fields if f not in fields))
        rule = f"compressor: own base, {'YaRN' if plan.rope.yarn else 'plain'}"
    if not decided[name].fields:
        rule += f" (base {plan.rope.theta:g} by default)"
    return Decision(name="rope", value=plan.rope, fields=fields, rule=rule)


def layer_rules(
    cfg: Config, kinds: list[Decision], routers: list[Decision], decisions: Iterable[Decision]
) -> tuple[LayerRule, ...]:
    """The plan of every layer with its reasons, drafts last."""
    decided = {d.name: d for d in decisions}
    plans = [(f"layers.{i}", plan) for i, plan in enumerate(cfg.plans)]
    if cfg.mtp:
        draft = decided["mtp"].fields
        plans.append(("mtp.0", cfg.mtp_plan))
        kinds = [*kinds, Decision(name="kind", value=Kind.WINDOW, fields=draft, rule="draft stage")]
        rule = "draft stages are never hash-routed"
        routers = [*routers, Decision(name="router", value=False, fields=draft, rule=rule)]
    out = []
    for (name, plan), kind, router in zip(plans, kinds, routers, strict=True):
        rate = Decision(name="rate", value=0, fields=kind.fields, rule="no compressor")
        if plan.rate:
            given = decided[f"{plan.kind.value}_rate"]
            rule = f"rate of {plan.kind.value}" + ("" if given.fields else " by default")
            fields = given.fields or kind.fields
            rate = Decision(name="rate", value=plan.rate, fields=fields, rule=rule)
        named = Router.HASH if router.value else Router.TOPK
        router = dataclasses.replace(router, value=named)
        rope = _rope_rule(plan, decided)
        out.append(LayerRule(name=name, plan=plan, kind=kind, rate=rate, router=router, rope=rope))
    return tuple(out)


def write_plan(cfg: Config) -> dict[str, Any]:
    """The layer plan in config.json's words.

    In the released spelling wherever it can say the plan: rates 4 and 128, and the hash layers
    first. Else in that of transformers, which takes no other ratio than 0, 4 and 128.
    """
    out: dict[str, Any] = {"num_nextn_predict_layers": cfg.mtp}
    if (cfg.csa_rate, cfg.hca_rate) == (4, 128):
        out["compress_ratios"] = [plan.rate for plan in cfg.plans] + [0] * cfg.mtp
    else:
        label = {kind: word for word, kind in _LABELS}
        out["layer_types"] = [label[kind] for kind in cfg.kinds]
        rates = {label[Kind.CSA]: cfg.csa_rate, label[Kind.HCA]: cfg.hca_rate}
        out["compress_rates"] = rates
    count = sum(cfg.hash_layers)
    if all(cfg.hash_layers[:count]):
        out["num_hash_layers"] = count
    else:
        out["mlp_layer_types"] = ["hash_moe" if h else "moe" for h in cfg.hash_layers]
    return out
