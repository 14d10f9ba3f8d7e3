"""Who owns which page and which slot. Host integers only; index 0 of everything is padding.

History pages are kept while their request runs. Window pages are recycled: a page is dead once no
later query can see a key in it and no later group needs its header.
"""

import dataclasses
from collections.abc import Iterable

from dsv4.config import Config, Kind
from dsv4.state import PoolSizes


class FreeList:
    """Indices 1 .. count - 1 of one pool, each free or owned by exactly one request."""

    def __init__(self, name: str, count: int) -> None:
        """`name` appears in messages; `count` includes index 0."""
        self.name = name
        self.capacity = count - 1
        self._free = list(range(count - 1, 0, -1))
        self._owned: set[int] = set()

    @property
    def free(self) -> int:
        """How many can still be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Own `count` indices. The caller has made sure that there are so many."""
        assert count <= len(self._free), f"{count} {self.name} of {len(self._free)} free ones"
        taken = [self._free.pop() for _ in range(count)]
        self._owned.update(taken)
        return taken

    def give(self, indices: Iterable[int]) -> None:
        """Return indices that are owned."""
        for index in indices:
            assert index in self._owned, f"{self.name} {index} is given back but not owned"
            self._owned.remove(index)
            self._free.append(index)

    def check(self, owned: Iterable[int]) -> None:
        """Assert that exactly `owned` is owned, each once, and nothing is lost."""
        listed = list(owned)
        assert len(listed) == len(set(listed)), f"{self.name}: one index has two owners"
        assert set(listed) == self._owned, f"{self.name}: leaked or stolen indices"
        free = set(self._free)
        assert len(free) == len(self._free), f"{self.name}: one index is free twice"
        assert not free & self._owned, f"{self.name}: free and owned"
        assert free | self._owned == set(range(1, self.capacity + 1)), f"{self.name}: lost"


@dataclasses.dataclass
class Held:
    """The pages and the slot of one running request."""

    slot: int
    history: list[int] = dataclasses.field(default_factory=list)  # page of each page_tokens
    window: list[int] = dataclasses.field(default_factory=list)  # pages from `window_start` on
    window_start: int = 0  # page index of window[0]


@dataclasses.dataclass(frozen=True)
class Need:
    """The most that a request can hold at one time."""

    history: int
    window: int


class Pages:
    """The free lists of the three groups, and the arithmetic of who needs what."""

    def __init__(self, cfg: Config, sizes: PoolSizes, most: int) -> None:
        """`most` is the largest number of tokens that one request is given in one step."""
        sizes.check(cfg)
        self.page_tokens = sizes.page_tokens
        self.keep = kept_tokens(cfg)
        self.width = window_width(self.keep, self.page_tokens, most + sizes.drafts)
        self.history = FreeList("history pages", sizes.history_pages)
        self.window = FreeList("window pages", sizes.window_pages)
        self.slots = FreeList("slots", sizes.slots)
        self._promised = Need(0, 0)

    def need(self, tokens: int) -> Need:
        """What a sequence that grows to `tokens` tokens can come to hold."""
        pages = -(-tokens // self.page_tokens)
        return Need(history=pages, window=min(pages, self.width))

    def check(self, tokens: int) -> None:
        """Raise ValueError if `tokens` tokens can never be held, naming the pool that is short."""
        need = self.need(tokens)
        for pool, wanted in ((self.history, need.history), (self.window, need.window)):
            if wanted > pool.capacity:
                raise ValueError(
                    f"prompt and new tokens are {tokens} tokens, which need {wanted} {pool.name} "
                    f"of {self.page_tokens} tokens; the pool has {pool.capacity}"
                )

    def admit(self, tokens: int) -> Held | None:
        """A slot for a sequence that grows to `tokens` tokens, or None while it does not fit.

        Its pages are promised, not taken: what is admitted always finds the pages it grows into.
        """
        need, sofar = self.need(tokens), self._promised
        sums = Need(sofar.history + need.history, sofar.window + need.window)
        if (
            self.slots.free < 1
            or sums.history > self.history.capacity
            or sums.window > self.window.capacity
        ):
            return None
        self._promised = sums
        return Held(self.slots.take(1)[0])

    def grow(self, held: Held, tokens: int) -> None:
        """Own the pages of positions below `tokens`."""
        pages = -(-tokens // self.page_tokens)
        held.history += self.history.take(max(pages - len(held.history), 0))
        have = held.window_start + len(held.window)
        held.window += self.window.take(max(pages - have, 0))

    def recycle(self, held: Held, length: int) -> None:
        """Give back the window pages that a sequence of `length` tokens never reads again."""
        alive = max(length - self.keep, 0) // self.page_tokens
        dead = min(max(alive - held.window_start, 0), len(held.window))
        self.window.give(held.window[:dead])
        del held.window[:dead]
        held.window_start += dead

    def forget(self, held: Held) -> None:
        """Give the pages back and keep the slot and the promise: the sequence starts over."""
        self.history.give(held.history)
        self.window.give(held.window)
        held.history, held.window, held.window_start = [], [], 0

    def release(self, held: Held, tokens: int) -> None:
        """Give everything back. `tokens` is what the request was admitted with."""
        self.history.give(held.history)
        self.window.give(held.window)
        self.slots.give((held.slot,))
        need = self.need(tokens)
        self._promised = Need(
            self._promised.history - need.history, self._promised.window - need.window
        )

    def audit(self, holders: Iterable[Held]) -> None:
        """Assert that `holders` own what is owned, each index once, and that none is lost."""
        listed = list(holders)
        self.history.check(i for h in listed for i in h.history)
        self.window.check(i for h in listed for i in h.window)
        self.slots.check(h.slot for h in listed)
        if not listed:
            assert self._promised == Need(0, 0), "pages are promised to nobody"


def kept_tokens(cfg: Config) -> int:
    """Positions before the next token whose window page must still be there.

    The window itself; and the header of the page before an open CSA group, which reaches further
    back where the window is not longer than a group.
    """
    group = cfg.csa_rate if Kind.CSA in cfg.kinds else 0
    return max(cfg.window - 1, group)


def window_width(keep: int, page_tokens: int, count: int) -> int:
    """The most pages that `keep` positions before a step and its `count` tokens can touch."""
    return (keep + count + page_tokens - 2) // page_tokens + 1


def fit(
    cfg: Config, lengths: Iterable[int], *, most: int, page_tokens: int | None = None
) -> PoolSizes:
    """Pool sizes that hold sequences of these final lengths, in tokens, all at the same time.

    `most` as in `Pages`. A page has the given tokens, or the smallest multiple of the model's page
    that is at least 64.
    """
    page = page_tokens or -(-64 // cfg.page_tokens) * cfg.page_tokens
    pages = [-(-n // page) for n in lengths]
    width = window_width(kept_tokens(cfg), page, most)
    return PoolSizes(
        history_pages=1 + max(sum(pages), 1),
        window_pages=1 + max(sum(min(n, width) for n in pages), 1),
        slots=1 + max(len(pages), 1),
        page_tokens=page,
    )
