"""What stands in the safetensors files of a directory, read from their headers alone.

Nothing here knows the model. A file is an 8-byte little-endian header length, a JSON header, and
the tensors' bytes without gaps; `read` believes none of it before it has been compared with the
size of the file.
"""

import collections
import dataclasses
import json
import math
import os
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# Bits per value of every dtype the format knows.
BITS = MappingProxyType(
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8)
    | dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | dict.fromkeys(("U16", "I16", "F16", "BF16"), 16)
    | dict.fromkeys(("U32", "I32", "F32"), 32)
    | dict.fromkeys(("U64", "I64", "F64", "C64"), 64)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One stored tensor."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes it occupies."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Something wrong with one file or one tensor in it; an empty tensor means the whole file."""

    file: str
    tensor: str
    detail: str

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.tensor) if part)
        return f"{where}: {self.detail}" if where else self.detail


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names files and tensors."""

    def __init__(self, why: str | Fault) -> None:
        super().__init__(str(why))
        self.fault = why if isinstance(why, Fault) else Fault(file="", tensor="", detail=why)


def shown(name: str) -> str:
    """A name from a file, safe to print: ASCII only, and not endless."""
    text = ascii(name)[1:-1]
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refused if a key repeats (json would keep the last and hide the first)."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise ValueError(f"{shown(twice)} is named twice")
    return made


def _refuse(file: str, tensor: str, detail: str) -> CheckpointError:
    return CheckpointError(Fault(file=file, tensor=shown(tensor), detail=detail))


def _json_object(data: bytes, file: str) -> dict[str, Any]:
    try:
        made = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise _refuse(file, "", f"its JSON is damaged: {shown(str(error))}") from error
    if not isinstance(made, dict):
        raise _refuse(file, "", "its JSON is not an object")
    return made


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(file: Path, base: int, name: str, value: Any) -> Entry:
    """One header entry, whose offsets count from `base`."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _refuse(file.name, name, "its entry must hold dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise _refuse(file.name, name, "its dtype is not a string")
    if not isinstance(shape, list) or not all(_whole(n) for n in shape):
        raise _refuse(file.name, name, "its shape is not a list of whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n) for n in offsets):
        raise _refuse(file.name, name, "its data_offsets are not two whole numbers")
    start, end = offsets
    given = end - start
    needed = -(-math.prod(shape) * BITS[dtype] // 8) if dtype in BITS else max(given, 0)
    if given != needed:
        raise _refuse(file.name, name, f"{dtype} {shape} needs {needed} bytes, not {given}")
    return Entry(
        file=file, name=name, dtype=dtype, shape=tuple(shape), start=base + start, end=base + end
    )


def _check_layout(entries: list[Entry], base: int, size: int) -> None:
    """Tensors must cover the bytes from `base` exactly, and the file must hold them."""
    at = base
    for entry in entries:
        if entry.end > size:
            detail = f"ends at byte {entry.end} of a file of {size}: the file is truncated"
            raise _refuse(entry.file.name, entry.name, detail)
        if entry.start != at:
            detail = f"starts at byte {entry.start}; what stands before it ends at {at}"
            raise _refuse(entry.file.name, entry.name, detail)
        at = entry.end
    if at != size:
        last = entries[-1]
        raise _refuse(last.file.name, last.name, f"{size - at} bytes follow this last tensor")


def _header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, where the tensors start, and the size of the file."""
    with file.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        first = f.read(8)
        if first == b"version ":
            detail = "is a Git LFS pointer, not the tensors; fetch them with `git lfs pull`"
            raise _refuse(file.name, "", detail)
        if len(first) < 8:
            raise _refuse(file.name, "", f"holds {size} bytes: the file is truncated")
        length = int.from_bytes(first, "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            detail = (
                f"its header claims {length} bytes, in a file of {size} (at most "
                f"{MAX_HEADER_BYTES} are allowed): it is truncated, or not a safetensors file"
            )
            raise _refuse(file.name, "", detail)
        return _json_object(f.read(length), file.name), 8 + length, size


def read(file: Path) -> tuple[Entry, ...]:
    """The tensors of one file, by position.

    A dtype that is not in `BITS` is passed on, since only a tensor that is used needs one. Raises
    CheckpointError if the file cannot be read, is truncated, or its header contradicts itself.
    """
    if not file.is_file():
        raise _refuse(file.name, "", "is not a file (a link without its target?)")
    try:
        header, base, size = _header(file)
    except OSError as error:
        raise _refuse(file.name, "", f"cannot be read: {error}") from error
    header.pop("__metadata__", None)
    entries = [_entry(file, base, name, value) for name, value in header.items()]
    if not entries:
        raise _refuse(file.name, "", "holds no tensor")
    entries.sort(key=lambda e: (e.start, e.end))
    _check_layout(entries, base, size)
    return tuple(entries)


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory. Raises CheckpointError if there is none to look at."""
    if not directory.exists():
        raise CheckpointError(f"{directory} does not exist; a directory of *.safetensors is needed")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; name the directory that holds it")
    files = sorted(f for f in directory.glob("*.safetensors") if not f.name.startswith("."))
    if files:
        return files
    pickles = sorted(f.name for end in ("bin", "pt", "pth") for f in directory.glob(f"*.{end}"))
    if pickles:
        raise CheckpointError(
            f"{directory} holds pickles only ({', '.join(pickles[:3])}), and loading one would run "
            "code from it; convert them to safetensors where you trust them"
        )
    raise CheckpointError(f"{directory} holds no *.safetensors file")


def read_index(directory: Path) -> dict[str, str] | None:
    """The index's map from tensor to file, or None without an index.

    Raises CheckpointError if it cannot be read or names a file outside the directory.
    """
    file = directory / INDEX
    if not file.is_file():
        return None
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _refuse(INDEX, "", f"cannot be read: {error}") from error
    named = _json_object(data, INDEX).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(f, str) for f in named.values()):
        raise _refuse(INDEX, "", "weight_map must map names of tensors to names of files")
    for name, target in named.items():
        if not target or Path(target).name != target or "\\" in target:
            raise _refuse(INDEX, name, f"{shown(target)} is not a file name")
    return named


def missing_shards(files: list[Path]) -> list[Fault]:
    """Shards that the names model-00001-of-00003.safetensors promise and the directory lacks."""
    have = {f.name for f in files}
    wanted: dict[str, str] = {}
    for name in have:
        found = re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", name)
        if found and int(found[4]) <= 100_000:
            head, digits, of, total, tail = found.groups()
            for n in range(1, int(total) + 1):
                shard = f"{head}{n:0{len(digits)}d}{of}{total}{tail}"
                wanted.setdefault(shard, name)
    return [
        Fault(file=shard, tensor="", detail=f"is missing; {by} says that it exists")
        for shard, by in sorted(wanted.items())
        if shard not in have
    ]


def index_faults(index: dict[str, str], found: dict[str, set[str]]) -> list[Fault]:
    """Where an index contradicts the files: `found` is the tensor names by readable file."""
    faults, lost = [], collections.defaultdict(list)
    for name, file in index.items():
        if file not in found:
            lost[file].append(name)
        elif name not in found[file]:
            detail = f"{INDEX} puts it in this file, which does not hold it"
            faults.append(Fault(file=shown(file), tensor=shown(name), detail=detail))
    for file, names in lost.items():
        detail = f"{INDEX} puts {len(names)} tensors in this file, which is not there; this is one"
        faults.append(Fault(file=shown(file), tensor=shown(names[0]), detail=detail))
    return faults
