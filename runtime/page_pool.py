"""The pages of one group: free, owned by some sequences, or cached by none. Host integers only.

    free --take--> owned, count >= 1 --drop--> cached (has a key) --evict--> free
                        ^---------- share ----------'

A page with a key is full and never written again; several sequences may count on it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

Key = bytes
_REMEMBERED = 65_536  # keys of evicted pages, so that a miss can be explained


class PagePool:
    """Indices 1 .. count - 1 of one group; index 0 is padding and nobody's."""

    def __init__(self, name: str, count: int) -> None:
        """`name` appears in messages; `count` includes index 0."""
        self.name = name
        self.capacity = count - 1
        self._free = list(range(count - 1, 0, -1))
        self._count = [0] * count  # sequences that own the page
        self._key: list[Key | None] = [None] * count
        self._index: dict[Key, int] = {}
        # Least recently used first. Landmarks go last: places where prompts and answers ended.
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._landmarks: OrderedDict[int, None] = OrderedDict()
        self._is_landmark: set[int] = set()
        self._evicted: OrderedDict[Key, None] = OrderedDict()

    @property
    def cached(self) -> int:
        """Pages that nobody owns and that may be hit or evicted."""
        return len(self._plain) + len(self._landmarks)

    @property
    def free(self) -> int:
        """Pages that nobody owns and that hold nothing."""
        return len(self._free)

    @property
    def available(self) -> int:
        """How many can be taken: free ones and, after them, cached ones."""
        return len(self._free) + self.cached

    @property
    def owned(self) -> int:
        """How many are in use by sequences."""
        return self.capacity - self.available

    def take(self, count: int) -> list[int]:
        """Own `count` pages, evicting cached ones. The caller has seen that they are available."""
        assert count <= self.available, f"{count} {self.name} of {self.available} available ones"
        while len(self._free) < count:
            self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._count[page] = 1
        return taken

    def _evict(self) -> None:
        page, _ = (self._plain or self._landmarks).popitem(last=False)
        key = self._key[page]
        assert key is not None
        self._unpublish(page)
        self._free.append(page)
        self._evicted[key] = None
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)

    def _unpublish(self, page: int) -> None:
        key = self._key[page]
        assert key is not None
        del self._index[key]
        self._key[page] = None
        self._is_landmark.discard(page)

    def share(self, pages: Iterable[int]) -> None:
        """One more sequence owns these pages, which are owned or cached."""
        for page in pages:
            if self._count[page] == 0:
                assert self._key[page] is not None, f"{self.name} {page} is free, not cached"
                self._plain.pop(page, None)
                self._landmarks.pop(page, None)
            self._count[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One sequence less owns these pages. The first given is the first to be evicted."""
        for page in pages:
            assert self._count[page] > 0, f"{self.name} {page} is given back but not owned"
            self._count[page] -= 1
            if self._count[page]:
                continue
            if self._key[page] is None:
                self._free.append(page)
            elif page in self._is_landmark:
                self._landmarks[page] = None
            else:
                self._plain[page] = None

    def publish(self, page: int, key: Key) -> None:
        """Make an owned, full page findable. The first page under a key stays the one."""
        assert self._count[page] > 0, f"{self.name} {page} is published but not owned"
        if self._key[page] is None and key not in self._index:
            self._key[page] = key
            self._index[key] = page
            self._evicted.pop(key, None)

    def landmark(self, key: Key) -> None:
        """Evict the page under `key` after those that are no landmarks."""
        page = self._index.get(key)
        if page is not None:
            self._is_landmark.add(page)
            if page in self._plain:
                del self._plain[page]
                self._landmarks[page] = None

    def retract(self, key: Key) -> None:
        """Let the page under a key be found no more."""
        page = self._index.get(key)
        if page is not None:
            self._unpublish(page)
            if self._count[page] == 0:
                self._plain.pop(page, None)
                self._landmarks.pop(page, None)
                self._free.append(page)

    def find(self, key: Key) -> int | None:
        """The page under a key."""
        return self._index.get(key)

    def was_evicted(self, key: Key) -> bool:
        """Whether a page was under this key and had to make room."""
        return key in self._evicted

    def unowned(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody owns now."""
        return sum(self._count[p] == 0 for p in pages)

    def forget(self) -> None:
        """Empty the cache: no page can be hit any more. Owned pages stay owned."""
        self._free += [*self._plain, *self._landmarks]
        self._plain.clear()
        self._landmarks.clear()
        for page in list(self._index.values()):
            self._unpublish(page)
        self._evicted.clear()

    def check(self, owners: Iterable[int]) -> None:
        """Assert that counts are those of `owners` (a page once per owner) and nothing is lost."""
        counts = Counter(owners)
        assert 0 not in counts, f"{self.name}: padding is owned"
        have = {p: c for p, c in enumerate(self._count) if c}
        assert dict(counts) == have, f"{self.name}: {dict(counts)} own, the pool counts {have}"
        free, cached = set(self._free), {*self._plain, *self._landmarks}
        assert len(free) == len(self._free), f"{self.name}: one page is free twice"
        assert not free & cached, f"{self.name}: free and cached"
        assert not (free | cached) & have.keys(), f"{self.name}: owned and available"
        assert free | cached | have.keys() == set(range(1, self.capacity + 1)), f"{self.name}: lost"
        keyed = {p for p, k in enumerate(self._key) if k is not None}
        assert cached <= keyed, f"{self.name}: cached without a key"
        assert not free & keyed, f"{self.name}: keys of free pages"
        assert {k: p for p, k in enumerate(self._key) if k is not None} == self._index
