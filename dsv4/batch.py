"""What one step is told, and what it returns.

A step takes flat tokens of many sequences. Each sequence owns one table row; its tokens stand
together, at consecutive positions. Row 0 of every table belongs to padding tokens, whose position
is 0 and whose pages and slot are 0. All tensors are int64.
"""

import dataclasses

import torch
from torch import Tensor

from dsv4.config import Config
from dsv4.tree import node


@node
class Batch:
    """The tokens of one step and where their state lives. Letters: package docstring."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T] absolute
    seq: Tensor  # [T] table row, 0 for padding
    starts: Tensor  # [B] position of the sequence's first token in this step
    lengths: Tensor  # [B] tokens of the sequence after this step
    first: Tensor  # [B] flat index of the sequence's first token in this step
    wanted: Tensor  # [Y] flat indices of the tokens whose logits are wanted
    history: Tensor  # [B, Q] history page of each page_tokens positions
    window: Tensor  # [B, Q'] window page; column = page index modulo Q'
    slots: Tensor  # [B] ring slot
    blocks: Tensor  # [U, Z] flat index of the token at position m * Z + column, or of another
    #                 token of the block where the step has none there
    place: Tensor  # [T] where token t stands in blocks, flattened
    closes: tuple[Tensor, ...]  # per rate of cfg.rates [W, 2]: table row, entry; padding is (0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a batch's tensors; None is what the step needs. Too small a size is refused.

    `blocks` must leave one block for padding tokens, if there are any.
    """

    tokens: int | None = None  # T
    seqs: int | None = None  # B, row 0 included
    wanted: int | None = None  # Y
    block: int | None = None  # Z
    blocks: int | None = None  # U
    closes: tuple[int, ...] | None = None  # W, per rate of cfg.rates
    history: int | None = None  # Q
    window: int | None = None  # Q'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """What a step must have room for, in the words of `Shape`; `seqs` without row 0.

    `decode`: every sequence has its newest token and drafts alone, so blocks of one token serve.
    """

    decode: bool
    tokens: int
    seqs: int
    wanted: int
    closes: tuple[int, ...]
    history: int
    window: int  # exactly: columns are page indices modulo this


def shape_of(batch: Batch) -> Shape:
    """The sizes of a batch's tensors, all of them."""
    return Shape(
        tokens=batch.tokens.shape[0],
        seqs=batch.slots.shape[0],
        wanted=batch.wanted.shape[0],
        block=batch.blocks.shape[1],
        blocks=batch.blocks.shape[0],
        closes=tuple(c.shape[0] for c in batch.closes),
        history=batch.history.shape[1],
        window=batch.window.shape[1],
    )


def blank(shape: Shape, device: torch.device | None = None) -> Batch:
    """A batch of padding alone, of a shape without None."""
    sizes = dataclasses.astuple(shape)
    assert None not in sizes, f"{shape} leaves sizes open"

    def zeros(*dims: int | None) -> Tensor:
        return torch.zeros([d for d in dims if d is not None], dtype=torch.int64, device=device)

    t, b = shape.tokens, shape.seqs
    return Batch(
        tokens=zeros(t),
        positions=zeros(t),
        seq=zeros(t),
        starts=zeros(b),
        lengths=zeros(b),
        first=zeros(b),
        wanted=zeros(shape.wanted),
        history=zeros(b, shape.history),
        window=zeros(b, shape.window),
        slots=zeros(b),
        blocks=zeros(shape.blocks, shape.block),
        place=zeros(t),
        closes=tuple(zeros(w, 2) for w in shape.closes or ()),
    )


@node
class StepOut:
    """What a step computes."""

    logits: Tensor  # [Y, V] wide
    hidden: Tensor  # [T, M, D] streams before the final collapse: the draft's input
    load: Tensor  # [layers, X] int32: tokens routed to each expert, padding excluded


def whole(tokens_BS: Tensor, cfg: Config, page_tokens: int, block: int) -> Batch:
    """A batch of B fresh sequences of S tokens each, every token wanted.

    Sequence b has table row and slot b + 1 and the pages 1 + b * Q .. (b + 1) * Q of both groups.
    `block` is Z. The same as `runtime.assemble` makes of B whole prompts (a test holds them equal).
    """
    num_seqs, length = tokens_BS.shape
    dev = tokens_BS.device
    pages = -(-length // page_tokens)

    def iota(n: int) -> Tensor:
        return torch.arange(n, device=dev)

    rows = iota(num_seqs + 1)
    t = iota(num_seqs * length)
    real = (rows > 0).long()
    table = ((rows[:, None] - 1) * pages + 1 + iota(pages)) * real[:, None]
    tiles = -(-length // block)
    # Short last blocks repeat the sequence's last token.
    column = (iota(tiles)[:, None] * block + iota(block)).clamp(max=length - 1)
    blocks = (iota(num_seqs)[:, None, None] * length + column).reshape(-1, block)
    place = iota(num_seqs)[:, None] * (tiles * block) + iota(length)
    closes = tuple(
        torch.stack(
            (
                (iota(num_seqs) + 1).repeat_interleave(length // rate),
                iota(length // rate).repeat(num_seqs),
            ),
            dim=1,
        )
        for rate in cfg.rates
    )
    return Batch(
        tokens=tokens_BS.reshape(-1),
        positions=t % length,
        seq=t // length + 1,
        starts=torch.zeros_like(rows),
        lengths=real * length,
        first=(rows - 1).clamp(min=0) * length,
        wanted=t,
        history=table,
        window=table,
        slots=rows,
        blocks=blocks,
        place=place.reshape(-1),
        closes=closes,
    )
