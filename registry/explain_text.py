"""The facts of `explain` as text for people."""

from collections.abc import Iterable
from typing import Any

from runtime import pools_report
from runtime.columns import columns, size


def text(facts: dict[str, Any]) -> str:
    """Everything `explain` found, in sections."""
    sections = (
        ("model", _model(facts)),
        ("layers", _layers(facts["layers"])),
        ("parameters", _parameters(facts["parameters"])),
        ("cache", _cache(facts["cache"])),
        *((("pools", pools_report.lines(facts["pools"])),) if "pools" in facts else ()),
        ("config.json", _config(facts["config"])),
        ("weights", _weights(facts["weights"])),
        ("backend", _backend(facts["backend"])),
        ("refuses now", facts["refuses"]["now"] or ["nothing"]),
        ("would refuse", facts["refuses"]["if"]),
    )
    lines = (line for title, body in sections for line in ("", title, *(f"  {x}" for x in body)))
    return "\n".join(lines).lstrip()


def names_text(facts: dict[str, Any]) -> str:
    """The registry of this process."""
    rows = [("name", "state", "served by, or needs")]
    for e in facts["names"]:
        rows.append((e["name"], e["state"], e["target"] or e["needs"] or f"see {e['alias_of']}"))
    lines = [f"registry {facts['digest']}, {len(facts['names'])} names", *columns(rows)]
    lines += [f"{o['name']}: {o['winner']} overrides {o['loser']}" for o in facts["overrides"]]
    return "\n".join(lines)


def _model(facts: dict[str, Any]) -> list[str]:
    a = facts["architecture"]
    rows = [
        ("source", facts["source"]),
        ("architecture", a["name"]),
        ("entry", f"{a['entry']} -> {a['target']} (version {a['version']})"),
        ("why", "; ".join(a["why"])),
        ("losers", ", ".join(a["losers"]) or "none"),
        ("registry", a["digest"]),
    ]
    return columns(rows)


def _because(layer: dict[str, Any], choices: tuple[str, ...]) -> str:
    """The rules of a layer's choices, each with its fields; equal fields stand once, at the end."""
    told: list[str] = []
    fields = None
    for choice in choices:
        made = layer[choice]
        if choice == "rate" and made["value"] == 0:
            continue
        if made["fields"] == fields:
            told[-1] = told[-1].rpartition(" (")[0] + ", " + made["rule"]
        else:
            told.append(made["rule"])
        fields = made["fields"]
        told[-1] += f" ({', '.join(fields) or 'not in the file'})"
    return "; ".join(told)


def _layers(layers: list[dict[str, Any]]) -> list[str]:
    rows: list[tuple[str, ...]] = [("layer", "kind", "rate", "router", "rope", "because")]
    for layer in layers:
        rope = layer["rope"]["value"]
        yarn = rope["yarn"]
        turned = f"{rope['theta']:g}" + (f" yarn {yarn['factor']:g}" if yarn else "")
        choices = ("kind", "rate", "router", "rope")
        values = (str(layer[c]["value"]) for c in choices[:3])
        rows.append((layer["name"], *values, turned, _because(layer, choices)))
    return columns(rows, right=(2,))


def _parameters(p: dict[str, Any]) -> list[str]:
    rows = [("group", "parameters", f"in {p['dtype']}")]
    for group, has in p["groups"].items():
        rows.append((group, f"{has['count']:,}", size(has["bytes"])))
    rows.append(("backbone", f"{p['backbone']:,}", ""))
    rows.append(("total", f"{p['count']:,}", size(p["bytes"])))
    return [
        *columns(rows, right=(1, 2)),
        f"{p['checkpoint_tensors']:,} tensors in a released checkpoint, scales included",
    ]


def _cache(c: dict[str, Any]) -> list[str]:
    lengths = list(c["bytes_at"])
    head = ("one sequence", "per token", "constant", *(f"{int(n):,}" for n in lengths))
    rows: list[tuple[str, ...]] = [head]
    for kind in c["bytes_per_token"]:
        at = (size(c["bytes_at"][n][kind]) for n in lengths)
        constant = size(c["bytes_per_sequence"][kind])
        rows.append((kind, f"{c['bytes_per_token'][kind]:g} B", constant, *at))
    beyond = [n for n in lengths if int(n) > c["max_positions"]]
    told = f"in {c['dtype']}; pages of {c['page_tokens']} tokens or a multiple"
    if beyond:
        told += f"; this model ends at {c['max_positions']:,} tokens"
    return [*columns(rows, right=tuple(range(1, len(head)))), told]


def _config(c: dict[str, Any]) -> list[str]:
    silent = [name for name, made in c["decisions"].items() if not made["fields"]]
    rows = [
        ("unread", ", ".join(c["unread"]) or "none"),
        ("by default", ", ".join(silent) or "none"),
        *(("note", note) for note in c["notes"]),
        *(("no effect", f"{field}: {why}") for field, why in c["ignored"].items()),
    ]
    return columns(rows)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _weights(w: dict[str, Any] | None) -> Iterable[str]:
    if w is None:
        return ["none here: judged by config.json alone"]
    lines = []
    if "used" in w:
        lines.append(f"{w['files']} files, {w['family']} names")
        told = f"used {w['used']:,} tensors ({_counts(w['formats'])}), {size(w['bytes'])}"
        lines.append(told + ("" if w["drafts"] else "; no draft module"))
        lines += [f"skipped {count}: {why}" for why, count in w["skipped"].items()]
    for kind, faults in w["faults"].items():
        lines.append(f"{kind.replace('_', ' ')}: {faults['count']}")
        lines += [f"  {line}" for told in faults["shown"] for line in told.splitlines()]
    return lines + [f"hint: {hint}" for hint in w.get("hints", ())]


def _backend(b: dict[str, Any]) -> list[str]:
    rows = [(b["name"], b["why"])]
    for name, op in b["operators"].items():
        rows.append((name, op["lowering"] + (" (fallback: plain)" if op["fallback"] else "")))
    for name, lacks in b["missing"].items():
        rows.append((f"backend {name}", f"cannot run here: {lacks}" if lacks else "can run here"))
    return columns(rows)
