"""`Params` as a checkpoint on disk, in the names of either family.

Tensors only: the config is the caller's to write. Files appear under their names only when all of
them are complete, so that a reader never meets half a checkpoint.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from dsv4 import checkpoint, table
from dsv4.checkpoint import Slot
from dsv4.config import Config
from dsv4.params import Params
from dsv4.table import Leaf
from dsv4.tree import paths
from runtime.headers import INDEX
from runtime.quantise import FP8_TILE, to_fp4, to_fp8

FAMILIES = ("official", "transformers")
SHARD_BYTES = 5_000_000_000

_Writer = Callable[[Path], None]

_CODES = MappingProxyType(
    {
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.float32: "F32",
        torch.float64: "F64",
        torch.int64: "I64",
    }
)
_ITEM_BYTES = MappingProxyType({"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    """One tensor as a header describes it."""

    name: str
    code: str  # the format's dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * _ITEM_BYTES.get(self.code, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """What one slot becomes: a tensor, or a weight and its scale; made only when it is written."""

    stored: tuple[_Stored, ...]
    make: Callable[[], tuple[Tensor, ...]]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return sum(s.num_bytes for s in self.stored)


def save(
    params: Params,
    cfg: Config,
    directory: str | Path,
    *,
    family: str = "official",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    quantise: bool = False,
) -> tuple[Path, ...]:
    """Write `params` as safetensors, with an index if there is more than one file; the files.

    A model directory also has a config.json: `dsv4.config_json.write(cfg)` is its content.

    Loading them in the params' dtype gives the params back bit for bit. With `dtype`, tensors that
    released checkpoints hold in bfloat16 or below are stored in it, the rest stays wide. With
    `quantise` (official names only) each tensor takes its released format instead: fp8, fp4, bf16
    or f32. The directory is made if need be. Raises ValueError if the params do not fit `cfg`, an
    argument is out of range, a value has no released format, or the directory holds safetensors
    files already. Only a checkpoint of one file replaces another of one file: several files cannot
    be replaced at once, and a reader would mix the two.
    """
    _check_arguments(family, dtype, shard_bytes, quantise)
    cfg = cfg if params.mtp is not None else dataclasses.replace(cfg, mtp=0)
    table.check(params, cfg)
    leaves = paths(params)
    groups = [
        _quantised(slot, leaves) if quantise else _plain(slot, leaves, family, dtype)
        for slot in checkpoint.slots(table.spec(cfg), family).values()
    ]
    shards = list(_shards(groups, shard_bytes))
    folder = Path(directory)
    names = [_shard_name(i, len(shards)) for i in range(len(shards))]
    _check_stale(folder, names)
    folder.mkdir(parents=True, exist_ok=True)
    writers: list[tuple[str, _Writer]] = []
    for name, shard in zip(names, shards, strict=True):
        writers.append((name, functools.partial(_write, shard)))
    if len(names) > 1:
        writers.append((INDEX, functools.partial(_write_index, names, shards)))
    return _publish(folder, writers)


def _check_arguments(
    family: str, dtype: torch.dtype | None, shard_bytes: int, quantise: bool
) -> None:
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(FAMILIES)}")
    if dtype is not None and not (dtype in _CODES and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype}; it must be bfloat16, float16, float32 or float64")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; it must be at least 1")
    if quantise and (dtype is not None or family != "official"):
        raise ValueError("the released format has official names and its own dtypes: no dtype here")


def _check_stale(folder: Path, names: list[str]) -> None:
    have = sorted(f.name for pattern in ("*.safetensors", INDEX) for f in folder.glob(pattern))
    if have and not (have == names and len(names) == 1):
        raise ValueError(
            f"{folder} already holds {', '.join(have[:3])}, part of another checkpoint; remove it "
            "or choose another directory"
        )


def _values(slot: Slot, leaves: dict[str, Tensor]) -> Tensor:
    """The slot's values in the params' dtype; its parts are rows of each matrix."""
    parts = []
    for part in slot.parts:
        leaf = leaves[part.path].detach().cpu()
        parts.append(leaf if part.expert is None else leaf[part.expert])
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).reshape(slot.shape)


def _kept(leaf: Leaf, own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    if leaf.role == "int32":
        return torch.int64
    return own if asked is None or leaf.stored == "f32" else asked


def _plain(slot: Slot, leaves: dict[str, Tensor], family: str, asked: torch.dtype | None) -> _Group:
    kept = _kept(slot.leaf, leaves[slot.parts[0].path].dtype, asked)
    name = checkpoint.written(slot, family)
    stored = _Stored(name=name, code=_CODES[kept], shape=slot.shape)
    return _Group(stored=(stored,), make=lambda: (_values(slot, leaves).to(kept),))


def _quantised(slot: Slot, leaves: dict[str, Tensor]) -> _Group:
    """A slot in its released format."""
    if slot.leaf.stored not in ("fp8", "fp4"):
        return _plain(slot, leaves, "official", torch.bfloat16)
    rows, cols = slot.shape
    if slot.leaf.stored == "fp8":
        grid = (-(-rows // FP8_TILE), -(-cols // FP8_TILE))
        weight = _Stored(name=slot.name, code="F8_E4M3", shape=slot.shape)
        convert = to_fp8
    else:
        grid = (rows, cols // 32)
        weight = _Stored(name=slot.name, code="I8", shape=(rows, cols // 2))
        convert = to_fp4
    stored = (weight, _Stored(name=checkpoint.scale_of(slot.name), code="F8_E8M0", shape=grid))

    def make() -> tuple[Tensor, Tensor]:
        try:
            return convert(_values(slot, leaves))
        except ValueError as error:
            raise ValueError(f"{slot.name}: {error}") from error

    return _Group(stored=stored, make=make)


def _shards(groups: list[_Group], limit: int) -> Iterator[list[_Group]]:
    """Groups in order, in lists of at most `limit` bytes (or one group, if that is more)."""
    shard: list[_Group] = []
    held = 0
    for group in groups:
        if shard and held + group.num_bytes > limit:
            yield shard
            shard, held = [], 0
        shard.append(group)
        held += group.num_bytes
    yield shard


def _shard_name(i: int, count: int) -> str:
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def _write_index(names: list[str], shards: list[list[_Group]], file: Path) -> None:
    weight_map = {
        stored.name: name
        for name, shard in zip(names, shards, strict=True)
        for group in shard
        for stored in group.stored
    }
    total = sum(group.num_bytes for shard in shards for group in shard)
    whole = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    file.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _write(shard: list[_Group], file: Path) -> None:
    """One safetensors file; widest dtypes first, so that every tensor is aligned."""
    shard = sorted(shard, key=lambda g: -_ITEM_BYTES.get(g.stored[0].code, 1))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for group in shard:
        for s in group.stored:
            offsets = [at, at + s.num_bytes]
            header[s.name] = {"dtype": s.code, "shape": list(s.shape), "data_offsets": offsets}
            at += s.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for group in shard:
            for stored, tensor in zip(group.stored, group.make(), strict=True):
                raw = tensor.contiguous().view(torch.uint8).numpy()
                assert raw.nbytes == stored.num_bytes, stored.name
                f.write(raw.data)


def _publish(folder: Path, writers: list[tuple[str, _Writer]]) -> tuple[Path, ...]:
    """Write every file under another name, then rename them all; on failure leave nothing."""
    # One process per name: two that save at once do not write into each other's files.
    parts = [folder / f".{name}.{os.getpid()}.part" for name, _ in writers]
    done: list[Path] = []
    try:
        for part, (_, write) in zip(parts, writers, strict=True):
            write(part)
        for part, (name, _) in zip(parts, writers, strict=True):
            os.replace(part, folder / name)
            done.append(folder / name)
    except BaseException:
        for file in done:
            file.unlink(missing_ok=True)
        raise
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return tuple(folder / name for name, _ in writers)
