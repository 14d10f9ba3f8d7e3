"""Which stored tensor becomes which parameters: headers against the table of names.

`match` decides per tensor by its stored dtype, never by its name. Spec sections 14.2, 14.3, 14.5.
"""

import collections
import dataclasses
from pathlib import Path

from dsv4 import checkpoint, table
from dsv4.checkpoint import Slot
from dsv4.config import Config
from dsv4.tree import paths
from runtime import headers
from runtime.headers import CheckpointError, Entry, Fault, shown
from runtime.report import LoadReport, Use

FLOATS = ("BF16", "F16", "F32", "F64")
INTS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
SCALES = ("F8_E8M0", "U8", "F32")
FP8_TILES = (128, 32)  # values per side that share a scale
FP4_BLOCK = 32  # values of a row that share a scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One stored tensor to read, and the slot that says where its values go."""

    entry: Entry
    scale: Entry | None
    slot: Slot
    stored: str  # bf16, f16, f32, f64, fp8, fp4 or int
    tile: int = 1  # rows that share a row of scales


@dataclasses.dataclass
class _Found:
    """The report in the making."""

    weights: dict[str, Entry] = dataclasses.field(default_factory=dict)
    scales: dict[str, Entry] = dataclasses.field(default_factory=dict)
    sources: list[Source] = dataclasses.field(default_factory=list)
    faults: dict[str, list[Fault]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def fault(self, kind: str, entry: Entry, detail: str) -> None:
        self.faults[kind].append(
            Fault(file=entry.file.name, tensor=shown(entry.name), detail=detail)
        )

    def claim(self, holder: dict[str, Entry], name: str, entry: Entry) -> None:
        """Enter a tensor under its canonical name, unless another one stands there."""
        first = holder.setdefault(name, entry)
        if first is not entry:
            same = first.name == entry.name
            other = first.file.name if same else f"{first.file.name}: {shown(first.name)}"
            self.fault("broken", entry, f"the same tensor also stands in {other}")


def _read(directory: Path, found: _Found) -> tuple[list[Path], list[Entry]]:
    """Every entry of every readable file; what is wrong with the files goes into `found`."""
    files = headers.tensor_files(directory)
    entries: list[Entry] = []
    by_file: dict[str, set[str]] = {}
    broken = found.faults["broken"]
    for file in files:
        try:
            read = headers.read(file)
        except CheckpointError as error:
            broken.append(error.fault)
            continue
        by_file[file.name] = {e.name for e in read}
        entries += read
    broken += headers.missing_shards(files)
    try:
        index = headers.read_index(directory)
    except CheckpointError as error:
        broken.append(error.fault)
        index = None
    if index is not None:
        readable = by_file | {f.name: set(index) for f in files if f.name not in by_file}
        broken += headers.index_faults(index, readable)
        for entry in entries:
            if entry.name not in index:
                found.fault("unexpected", entry, f"{headers.INDEX} does not name it")
    return files, entries


def _sort(entries: list[Entry], slots: dict[str, Slot], cfg: Config, found: _Found) -> None:
    """Tell weights, scales, skipped and unexpected tensors apart."""
    for entry in entries:
        name = checkpoint.canonical(entry.name)
        weight = checkpoint.weight_of(name)
        if name in slots:
            found.claim(found.weights, name, entry)
        elif weight in slots:
            found.claim(found.scales, weight, entry)
        elif reason := checkpoint.skip_reason(name, cfg):
            found.fault("skipped", entry, reason)
        else:
            found.fault("unexpected", entry, _why_unexpected(name, weight))


def _why_unexpected(name: str, weight: str | None) -> str:
    if name.endswith((".weight_scale", ".weight_offset")):
        return "belongs to an int8 (ModelSlim W8A8) checkpoint, which this loader does not read"
    return "a scale without its weight" if weight else "no parameter has this name"


def _tiled(shape: tuple[int, ...], rows: int, cols: int) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))


def _plain(slot: Slot, entry: Entry, scale: Entry | None, found: _Found) -> str:
    """Check a tensor that is stored as its values; the stored format, or "" if it is refused."""
    ints = slot.leaf.role == "int32"
    allowed = INTS if ints else FLOATS
    if entry.dtype not in allowed:
        detail = f"is {shown(entry.dtype)}; {' or '.join(allowed)} is read"
        found.fault("wrong_dtype", entry, detail)
        return ""
    if entry.shape != slot.shape:
        found.fault("wrong_shape", entry, f"is {list(entry.shape)}, not {list(slot.shape)}")
        return ""
    if scale is not None:
        found.fault("wrong_dtype", scale, f"a scale, but its weight is plain {entry.dtype}")
        return ""
    return "int" if ints else entry.dtype.lower()


