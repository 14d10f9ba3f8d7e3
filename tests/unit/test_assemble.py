"""Host rows to batch tensors."""

import numpy as np
import pytest
import torch

from dsv4 import batch, model
from dsv4.context import Ctx
from dsv4.tree import leaves, paths
from runtime.assemble import Row, Shape, assemble
from tests import tiny

CFG = tiny.short()  # rates 4 and 8
PAGE = 8


def row(start: int, count: int, first_page: int = 1, slot: int = 1, wanted: int = 1) -> Row:
    pages = range(first_page, first_page + -(-(start + count) // PAGE))
    return Row(
        tokens=[10 + i for i in range(count)],
        start=start,
        slot=slot,
        history_pages=pages,
        window_pages=pages,
        wanted=wanted,
    )


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 7, 8, 29])
def test_whole_prompts(length: int, block: int) -> None:
    """The same logits and pools, bit for bit, as `batch.whole`: it differs in repeats only."""
    ids = tiny.tokens(CFG, 2, length)
    pages = -(-length // PAGE)
    rows = [
        Row(
            tokens=ids[b].tolist(),
            start=0,
            slot=b + 1,
            history_pages=range(1 + b * pages, 1 + (b + 1) * pages),
            window_pages=range(1 + b * pages, 1 + (b + 1) * pages),
            wanted=length,
        )
        for b in range(2)
    ]
    ours = assemble(rows, CFG, page_tokens=PAGE, block=block)
    theirs = batch.whole(ids, CFG, PAGE, block)
    for name, value in paths(theirs).items():
        if name != "blocks":
            assert torch.equal(paths(ours)[name], value), name
    params, ctx = tiny.params(CFG), Ctx(CFG)
    out, pools = model.step(params, tiny.pools(CFG, 2, pages, torch.float32), ours, ctx)
    want, kept = model.step(params, tiny.pools(CFG, 2, pages, torch.float32), theirs, ctx)
    assert torch.equal(out.logits, want.logits)
    for a, b in zip(leaves(pools), leaves(kept), strict=True):
        assert torch.equal(a, b)


def test_blocks_are_aligned_to_positions() -> None:
    b = assemble([row(5, 5), row(8, 1, 3, 2)], CFG, page_tokens=PAGE, block=4)
    assert b.positions.tolist() == [5, 6, 7, 8, 9, 8]
    # Columns without a token repeat the first of their block.
    assert b.blocks.tolist() == [[0, 0, 1, 2], [3, 4, 3, 3], [5, 5, 5, 5]]
    assert b.place.tolist() == [1, 2, 3, 4, 5, 8]
    assert b.blocks.flatten()[b.place].tolist() == [0, 1, 2, 3, 4, 5]
    assert b.seq.tolist() == [1, 1, 1, 1, 1, 2]
    assert b.starts.tolist() == [0, 5, 8]
    assert b.lengths.tolist() == [0, 10, 9]
    assert b.first.tolist() == [0, 0, 5]
    assert b.slots.tolist() == [0, 1, 2]


def test_wanted_are_the_last_tokens() -> None:
    rows = [row(0, 5, wanted=0), row(0, 4, 2, 2, wanted=3), row(7, 1, 3, 3)]
    b = assemble(rows, CFG, page_tokens=PAGE, block=4)
    assert b.wanted.tolist() == [6, 7, 8, 9]


def test_closes() -> None:
    """Entry j of rate r closes in the step that holds position (j + 1) * r - 1."""
    rows = [row(3, 1), row(4, 3, 2, 2), row(5, 12, 3, 3)]
    b = assemble(rows, CFG, page_tokens=PAGE, block=4)
    fours, eights = b.closes
    assert fours.tolist() == [[1, 0], [3, 1], [3, 2], [3, 3]]
    assert eights.tolist() == [[3, 0], [3, 1]]


def test_window_table_is_a_ring() -> None:
    """Column = page index modulo width, whatever pages are still alive."""
    live = Row(
        tokens=[1],
        start=45,
        slot=1,
        history_pages=range(1, 7),
        window_pages=[21, 22, 23],
        window_start=3,
    )
    b = assemble([live], CFG, page_tokens=PAGE, block=1, shape=Shape(window=5))
    assert b.window.tolist() == [[0] * 5, [23, 0, 0, 21, 22]]
    assert b.history.tolist() == [[0] * 6, [1, 2, 3, 4, 5, 6]]


def test_padding() -> None:
    shape = Shape(tokens=8, seqs=4, wanted=3, blocks=4, closes=(2, 1), history=3, window=3)
    b = assemble([row(2, 5)], CFG, page_tokens=PAGE, block=4, shape=shape)
    assert b.positions.tolist() == [2, 3, 4, 5, 6, 0, 0, 0]
    assert b.seq.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert b.tokens.tolist() == [10, 11, 12, 13, 14, 0, 0, 0]
    assert b.blocks.tolist() == [[0, 0, 0, 1], [2, 3, 4, 2], [5] * 4, [5] * 4]
    assert b.place[5:].tolist() == [8, 8, 8]
    assert [t.tolist() for t in b.closes] == [[[1, 0], [0, 0]], [[0, 0]]]
    assert b.history.shape == b.window.shape == (4, 3)
    assert b.wanted.tolist() == [4, 0, 0]


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (Shape(tokens=4), "tokens is 4"),
        (Shape(seqs=1), "seqs is 1"),
        (Shape(wanted=0), "wanted is 0"),
        (Shape(blocks=2, tokens=8), "blocks is 2"),
        (Shape(closes=(0, 1)), "closes of rate 4 is 0"),
        (Shape(history=1), "history is 1"),
        (Shape(window=1), "window is 1"),
    ],
)
def test_too_small_a_shape(shape: Shape, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        assemble([row(4, 5)], CFG, page_tokens=PAGE, block=4, shape=shape)


def test_one_storage() -> None:
    """One conversion and one transfer: every tensor is a view of the same memory, int64."""
    b = assemble([row(5, 5), row(8, 1, 3, 2)], CFG, page_tokens=PAGE, block=4)
    assert len({t.untyped_storage().data_ptr() for t in leaves(b)}) == 1
    assert {t.dtype for t in leaves(b)} == {torch.int64}


def test_arrays_of_pages() -> None:
    """Tables that live as arrays give the same as lists."""
    plain = row(9, 9)
    arrays = Row(
        tokens=np.array(plain.tokens),  # pyright: ignore[reportArgumentType]
        start=9,
        slot=1,
        history_pages=np.array(plain.history_pages),  # pyright: ignore[reportArgumentType]
        window_pages=np.array(plain.window_pages),  # pyright: ignore[reportArgumentType]
    )
    one = assemble([plain], CFG, page_tokens=PAGE, block=4)
    other = assemble([arrays], CFG, page_tokens=PAGE, block=4)
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert torch.equal(a, b)
