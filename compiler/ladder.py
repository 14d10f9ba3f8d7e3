"""Which static shapes steps are compiled for, and which of them a step takes.

A short ladder along each of four sizes, every rung a multiple of the one before, so that a step
never computes more than that multiple of what it needs:

    decode   sequences (x 4), one token and its drafts each, in blocks of one token
    mixed    tokens (x 4), in blocks of Z tokens, with room for every sequence
    both     table width in pages (x 8): attention and the indexer cost what the table can address,
             so that short contexts do not pay for long ones
    decode   whether groups of the slow rates (`SLOW` and more tokens) close: they rarely do, and
             closing them reads a ring per sequence

Padding costs rows of matrix products, no state: padding tokens stand in row 0 and page 0.
"""

import dataclasses
import itertools

from dsv4.batch import Need, Shape

SEQS_STEP = 4
TOKENS_STEP = 4
PAGES_STEP = 8
FEWEST_TOKENS = 32  # the lowest rung of mixed steps
FEWEST_PAGES = 8  # the lowest rung of tables
SLOW = 16  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """The most that an engine asks of a step, and what never changes between its steps."""

    seqs: int  # that run at the same time
    rows: int  # of a sequence that generates: its token and drafts
    tokens: int  # of all sequences in one step
    block: int  # tokens per query block of mixed steps
    history: int  # pages of the longest sequence
    window: int  # columns of the window table
    rates: tuple[int, ...]  # cfg.rates

    def __post_init__(self) -> None:
        """Raise ValueError for a size below 1, or fewer tokens than sequences need."""
        for name in ("seqs", "rows", "tokens", "block", "history", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.tokens < self.seqs * self.rows:
            raise ValueError(
                f"tokens is {self.tokens}; {self.seqs} sequences of {self.rows} rows need "
                f"{self.seqs * self.rows}"
            )


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One static shape: steps that fit are padded to it."""

    kind: str  # decode or mixed
    shape: Shape

    def __str__(self) -> str:
        """As "decode 4 tokens, 4 sequences, 8 pages, closes 1/0"."""
        s = self.shape
        assert s.seqs is not None
        closes = "/".join(map(str, s.closes or ())) or "none"
        return (
            f"{self.kind} {s.tokens} tokens, {s.seqs - 1} sequences, {s.history} pages, "
            f"closes {closes}"
        )


@dataclasses.dataclass(frozen=True)
class Ladder:
    """All buckets of one room, cheapest first."""

    room: Room
    buckets: tuple[Bucket, ...]

    def pick(self, need: Need) -> Bucket:
        """The first bucket with room for a step. Raises ValueError if there is none."""
        for bucket in self.buckets:
            if _fits(bucket, need):
                return bucket
        raise ValueError(
            f"no program has room for this step: {need}; programs were made for {self.room}: make "
            f"them for more, or ask for less"
        )

    def without_closes(self) -> "Ladder":
        """The ladder of a module that closes no groups, such as the draft module."""
        shapes = {}
        for b in self.buckets:
            shapes.setdefault(Bucket(b.kind, dataclasses.replace(b.shape, closes=())))
        return Ladder(self.room, tuple(shapes))


def ladder(room: Room) -> Ladder:
    """The buckets of a room. Every need that fits the room has one."""
    widths = rungs(FEWEST_PAGES, room.history, PAGES_STEP)
    found = [
        _decode(room, seqs, rows, (pages, slow))
        for pages, seqs, rows, slow in itertools.product(
            widths, rungs(1, room.seqs, SEQS_STEP), sorted({1, room.rows}), (False, True)
        )
    ]
    least = min(max(FEWEST_TOKENS, room.seqs * room.rows), room.tokens)
    found += [
        _mixed(room, tokens, pages)
        for pages, tokens in itertools.product(widths, rungs(least, room.tokens, TOKENS_STEP))
    ]
    return Ladder(room, tuple(sorted(dict.fromkeys(found), key=_cost)))


def rungs(least: int, most: int, step: int) -> tuple[int, ...]:
    """`most`, a `step`-th of it, and so on, down to between `least` and twice that; ascending."""
    found = [most]
    while found[-1] >= 2 * least:
        found.append(max(-(-found[-1] // step), least))
    return tuple(reversed(found))


def _cost(bucket: Bucket) -> tuple[str, int, int]:
    """Of two buckets of one kind with room for a step, the one with less of this is taken."""
    return bucket.kind, bucket.shape.history or 0, bucket.shape.tokens or 0


def _decode(room: Room, seqs: int, each: int, table: tuple[int, bool]) -> Bucket:
    rows, (pages, slow) = seqs * each, table
    # A group of r tokens closes at most 1 + (n - 1) // r times in n tokens of a sequence.
    closes = tuple(seqs * (1 + (each - 1) // r) if slow or r < SLOW else 0 for r in room.rates)
    return Bucket(
        "decode",
        Shape(
            tokens=rows,
            seqs=seqs + 1,
            wanted=rows,
            block=1,
            blocks=rows,
            closes=closes,
            history=pages,
            window=room.window,
        ),
    )


def _mixed(room: Room, tokens: int, pages: int) -> Bucket:
    seqs, z = room.seqs, room.block
    # Sequences of n tokens touch 1 + ceil((n - 1) / z) blocks; one more is for padding tokens.
    rest = max(tokens - seqs, 0)
    blocks = seqs + min(rest, rest // z + seqs) + 1
    return Bucket(
        "mixed",
        Shape(
            tokens=tokens,
            seqs=seqs + 1,
            wanted=min(seqs * room.rows, tokens),
            block=z,
            blocks=blocks,
            closes=tuple(tokens // r + seqs for r in room.rates),
            history=pages,
            window=room.window,
        ),
    )


def _fits(bucket: Bucket, need: Need) -> bool:
    s = bucket.shape
    assert s.tokens is not None
    assert s.seqs is not None
    assert s.wanted is not None
    assert s.history is not None
    if bucket.kind == "decode" and not need.decode:
        return False
    return (
        need.tokens <= s.tokens
        and need.seqs < s.seqs
        and need.wanted <= s.wanted
        and need.history <= s.history
        and need.window == s.window
        and all(n <= w for n, w in zip(need.closes, s.closes or (), strict=True))
    )
