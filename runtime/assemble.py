"""From what each sequence does in a step to the tensors of a `Batch`. Numpy, one conversion.

Query blocks are aligned to absolute positions: a block covers positions m * Z .. m * Z + Z - 1 of
one sequence, the token at position p stands in column p % Z, and columns for which the step has no
token repeat the block's first token (their results are dropped).

    positions 5 .. 9, Z = 4:     [5 5 6 7]  [8 9 8 8]      (columns 0 and 2, 3 are repeats)
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4.batch import Batch, Need, Shape
from dsv4.config import Config

Ints = np.ndarray


@dataclasses.dataclass(frozen=True)
class Row:
    """What one sequence does in a step, and where its state lives."""

    tokens: Sequence[int]  # at least one
    start: int  # position of tokens[0]
    slot: int
    history_pages: Sequence[int]  # page of each page_tokens positions, from position 0
    window_pages: Sequence[int]  # likewise, from page index `window_start`
    window_start: int = 0
    wanted: int = 1  # how many of the last tokens have their logits wanted


@dataclasses.dataclass(frozen=True)
class Rows:
    """What n sequences do in a step, as arrays: what `assemble_rows` works on."""

    tokens: Ints  # [T] of all sequences, one after the other
    counts: Ints  # [n] of them each, at least one
    starts: Ints  # [n] position of its first token
    slots: Ints  # [n]
    wanted: Ints  # [n] how many of its last tokens have their logits wanted
    history: Ints  # [n, Q] history page of each page_tokens positions
    window: Ints  # [n, Q'] window page; column = page index modulo Q'


def _size(name: str, given: int | None, needed: int) -> int:
    if given is not None and given < needed:
        raise ValueError(f"{name} is {given} in the step's shape; this step needs {needed}")
    return needed if given is None else given


def _spans(counts: Ints) -> Ints:
    """0 .. counts[0] - 1, 0 .. counts[1] - 1, ... in one array."""
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _blocks(seq: Ints, positions: Ints, z: int) -> tuple[Ints, Ints]:
    """Blocks [U, Z] of real tokens, and the place of each token in them [T]."""
    if z == 1:
        place = np.arange(len(seq))
        return place[:, None], place
    tile = positions // z
    opens = np.ones(len(seq), dtype=bool)
    opens[1:] = (seq[1:] != seq[:-1]) | (tile[1:] != tile[:-1])
    block = opens.cumsum() - 1
    place = block * z + positions % z
    blocks = np.repeat(np.flatnonzero(opens), z)
    blocks[place] = np.arange(len(seq))
    return blocks.reshape(-1, z), place


def _closes(starts: Ints, ends: Ints, rate: int) -> Ints:
    """(table row, entry) of every group whose last token lies in this step. [W, 2]"""
    first, last = starts // rate, ends // rate
    counts = last - first
    rows = np.repeat(np.arange(1, len(starts) + 1), counts)
    return np.stack((rows, np.repeat(first, counts) + _spans(counts)), axis=1)


def need(rows: Rows, rates: Sequence[int], decode: bool) -> Need:
    """What a step must have room for."""
    ends = rows.starts + rows.counts
    return Need(
        decode=decode,
        tokens=len(rows.tokens),
        seqs=len(rows.counts),
        wanted=int(rows.wanted.sum()),
        closes=tuple(int((ends // r - rows.starts // r).sum()) for r in rates),
        history=rows.history.shape[1],
        window=rows.window.shape[1],
    )


def _tables(rows: Sequence[Row], page_tokens: int, shape: Shape) -> tuple[Ints, Ints]:
    """History pages [n, Q] and window pages [n, Q']; columns nobody needs hold page 0."""
    spans = [-(-(r.start + len(r.tokens)) // page_tokens) for r in rows]
    w = _size("window", shape.window, max(len(r.window_pages) for r in rows))
    history = np.zeros((len(rows), max(spans)), np.int64)
    window = np.zeros((len(rows), w), np.int64)
    for b, (row, pages) in enumerate(zip(rows, spans, strict=True)):
        assert len(row.history_pages) >= pages, "a sequence has fewer history pages than tokens"
        assert row.window_start + len(row.window_pages) >= pages, "or fewer window pages"
        history[b, :pages] = row.history_pages[:pages]
        columns = (row.window_start + np.arange(len(row.window_pages))) % w
        window[b, columns] = row.window_pages
    return history, window


def _framed(name: str, x: Ints, seqs: int, width: int | None) -> Ints:
    """A table with row 0 and padding rows, and columns up to `width`."""
    out = np.zeros((seqs, _size(name, width, x.shape[1])), np.int64)
    out[1 : 1 + len(x), : x.shape[1]] = x
    return out


def _headed(x: Ints, seqs: int) -> Ints:
    """Values of sequences, with those of row 0 and of padding rows."""
    out = np.zeros(seqs, np.int64)
    out[1 : 1 + len(x)] = x
    return out


def _grown(x: Ints, size: int, value: int = 0) -> Ints:
    """`x` with its first dim grown to `size`, filled with `value`."""
    if len(x) == size:
        return x
    out = np.full((size, *x.shape[1:]), value, np.int64)
    out[: len(x)] = x
    return out


def _tensors(arrays: dict[str, Ints], device: torch.device | None) -> dict[str, Tensor]:
    """Views into one tensor, so that a step costs one conversion and one transfer."""
    flat = torch.from_numpy(np.concatenate(list(arrays.values()), axis=None))
    parts = flat.to(device).split([a.size for a in arrays.values()])
    each = zip(arrays.items(), parts, strict=True)
    return {n: p if a.ndim == 1 else p.view(a.shape) for (n, a), p in each}


def assemble(
    rows: Sequence[Row],
    cfg: Config,
    *,
    page_tokens: int,
    block: int,
    shape: Shape | None = None,
    device: torch.device | None = None,
) -> Batch:
    """As `assemble_rows`, of rows one by one."""
    shape = shape or Shape()
    history, window = _tables(rows, page_tokens, shape)
    listed = Rows(
        tokens=np.concatenate([np.asarray(r.tokens, np.int64) for r in rows]),
        counts=np.array([len(r.tokens) for r in rows]),
        starts=np.array([r.start for r in rows]),
        slots=np.array([r.slot for r in rows]),
        wanted=np.array([r.wanted for r in rows]),
        history=history,
        window=window,
    )
    return assemble_rows(listed, cfg.rates, block=block, shape=shape, device=device)


def assemble_rows(
    rows: Rows,
    rates: Sequence[int],
    *,
    block: int,
    shape: Shape | None = None,
    device: torch.device | None = None,
) -> Batch:
    """The batch of a step: sequence i of `rows` has table row i + 1. `block` is Z.

    `rates` are `cfg.rates`, or none for the draft module, which closes no groups. Wanted logits are
    in order of sequences, then of tokens; padding follows. Raises ValueError if `shape` is too
    small for the step.
    """
    shape = shape or Shape()
    counts, starts, wants = rows.counts, rows.starts, rows.wanted
    assert counts.min() >= 1, "a sequence in a step has at least one token"
    assert (wants <= counts).all(), "more logits wanted than there are tokens"
    ends, stops = starts + counts, counts.cumsum()
    seq, positions = np.arange(1, len(counts) + 1), starts
    if len(rows.tokens) > len(counts):  # not one token each
        seq = np.repeat(seq, counts)
        positions = np.repeat(starts, counts) + _spans(counts)
    blocks, place = _blocks(seq, positions, block)
    wanted = np.repeat(stops - wants, wants) + _spans(wants)

    real = len(seq)
    t = _size("tokens", shape.tokens, real)
    spare = int(t > real)
    u = _size("blocks", shape.blocks, len(blocks) + spare)
    seqs = _size("seqs", shape.seqs, len(counts) + 1)
    arrays = {
        "tokens": _grown(rows.tokens, t),
        "positions": _grown(positions, t),
        "seq": _grown(seq, t),
        "starts": _headed(starts, seqs),
        "lengths": _headed(ends, seqs),
        "first": _headed(stops - counts, seqs),
        "wanted": _grown(wanted, _size("wanted", shape.wanted, len(wanted))),
        "history": _framed("history", rows.history, seqs, shape.history),
        "window": _framed("window", rows.window, seqs, shape.window),
        "slots": _headed(rows.slots, seqs),
        # Padding tokens stand in a block of their own; spare blocks repeat a token.
        "blocks": _grown(blocks, u, real if spare else 0),
        "place": _grown(place, t, len(blocks) * block),
    }
    num_closes = shape.closes or (None,) * len(rates)
    for rate, size in zip(rates, num_closes, strict=True):
        c = _closes(starts, ends, rate)
        arrays[f"closes {rate}"] = _grown(c, _size(f"closes of rate {rate}", size, len(c)))
    made = _tensors(arrays, device)
    closes = tuple(made.pop(f"closes {rate}") for rate in rates)
    return Batch(**made, closes=closes)
