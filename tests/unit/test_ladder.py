"""Every step has a bucket, none much larger than it needs, and it is assembled to it."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.ladder import (
    FEWEST_PAGES,
    FEWEST_TOKENS,
    PAGES_STEP,
    SEQS_STEP,
    SLOW,
    TOKENS_STEP,
    Bucket,
    Ladder,
    Room,
    ladder,
    rungs,
)
from dsv4.batch import Need, Shape, blank, shape_of
from runtime.assemble import Rows, assemble_rows, need

PAGE = 16
RATES = ((), (4,), (2, 6), (4, 128), (4, 8, 64))


def room(**changes) -> Room:
    """Four sequences without drafts, steps of 64 tokens, up to 100 pages."""
    given = {"seqs": 4, "rows": 1, "tokens": 64, "block": 8, "history": 100, "window": 3}
    return Room(**({**given, "rates": (4, 128)} | changes))


@st.composite
def rooms(draw) -> Room:
    seqs, rows = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    return Room(
        seqs=seqs,
        rows=rows,
        tokens=seqs * rows + draw(st.integers(0, 600)),
        block=draw(st.sampled_from((1, 2, 8, 16))),
        history=draw(st.integers(1, 700)),
        window=draw(st.integers(1, 9)),
        rates=draw(st.sampled_from(RATES)),
    )


@st.composite
def steps(draw, asked: Room, decode: bool) -> Rows:
    """What sequences do in a step that fits a room: anywhere, in any split."""
    n = draw(st.integers(1, asked.seqs))
    if decode:
        counts = draw(st.lists(st.integers(1, asked.rows), min_size=n, max_size=n))
        wanted = counts
    else:
        total = draw(st.integers(n, asked.tokens))
        # Ones, thirds and sizes around block ends are as likely as any cut.
        cuts = sorted(draw(st.lists(st.integers(0, total - n), min_size=n - 1, max_size=n - 1)))
        counts = [b - a + 1 for a, b in itertools.pairwise([0, *cuts, total - n])]
        wanted = [draw(st.integers(0, min(c, asked.rows))) for c in counts]
    longest = asked.history * PAGE
    starts = [draw(st.integers(0, max(longest - c, 0))) for c in counts]
    pages = max(-(-(s + c) // PAGE) for s, c in zip(starts, counts, strict=True))
    return Rows(
        tokens=np.arange(sum(counts)),
        counts=np.array(counts),
        starts=np.array(starts),
        slots=np.arange(1, n + 1),
        wanted=np.array(wanted),
        history=np.ones((n, min(pages, asked.history)), np.int64),
        window=np.ones((n, asked.window), np.int64),
    )


def has_room(bucket: Bucket, wanted: Need) -> bool:
    """Said again, from the words of `Need` and `Shape`."""
    s = bucket.shape
    assert s.tokens
    assert s.seqs
    assert s.wanted
    assert s.history
    return (
        (wanted.decode or bucket.kind == "mixed")
        and wanted.tokens <= s.tokens
        and wanted.seqs + 1 <= s.seqs
        and wanted.wanted <= s.wanted
        and wanted.history <= s.history
        and wanted.window == s.window
        and all(n <= w for n, w in zip(wanted.closes, s.closes or (), strict=True))
    )


def size(bucket: Bucket) -> tuple[int, int]:
    """Tokens and pages."""
    assert bucket.shape.tokens
    assert bucket.shape.history
    return bucket.shape.tokens, bucket.shape.history


@settings(max_examples=200)
@given(asked=rooms(), decode=st.booleans(), data=st.data())
def test_every_step_of_a_room_is_assembled_to_its_bucket(
    asked: Room, decode: bool, data: st.DataObject
) -> None:
    """Blocks, closings and wanted logits: no step that goes to a bucket needs more than it has."""
    rows = data.draw(steps(asked, decode))
    made = ladder(asked)
    told = need(rows, asked.rates, decode)
    bucket = made.pick(told)
    assert has_room(bucket, told)
    block = bucket.shape.block
    assert block
    assert block == (1 if bucket.kind == "decode" else asked.block)
    batch = assemble_rows(rows, asked.rates, block=block, shape=bucket.shape)
    assert shape_of(batch) == bucket.shape
    if decode:
        assert bucket.kind == "decode"


@given(asked=rooms(), decode=st.booleans(), data=st.data())
def test_the_cheapest_with_room_is_taken(asked: Room, decode: bool, data: st.DataObject) -> None:
    """Fewest pages, then fewest tokens, among those of its kind; a prompt's step takes no other."""
    made = ladder(asked)
    told = need(data.draw(steps(asked, decode)), asked.rates, decode)
    bucket = made.pick(told)
    others = [size(b)[::-1] for b in made.buckets if b.kind == bucket.kind and has_room(b, told)]
    assert size(bucket)[::-1] == min(others)


@given(asked=rooms(), decode=st.booleans(), data=st.data())
def test_waste_is_bounded(asked: Room, decode: bool, data: st.DataObject) -> None:
    """No more than a rung: x 8 pages; x 4 tokens, or of sequences with all their drafts, x 4.

    The lowest rung is up to twice the fewest.
    """
    rows = data.draw(steps(asked, decode))
    told = need(rows, asked.rates, decode)
    tokens, pages = size(ladder(asked).pick(told))
    assert pages <= max(2 * FEWEST_PAGES, PAGES_STEP * told.history)
    if decode:
        each = 1 if told.tokens == told.seqs else asked.rows
        assert tokens <= SEQS_STEP * told.seqs * each
    else:
        least = max(FEWEST_TOKENS, asked.seqs * asked.rows)
        assert tokens <= max(2 * least, TOKENS_STEP * told.tokens)


