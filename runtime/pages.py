"""Who owns which page and which slot. Host integers only; index 0 of everything is padding.

Three groups, one `PagePool` each:
- history pages (compressed entries, indexer keys) grow with a sequence and stay while it runs;
- window pages are recycled: a page is dead once no later query can see a key in it and no later
  group needs its header;
- slots (the rings of open inputs), one per running sequence.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from dsv4.config import Config, Kind
from dsv4.state import PoolSizes
from runtime.page_pool import PagePool


@dataclasses.dataclass(eq=False, slots=True)
class Held:
    """The state of one sequence: its slot, its pages, and how much of them is valid."""

    slot: int
    length: int = 0  # tokens whose state is valid
    written: int = 0  # tokens appended: those from `length` on may still be taken back
    history: list[int] = dataclasses.field(default_factory=list)  # page of each page_tokens
    window: list[int] = dataclasses.field(default_factory=list)  # pages from `window_start` on
    window_start: int = 0  # page index of window[0]


@dataclasses.dataclass(frozen=True)
class Need:
    """The most that a sequence can hold at one time."""

    history: int
    window: int


@dataclasses.dataclass(frozen=True)
class Copies:
    """What must be copied for a fork, as (from, to) pairs of indices of each group."""

    history: tuple[tuple[int, int], ...]
    window: tuple[tuple[int, int], ...]
    slots: tuple[tuple[int, int], ...]


class Pages:
    """The pools of the three groups, and what appending, committing and taking back do to them.

    `history_table` [slots, Q] and `window_table` [slots, Q'] are the page tables of all slots, kept
    up to date: a step gathers the rows of its slots and nothing else.
    """

    def __init__(self, cfg: Config, sizes: PoolSizes, most: int) -> None:
        """`most` is the largest number of tokens that one request is given in one step."""
        sizes.check(cfg)
        self.most = most
        self.page_tokens = sizes.page_tokens
        self.keep = kept_tokens(cfg)
        self._again = int(cfg.mtp > 0)  # tokens that `step_back` may go back
        self.width = window_width(self.keep, self.page_tokens, reach(most, sizes.drafts))
        self.decode_width = window_width(self.keep, self.page_tokens, reach(1, sizes.drafts))
        self.history = PagePool("history pages", sizes.history_pages)
        self.window = PagePool("window pages", sizes.window_pages)
        self.slots = PagePool("slots", sizes.slots)
        longest = min(self.history.capacity, -(-cfg.max_positions // self.page_tokens))
        self.history_table = np.zeros((sizes.slots, longest), np.int64)
        self.window_table = np.zeros((sizes.slots, self.width), np.int64)

    def need(self, tokens: int) -> Need:
        """What a sequence that grows to `tokens` tokens can come to hold."""
        pages = -(-tokens // self.page_tokens)
        return Need(history=pages, window=min(pages, self.width))

    def check(self, tokens: int) -> None:
        """Raise ValueError if `tokens` tokens can never be held, naming the pool that is short."""
        need = self.need(tokens)
        for pool, wanted in ((self.history, need.history), (self.window, need.window)):
            if wanted > pool.capacity:
                cut = f" in chunks of {self.most}" if pool is self.window else ""
                raise ValueError(
                    f"prompt and new tokens are {tokens} tokens, which need {wanted} {pool.name} "
                    f"of {self.page_tokens} tokens{cut}; the pool has {pool.capacity}"
                )

    def open(self) -> Held:
        """An empty sequence in a slot of its own. The caller has seen that one is free."""
        return Held(self.slots.take(1)[0])

    def room(self, held: Held) -> int:
        """Tokens that can be appended with the pages that are there to be taken."""
        more = min(self.history.available, self.window.available)
        have = min(len(held.history) + more, held.window_start + self.width)
        return have * self.page_tokens - held.written

    def append(self, held: Held, count: int, ahead: int = 0) -> bool:
        """Own the pages of the next `count` tokens and of `ahead` more behind them.

        False, and nothing has changed, if there are not enough pages.
        """
        end = held.written + count + ahead
        if end > len(held.history) * self.page_tokens:
            more = -(-end // self.page_tokens) - len(held.history)
            if more > self.history.available or more > self.window.available:
                return False
            self._grow(held, more)
        held.written += count
        return True

    def _grow(self, held: Held, more: int) -> None:
        first = len(held.history)
        held.history += self.history.take(more)
        self.history_table[held.slot, first : first + more] = held.history[first:]
        taken = self.window.take(more)
        held.window += taken
        assert len(held.window) <= self.width, "a sequence has more window pages than its table"
        self._note_window(held, first, taken)

    def _note_window(self, held: Held, first: int, pages: Sequence[int]) -> None:
        for j, page in enumerate(pages, start=first):
            self.window_table[held.slot, j % self.width] = page

    def commit(self, held: Held, count: int) -> None:
        """The first `count` appended tokens are valid, the others are taken back."""
        assert 0 <= count <= held.written - held.length, "more tokens committed than appended"
        held.length += count
        held.written = held.length

    def rollback(self, held: Held, count: int) -> None:
        """Take back the last `count` appended tokens. Their pages stay: they will be used."""
        assert 0 <= count <= held.written - held.length, "more tokens taken back than appended"
        held.written -= count

    def alive(self, length: int) -> int:
        """Index of the first page whose window a sequence of `length` tokens still reads."""
        return max(length - self.keep, 0) // self.page_tokens

    def recycle(self, held: Held) -> None:
        """Give back the window pages that the sequence never reads again."""
        dead = min(self.alive(held.length) - held.window_start, len(held.window))
        if dead > 0:
            self.window.drop(held.window[:dead])
            self._note_window(held, held.window_start, [0] * dead)
            del held.window[:dead]
            held.window_start += dead

    def restore(self, held: Held, history: Sequence[int], window: Sequence[int]) -> None:
        """Begin an empty sequence with shared full pages: all history, and the newest window."""
        assert not held.written, "pages are restored into a used sequence"
        assert not held.history, "pages are restored into a used sequence"
        self.history.share(history)
        self.window.share(window)
        held.history, held.window = list(history), list(window)
        held.window_start = len(history) - len(window)
        held.length = held.written = len(history) * self.page_tokens
        self.history_table[held.slot, : len(history)] = history
        self._note_window(held, held.window_start, window)

    def begin(self, held: Held, length: int) -> bool:
        """Own the pages of an empty sequence whose first `length` tokens come from elsewhere.

        False, and nothing has changed, if there are not enough pages.
        """
        pages = -(-length // self.page_tokens)
        start = self.alive(length)
        if pages > self.history.available or pages - start > self.window.available:
            return False
        held.history = self.history.take(pages)
        held.window, held.window_start = self.window.take(pages - start), start
        held.length = held.written = length
        self.history_table[held.slot, :pages] = held.history
        self._note_window(held, start, held.window)
        return True

    def step_back(self, held: Held) -> None:
        """Let the last valid token be computed a second time, to the same rows.

        For a draft module: the row that joins this token's streams with the token after it.
        """
        assert held.length == held.written > 0, "a step stands between"
        held.length -= 1
        held.written -= 1

    def fork(self, held: Held) -> tuple[Held, Copies] | None:
        """A second sequence with the same valid state: full pages shared, the rest to be copied.

        None, and nothing has changed, if there is no slot or page for it.
        """
        full, rest = divmod(held.length, self.page_tokens)
        part = int(rest > 0)
        pools = (self.slots, self.history, self.window)
        if any(pool.available < n for pool, n in zip(pools, (1, part, part), strict=True)):
            return None
        new = self.open()
        self.restore(new, held.history[:full], held.window[: full - held.window_start])
        copies = Copies((), (), ((held.slot, new.slot),))
        if part:
            took = self.append(new, rest)
            assert took, "the pages of a fork were there"
            copies = Copies(
                history=((held.history[full], new.history[full]),),
                window=((held.window[full - held.window_start], new.window[-1]),),
                slots=copies.slots,
            )
        self.commit(new, rest)
        return new, copies

    def forget(self, held: Held) -> None:
        """Give the pages back and keep the slot: the sequence starts over."""
        # The tail of a chain is of no use without its head, so it is evicted first.
        self.history.drop(reversed(held.history))
        self.window.drop(held.window)
        held.history, held.window, held.window_start = [], [], 0
        held.length = held.written = 0
        self.history_table[held.slot] = 0
        self.window_table[held.slot] = 0

    def release(self, held: Held) -> None:
        """Give everything back."""
        self.forget(held)
        self.slots.drop((held.slot,))

    def audit(self, holders: Iterable[Held]) -> None:
        """Assert that what `holders` hold is what is owned, that tables agree, and none is lost."""
        listed = list(holders)
        self.history.check(i for h in listed for i in h.history)
        self.window.check(i for h in listed for i in h.window)
        self.slots.check(h.slot for h in listed)
        for h in listed:
            assert h.length <= h.written <= len(h.history) * self.page_tokens
            assert h.window_start + len(h.window) == len(h.history)
            assert h.window_start <= self.alive(h.length + self._again)
            assert self.history_table[h.slot, : len(h.history)].tolist() == h.history
            ring = [(h.window_start + i) % self.width for i in range(len(h.window))]
            assert self.window_table[h.slot, ring].tolist() == h.window


def reach(count: int, drafts: int) -> int:
    """Tokens of a step of `count` tokens, the drafts it verifies and the drafts it proposes."""
    return count + 2 * drafts + (drafts > 0)


def spare(running: int) -> int:
    """Pages of each group left for those that run, to generate into, when one more begins.

    An eighth of a page for each: with no page to spare, the first tokens after an admission would
    preempt what was just admitted.
    """
    return -(-running // 8)


def kept_tokens(cfg: Config) -> int:
    """Positions before the next token whose window page must still be there.

    The window itself, or the header of the page before an open CSA group, which reaches further
    back where the window is not longer than a group. With a draft module one more, so that the last
    token can be computed a second time: see `Pages.step_back`.
    """
    group = cfg.csa_rate if Kind.CSA in cfg.kinds else 0
    return max(cfg.window - 1, group) + (cfg.mtp > 0)


def window_width(keep: int, page_tokens: int, count: int) -> int:
    """The most pages that `keep` positions before a step and its `count` tokens can touch."""
    return (keep + count + page_tokens - 2) // page_tokens + 1


def page_size(cfg: Config) -> int:
    """Tokens per page where nobody says otherwise: the model's unit, or its multiple from 64 on."""
    return -(-64 // cfg.page_tokens) * cfg.page_tokens


def fit(
    cfg: Config,
    lengths: Iterable[int],
    *,
    most: int,
    page_tokens: int | None = None,
    drafts: int = 0,
) -> PoolSizes:
    """Pool sizes that hold sequences of these final lengths, in tokens, all at the same time.

    `most` as in `Pages`; `drafts` is the depth of drafting.
    """
    page = page_tokens or page_size(cfg)
    pages = [-(-n // page) for n in lengths]
    width = window_width(kept_tokens(cfg), page, reach(most, drafts))
    left = spare(len(pages) - 1)
    return PoolSizes(
        history_pages=1 + left + max(sum(pages), 1),
        window_pages=1 + left + max(sum(min(n, width) for n in pages), 1),
        slots=1 + max(len(pages), 1),
        page_tokens=page,
        drafts=drafts,
    )