def _quantised(slot: Slot, entry: Entry, scale: Entry | None, found: _Found) -> tuple[str, int]:
    """Check a tensor that needs a scale; the stored format and tile, or "" if it is refused."""
    shape = slot.shape
    stored = "fp8" if entry.dtype == "F8_E4M3" else "fp4"
    packed = shape if stored == "fp8" else (*shape[:-1], shape[-1] // 2)
    if entry.shape == shape and stored == "fp4":
        detail = f"is {entry.dtype} {list(shape)}: one int8 a value (W8A8), which is not read"
        found.fault("wrong_dtype", entry, detail)
        return "", 1
    if entry.shape != packed or (stored == "fp4" and shape[-1] % FP4_BLOCK):
        detail = f"is {entry.dtype} {list(entry.shape)}; {stored} of {list(shape)} was expected"
        found.fault("wrong_shape", entry, detail)
        return "", 1
    if scale is None:
        name = checkpoint.scale_of(shown(entry.name))
        detail = f"the scale of a tensor stored as {entry.dtype}"
        found.faults["missing"].append(Fault(file=entry.file.name, tensor=name, detail=detail))
        return "", 1
    if scale.dtype not in SCALES:
        found.fault("wrong_dtype", scale, f"a scale of {shown(scale.dtype)}; allowed: {SCALES}")
        return "", 1
    grids = {n: _tiled(shape, n, n) for n in FP8_TILES}
    if stored == "fp4":
        grids = {1: _tiled(shape, 1, FP4_BLOCK)}
    for tile, grid in grids.items():
        if scale.shape == grid:
            return stored, tile
    wanted = " or ".join(str(list(grid)) for grid in grids.values())
    found.fault("wrong_shape", scale, f"a scale of {list(scale.shape)}, not {wanted}")
    return "", 1


def _check(slot: Slot, entry: Entry, scale: Entry | None, found: _Found) -> None:
    matrix = len(slot.shape) > 1 and slot.leaf.role != "int32"
    if matrix and entry.dtype in ("F8_E4M3", "I8", "U8"):
        stored, tile = _quantised(slot, entry, scale, found)
    else:
        stored, tile = _plain(slot, entry, scale, found), 1
    if stored:
        made = Source(entry=entry, scale=scale, slot=slot, stored=stored, tile=tile)
        found.sources.append(made)


def _cover(like: dict[str, table.Leaf], slots: dict[str, Slot], found: _Found) -> None:
    """Find what no tensor holds, and what two tensors of different names hold."""
    owner: dict[tuple[str, int | None], Entry] = {}
    for name, entry in found.weights.items():
        slot = slots[name]
        experts = range(slot.leaf.shape[0]) if slot.fused else (None,)
        for part in slot.parts:
            for x in experts:
                first = owner.setdefault((part.path, part.expert if x is None else x), entry)
                if first is not entry:
                    other = f"{first.file.name}: {shown(first.name)}"
                    found.fault("broken", entry, f"the same parameter also stands in {other}")
                    break
    for path, leaf in like.items():
        known = f" ({leaf.hf} in transformers)" if leaf.hf and leaf.hf != leaf.official else ""
        for x in range(leaf.shape[0]) if leaf.stacked else (None,):
            if (path, x) not in owner:
                of = f"expert {x} of {leaf.shape[0]} of {path}" if leaf.stacked else path
                name = leaf.official.replace("{x}", str(x))
                found.faults["missing"].append(Fault(file="", tensor=name, detail=of + known))


def _hints(missing: list[Fault], entries: list[Entry], cfg: Config) -> tuple[str, ...]:
    names = {checkpoint.canonical(e.name) for e in entries}
    if not cfg.mtp or not missing or not all(f.tensor.startswith("mtp.") for f in missing):
        return ()
    if "mtp.0.main_norm.weight" in names:
        return ("its drafts are DSpark, which this model has not; drafts=False leaves them out",)
    return ("only the draft module is missing; drafts=False loads the rest",)


def _family(names: dict[str, Entry], slots: dict[str, Slot]) -> str:
    """Which family the used names belong to; names that both share say nothing."""
    told = set()
    for name in names:
        leaf = slots[name].leaf
        theirs = leaf.hf.removeprefix("model.")
        if leaf.hf and theirs != leaf.official:
            told.add("transformers" if name == theirs else "official")
    return told.pop() if len(told) == 1 else "mixed"


def match(directory: Path, cfg: Config) -> tuple[LoadReport, list[Source]]:
    """The report on a directory for the model `cfg` (mtp 0: without drafts), and what to read.

    Reads headers only. The sources are complete only if the report has no faults. Raises
    CheckpointError if there is no safetensors file to look at.
    """
    like = table.spec(cfg)
    slots = checkpoint.slots(like)
    found = _Found()
    files, entries = _read(directory, found)
    _sort(entries, slots, cfg, found)
    for name, entry in found.weights.items():
        _check(slots[name], entry, found.scales.get(name), found)
    for name, scale in found.scales.items():
        if name not in found.weights:
            found.fault("unexpected", scale, "a scale without its weight")
    _cover(paths(like), slots, found)
    kinds = ("skipped", "missing", "unexpected", "wrong_shape", "wrong_dtype", "broken")
    report = LoadReport(
        directory=directory,
        files=tuple(f.name for f in files),
        family=_family(found.weights, slots),
        used=tuple(_use(source) for source in found.sources),
        hints=_hints(found.faults["missing"], entries, cfg),
        **{kind: tuple(found.faults[kind]) for kind in kinds},
    )
    return report, found.sources


def _use(source: Source) -> Use:
    scale = source.scale.num_bytes if source.scale else 0
    parts = source.slot.parts
    return Use(
        file=source.entry.file.name,
        tensor=source.entry.name,
        stored=source.stored,
        num_bytes=source.entry.num_bytes + scale,
        paths=tuple(part.path for part in parts),
        expert=parts[0].expert,
    )
