"""A checkpoint on disk as `Params`: refused from its headers, or streamed into place.

Files are mapped in windows of a few MB, converted into tensors that already have their final shape
and dtype, and unmapped: the peak is the parameters plus one window per thread. Bits that flip in
the data cannot be detected, since the format has no checksum; NaN scales and expert ids out of
range can, and are.
"""

import dataclasses
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from dsv4 import quant, table
from dsv4.checkpoint import Part
from dsv4.config import Config
from dsv4.params import Params
from dsv4.tree import from_paths, paths
from runtime.headers import CheckpointError, Entry, shown
from runtime.match import Source, match
from runtime.report import LoadReport

__all__ = ["CheckpointError", "LoadReport", "inspect", "load"]

Progress = Callable[[int, int, str], None]  # stored bytes done, of how many, tensor

WINDOW_BYTES = 4 << 20  # of one stored tensor, read at a time by one thread
WINDOW_VALUES = 1 << 20  # to dequantise at a time: the intermediates take 20 bytes a value
ALIGN_ROWS = 128  # windows of fp8 start at the border of a tile

_DTYPES = MappingProxyType(
    {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn,
        "I8": torch.int8,
        "U8": torch.uint8,
        "I16": torch.int16,
        "U16": torch.uint16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "I64": torch.int64,
        "U64": torch.int64,  # values above int64 turn negative, and are refused as such
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Window:
    """Rows of one stored matrix, on their way to one place."""

    source: Source
    to: Tensor  # [rows of the part, columns]: a view of the parameter
    matrix: int  # which matrix of the stored tensor
    rows: tuple[int, int]  # of that matrix
    first: int  # the row of the matrix that is row 0 of `to`

    @property
    def num_bytes(self) -> int:
        """Stored bytes, scales not counted."""
        a, b = self.rows
        return (b - a) * _row_bytes(self.source.entry, self.source.slot.fused)


def _matrix(entry: Entry, fused: bool) -> tuple[int, int]:
    """Rows and columns of each of a stored tensor's matrices; a vector is one row."""
    shape = entry.shape[1:] if fused else entry.shape
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def _row_bytes(entry: Entry, fused: bool) -> int:
    rows, _ = _matrix(entry, fused)
    matrices = entry.shape[0] if fused else 1
    return entry.num_bytes // (rows * matrices)


def inspect(directory: str | Path, cfg: Config, *, drafts: bool = True) -> LoadReport:
    """What loading `directory` as a `cfg` model would use, skip and refuse, from headers alone.

    Without `drafts` the draft module is left out. Faults are in the report, also those that make
    `load` raise; raises CheckpointError only if there is no safetensors file to look at.
    """
    report, _ = match(Path(directory), _without_drafts(cfg, drafts))
    return report


def load(
    directory: str | Path,
    cfg: Config,
    dtype: torch.dtype,
    *,
    drafts: bool = True,
    strict: bool = True,
    threads: int = 8,
    progress: Progress | None = None,
) -> tuple[Params, LoadReport]:
    """The parameters of a `cfg` model of dtype `dtype` from a directory, and the report on them.

    Accepts both families' names, with or without an index, plain, fp8 or fp4, whatever each tensor
    is stored as. Without `drafts` the result has no draft module. `progress` is called from this
    thread. Raises CheckpointError, before anything is allocated, if a tensor is missing, has the
    wrong shape or dtype, stands twice, is unexpected (if `strict`), or if a file is broken; while
    reading, if a scale is NaN or infinite or an expert id out of range. Raises ValueError if
    `dtype` is not a floating type of at least 16 bits, or `threads` is below 1.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"dtype is {dtype}; it must be bfloat16, float16, float32 or float64")
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    cfg = _without_drafts(cfg, drafts)
    report, sources = match(Path(directory), cfg)
    report.refuse(strict=strict)
    like = table.spec(cfg)
    made = {p: torch.empty(leaf.shape, dtype=leaf.dtype(dtype)) for p, leaf in paths(like).items()}
    sources.sort(key=lambda s: (s.entry.file, s.entry.start))
    windows = [w for source in sources for w in _windows(source, made)]
    _stream(windows, cfg, threads, progress)
    return from_paths(like, made), report


def _without_drafts(cfg: Config, drafts: bool) -> Config:
    return cfg if drafts else dataclasses.replace(cfg, mtp=0)


def _stream(windows: list[_Window], cfg: Config, threads: int, progress: Progress | None) -> None:
    """Read every window; the first failure stops the rest and is raised."""
    total, done = sum(w.num_bytes for w in windows), 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="load")
    own = torch.get_num_threads()
    torch.set_num_threads(1)  # the windows are the parallelism; torch's own would multiply it
    try:
        running = {pool.submit(_read, w, cfg): w for w in windows}
        for future in as_completed(running):
            future.result()
            window = running.pop(future)
            done += window.num_bytes
            if progress is not None:
                progress(done, total, window.source.entry.name)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(own)


def _windows(source: Source, made: dict[str, Tensor]) -> Iterator[_Window]:
    slot = source.slot
    for part in slot.parts:
        leaf = made[part.path]
        for matrix in range(leaf.shape[0]) if slot.fused else (0,):
            index = matrix if slot.fused else part.expert
            to = leaf if index is None else leaf[index]
            to = to.view(-1, to.shape[-1])
            yield from _cut(source, part, matrix, to)


def _cut(source: Source, part: Part, matrix: int, to: Tensor) -> Iterator[_Window]:
    first, end = part.rows
    num = WINDOW_BYTES // max(_row_bytes(source.entry, source.slot.fused), 1)
    if source.scale is not None:
        num = min(num, WINDOW_VALUES // to.shape[-1])
    num = max(num // ALIGN_ROWS, 1) * ALIGN_ROWS
    for a in range(first // ALIGN_ROWS * ALIGN_ROWS, end, num):
        rows = (max(a, first), min(a + num, end))
        yield _Window(source=source, to=to, matrix=matrix, rows=rows, first=first)


def _bytes(entry: Entry, fused: bool, matrix: int, rows: tuple[int, int]) -> Tensor:
    """Rows of one stored matrix as uint8 [rows, bytes], mapped: they vanish with the tensor."""
    num_rows, _ = _matrix(entry, fused)
    width = _row_bytes(entry, fused)
    start = entry.start + (matrix * num_rows + rows[0]) * width
    length = (rows[1] - rows[0]) * width
    base = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    skip = start - base
    try:
        with entry.file.open("rb") as f:
            # Private and writable, as torch asks for; nothing writes to it.
            mapped = mmap.mmap(f.fileno(), skip + length, access=mmap.ACCESS_COPY, offset=base)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{entry.file.name}: {shown(entry.name)}: cannot be mapped: {error}"
        ) from error
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=length, offset=skip)
    return raw.view(-1, width)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as values; copied if the file does not align them."""
    return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype)


def _read(window: _Window, cfg: Config) -> None:
    """Bring one window's values to their place."""
    a, b = window.rows
    source, entry, fused = window.source, window.source.entry, window.source.slot.fused
    to = window.to[a - window.first : b - window.first]
    if source.scale is None:
        values = _typed(_bytes(entry, fused, window.matrix, (a, b)), _DTYPES[entry.dtype])
        if source.stored == "int":
            values = values.to(torch.int64)
            _check_ids(values, entry, cfg)
        to.copy_(values)
        return
    start = a // source.tile * source.tile  # a part may begin inside a tile
    raw = _bytes(entry, fused, window.matrix, (start, b))
    scale = _scale(window, (start // source.tile, -(-b // source.tile)))
    if source.stored == "fp8":
        values = quant.dequantise_fp8(raw.view(torch.float8_e4m3fn), scale)
    else:
        values = quant.dequantise_fp4(raw, scale)
    to.copy_(values[a - start :])


def _scale(window: _Window, rows: tuple[int, int]) -> Tensor:
    """Rows of a scale in float32; raises CheckpointError if one is NaN or infinite."""
    entry = window.source.scale
    assert entry is not None
    raw = _bytes(entry, window.source.slot.fused, window.matrix, rows)
    scale = _typed(raw, torch.float32) if entry.dtype == "F32" else quant.e8m0(raw)
    bad = (~torch.isfinite(scale)).nonzero()
    if len(bad):
        at = [rows[0] + int(bad[0, 0]), int(bad[0, 1])]
        at = [window.matrix, *at] if window.source.slot.fused else at
        raise CheckpointError(
            f"{entry.file.name}: {shown(entry.name)}: {len(bad)} scales are NaN or infinite, the "
            f"first at {at}; the tensor is damaged: fetch the file again"
        )
    return scale


def _check_ids(ids: Tensor, entry: Entry, cfg: Config) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= cfg.experts:
        raise CheckpointError(
            f"{entry.file.name}: {shown(entry.name)}: holds expert ids from {low} to {high}; "
            f"0 to {cfg.experts - 1} exist"
        )
