"""What a checkpoint calls our tensors: every name of both families, as data. Spec section 14.5.

A `Slot` is one tensor that may stand in a file and the `Part`s of our leaves it holds. Official
files have a slot per expert; transformers fuses the experts, and w1 with w3, into one. The two
families' names never clash, so one map serves both, and files that mix them: transformers 5 writes
official names for most tensors and its own for the rest.
"""

import dataclasses
import re

from dsv4.config import Config
from dsv4.params import Params
from dsv4.table import Leaf
from dsv4.tree import paths

_COPIES = re.compile(r"mtp\.\d+\.(emb\b|embed|head\.weight$)")
_GATE_BIAS = re.compile(r"layers\.(\d+)\.(ffn\.gate\.bias|mlp\.gate\.e_score_correction_bias)")
_BUFFERS = re.compile(r"(^|\.)(rotary(_emb)?\..+|\w*inv_freq|freqs_cis)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The share of one leaf that a stored tensor holds."""

    path: str  # of the leaf in `Params`
    expert: int | None = None  # the leaf's first index; None: the whole leaf
    rows: tuple[int, int]  # of each stored matrix, seen as [rows, last dim]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """One tensor that may stand in a file, under its canonical name (without `model.`)."""

    name: str
    shape: tuple[int, ...]  # unpacked: values, not bytes
    leaf: Leaf
    parts: tuple[Part, ...]

    @property
    def fused(self) -> bool:
        """Whether all experts stand in this tensor, its first dim."""
        return self.leaf.stacked and self.parts[0].expert is None


def flat(leaf: Leaf) -> tuple[int, ...]:
    """The shape in a file: as ours, but for wo_a, whose groups are laid out as rows."""
    g, *rest = leaf.shape
    return leaf.shape if leaf.stacked or len(rest) < 2 else (g * rest[0], *rest[1:])


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return (0, shape[0] if len(shape) > 1 else 1)


def _official(path: str, leaf: Leaf) -> list[Slot]:
    if not leaf.stacked:
        shape = flat(leaf)
        part = Part(path=path, rows=_rows(shape))
        return [Slot(name=leaf.official, shape=shape, leaf=leaf, parts=(part,))]
    shape = leaf.shape[1:]
    return [
        Slot(
            name=leaf.official.replace("{x}", str(x)),
            shape=shape,
            leaf=leaf,
            parts=(Part(path=path, expert=x, rows=_rows(shape)),),
        )
        for x in range(leaf.shape[0])
    ]


def _theirs(path: str, leaf: Leaf) -> Slot:
    shape = flat(leaf)
    rows = leaf.hf_rows or _rows(shape[1:] if leaf.stacked else shape)
    if leaf.stacked:
        shape = (shape[0], rows[1], shape[2])
    name = leaf.hf.removeprefix("model.")
    return Slot(name=name, shape=shape, leaf=leaf, parts=(Part(path=path, rows=rows),))


def _join(a: Slot, b: Slot) -> Slot:
    """One tensor from two leaves that share it; rows of the shape are those of the last."""
    shape = tuple(max(m, n) for m, n in zip(a.shape, b.shape, strict=True))
    return Slot(name=a.name, shape=shape, leaf=a.leaf, parts=a.parts + b.parts)


def slots(table: Params, family: str | None = None) -> dict[str, Slot]:
    """Every slot of a spec tree by canonical name, in table order.

    `family` is "official", "transformers" (with official names for what that family lacks: the
    draft module) or None for both.
    """
    found: dict[str, Slot] = {}
    for path, leaf in paths(table).items():
        own = _official(path, leaf) if family != "transformers" or not leaf.hf else []
        theirs = [_theirs(path, leaf)] if family != "official" and leaf.hf else []
        for slot in (*own, *theirs):
            have = found.get(slot.name)
            # hc_head and norm are called alike in both families; w1 and w3 share a fused tensor.
            same = have is not None and have.parts == slot.parts
            found[slot.name] = slot if have is None or same else _join(have, slot)
    return found


def written(slot: Slot, family: str) -> str:
    """The name to write a slot under: transformers has `model.` on all but the head and mtp."""
    bare = family == "official" or slot.name.startswith(("lm_head.", "mtp."))
    return slot.name if bare else f"model.{slot.name}"


def canonical(name: str) -> str:
    """A stored tensor's name without `model.` and with the known aliases resolved."""
    name = name.removeprefix("model.")
    name = name.replace(".ffn.gate.e_score_correction_bias", ".ffn.gate.bias")
    # transformers 5.24 turns kv_norm into norm when it writes official names back.
    return re.sub(r"\.attn\.norm\.weight$", ".attn.kv_norm.weight", name)


def weight_of(name: str) -> str | None:
    """The weight that a canonical name would be the scale of, or None if it is no scale's name."""
    for ending, weight in ((".weight_scale_inv", ".weight"), (".scale", ".weight")):
        if name.endswith(ending):
            return canonical(name.removesuffix(ending) + weight)
    return name.removesuffix("_scale_inv") if name.endswith("_scale_inv") else None


def scale_of(name: str) -> str:
    """What the scale of the weight `name` is called: official for a weight, else transformers'."""
    weight = name.endswith(".weight")
    return name.removesuffix("weight") + "scale" if weight else name + "_scale_inv"


def skip_reason(name: str, cfg: Config) -> str | None:
    """Why a tensor that no leaf asks for may be left aside; None if it is unexpected.

    `cfg.mtp` is 0 when drafts are off. Names are canonical.
    """
    if _BUFFERS.search(name):
        return "a rotary buffer; it is computed from the config"
    if name.startswith("mtp."):
        stage = name.split(".")[1]
        if not cfg.mtp:
            return "drafts are off"
        if stage.isdecimal() and int(stage) >= cfg.mtp:
            return f"draft stage {stage} (DSpark); this model has {cfg.mtp}"
        if _COPIES.match(name):
            return "a copy; the draft module shares the backbone's embedding and head"
        return None
    found = _GATE_BIAS.fullmatch(name)
    if found and int(found[1]) < cfg.layers and cfg.hash_layers[int(found[1])]:
        return "the layer is hash-routed and has no correction bias"  # cases F1
    return None