@given(asked=rooms())
def test_buckets_are_few_and_distinct(asked: Room) -> None:
    made = ladder(asked)
    assert len(set(made.buckets)) == len(made.buckets)
    assert len({b.shape for b in made.buckets}) == len(made.buckets)
    assert len({str(b) for b in made.buckets}) == len(made.buckets)

    def most(least: int, top: int, step: int) -> int:
        return 2 + math.floor(math.log(max(top / least, 1), step) + 1e-9)

    widths = most(FEWEST_PAGES, asked.history, PAGES_STEP)
    decodes = 4 * most(1, asked.seqs, SEQS_STEP)
    mixed = most(FEWEST_TOKENS, asked.tokens, TOKENS_STEP)
    assert len(made.buckets) <= widths * (decodes + mixed)
    for b in made.buckets:
        sizes = dataclasses.replace(b.shape, closes=(1,))  # it may close nothing
        assert all(dataclasses.astuple(sizes)), f"{b} has an open or empty size"
        assert shape_of(blank(b.shape)) == b.shape


@given(least=st.integers(1, 50), most=st.integers(1, 5000), step=st.integers(2, 9))
def test_rungs(least: int, most: int, step: int) -> None:
    found = rungs(least, most, step)
    assert found[-1] == most
    assert list(found) == sorted(set(found))
    assert all(b <= step * a for a, b in itertools.pairwise(found))
    assert min(least, most) <= found[0] < 2 * least or found == (most,)


def test_the_ladder_of_a_small_room() -> None:
    """Written out: what is compiled for four sequences and 64 tokens."""
    told = [str(b) for b in ladder(room(history=8)).buckets]
    assert told == [
        "decode 1 tokens, 1 sequences, 8 pages, closes 1/0",
        "decode 1 tokens, 1 sequences, 8 pages, closes 1/1",
        "decode 4 tokens, 4 sequences, 8 pages, closes 4/0",
        "decode 4 tokens, 4 sequences, 8 pages, closes 4/4",
        "mixed 32 tokens, 4 sequences, 8 pages, closes 12/4",
        "mixed 64 tokens, 4 sequences, 8 pages, closes 20/4",
    ]


def test_slow_groups_close_in_programs_of_their_own() -> None:
    """Three of 127 steps of a sequence close no group of 128; they do not pay for one."""
    made = ladder(room())
    assert SLOW <= 128
    for position, closes in ((5, (0, 0)), (7, (1, 0)), (127, (1, 1))):
        told = Need(decode=True, tokens=1, seqs=1, wanted=1, closes=closes, history=1, window=3)
        bucket = made.pick(told)
        assert bucket.shape.closes == (1, int(position == 127))


def test_splits_of_twelve_tokens() -> None:
    """12 = 2 x 6 = 12 x 1: as many rows, other programs, unless all have their drafts."""
    made = ladder(room(seqs=12, rows=6, tokens=72, history=8, rates=()))

    def pick(seqs: int, decode: bool) -> Bucket:
        return made.pick(Need(decode=decode, tokens=12, seqs=seqs, wanted=12, closes=(),
                              history=1, window=3))  # fmt: skip

    assert size(pick(12, True))[0] == 12
    assert size(pick(2, True))[0] == 12  # rather than 4 sequences of 6
    assert pick(12, True).shape == pick(2, True).shape
    assert size(pick(1, False))[0] == 72
    assert pick(1, False).shape.block == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({name: 0}, f"{name} is 0; it must be at least 1") for name in (
            "seqs", "rows", "tokens", "block", "history", "window")),
        ({"rows": 17}, "tokens is 64; 4 sequences of 17 rows need 68"),
    ],
)  # fmt: skip
def test_rooms_that_hold_no_step_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        room(**changes)


@pytest.mark.parametrize(
    "more",
    [{"tokens": 65}, {"seqs": 5}, {"wanted": 5}, {"history": 101}, {"window": 4}, {"window": 2},
     {"closes": (99, 0)}],
)  # fmt: skip
def test_no_bucket_for_what_does_not_fit(more: dict) -> None:
    """The message has both: what the step needs, and what programs were made for."""
    fits = {"decode": False, "tokens": 64, "seqs": 4, "wanted": 4, "closes": (20, 4),
            "history": 100, "window": 3}  # fmt: skip
    made = ladder(room())
    made.pick(Need(**fits))
    ((name, value),) = more.items()
    with pytest.raises(ValueError, match="no program has room for this step") as refused:
        made.pick(Need(**(fits | more)))
    assert f"{name}={value}" in str(refused.value)
    assert str(room()) in str(refused.value)


@given(asked=rooms())
def test_a_module_that_closes_nothing_needs_no_more_programs(asked: Room) -> None:
    whole, bare = ladder(asked), ladder(asked).without_closes()
    assert isinstance(bare, Ladder)
    assert {b.shape.closes for b in bare.buckets} == {()}
    assert len({b.shape for b in bare.buckets}) == len(bare.buckets) <= len(whole.buckets)
    kept = {dataclasses.replace(b.shape, closes=()) for b in whole.buckets}
    assert kept == {b.shape for b in bare.buckets}


def test_a_blank_batch_has_every_size() -> None:
    with pytest.raises(AssertionError, match="leaves sizes open"):
        blank(Shape(tokens=3))
