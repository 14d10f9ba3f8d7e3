"""All caches of all sequences: who holds which page, and the rows in them.

Every kind (compressed entries, indexer keys, window keys, open inputs, overlap rows, the draft
module's) lives by the same laws, since its rows are found by position alone:

    append n, rollback n               nothing has happened
    append n, commit k                 the sequence is k tokens longer, whatever the others were
    fork, then go on with both         two sequences that never knew each other
    export, import_ into other pages   the same sequence

A step writes the rows of appended tokens: it is handed `pools` and returns the new ones.
"""

import hashlib
from collections.abc import Sequence

import torch

from dsv4.config import Config
from dsv4.state import PoolSizes, init_pools, pool_spec
from runtime import parcel
from runtime.pages import Copies, Held, Pages
from runtime.parcel import Parcel
from runtime.prefix import layout_digest


class Cache:
    """Owns the pools. `pages` decides, the functions here move rows."""

    def __init__(
        self,
        cfg: Config,
        sizes: PoolSizes,
        *,
        most: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """Allocate. `most` as in `Pages`. Raises ValueError for sizes that do not fit."""
        self.pages = Pages(cfg, sizes, most)
        self.pools = init_pools(cfg, sizes, dtype, device)
        self._layout = self.digest = layout_digest(cfg, sizes.page_tokens, dtype)
        self._spec = pool_spec(cfg, sizes)

    def name_weights(self, digest: str) -> None:
        """Let states of other parameters be told apart, too."""
        self.digest = hashlib.sha256((self._layout + digest).encode()).hexdigest()

    def check(self, state: Parcel) -> None:
        """Raise ValueError for a state whose rows are not those of its tokens, or not finite."""
        parcel.check_rows(state, self.pools, self._spec, self.pages.alive(len(state.tokens)))

    def open(self) -> Held | None:
        """An empty sequence, or None if no slot is free."""
        return self.pages.open() if self.pages.slots.available else None

    def append(self, held: Held, count: int) -> bool:
        """Own the pages of the next `count` tokens; False, and nothing changed, if there are none.

        A step may then write them, from position `held.length` on.
        """
        return self.pages.append(held, count)

    def commit(self, held: Held, count: int) -> None:
        """The first `count` appended tokens are valid, the others are taken back."""
        self.pages.commit(held, count)
        self.pages.recycle(held)

    def rollback(self, held: Held, count: int) -> None:
        """Take back the last `count` appended tokens."""
        self.pages.rollback(held, count)

    def fork(self, held: Held) -> Held | None:
        """A second sequence with the same valid state; None, and nothing changed, without room."""
        forked = self.pages.fork(held)
        if forked is None:
            return None
        new, copies = forked
        self.copy(copies)
        return new

    def copy(self, copies: Copies) -> None:
        """Copy the rows that a fork of `pages` asked for."""
        parcel.copy(self.pools, self._spec, copies)

    def export(self, held: Held, tokens: Sequence[int]) -> Parcel:
        """The valid state of a sequence whose tokens these are, copied out.

        Raises ValueError for one that came from elsewhere, has not run here yet, and whose oldest
        window page would be needed to go back one more token (`Pages.step_back`).
        """
        first = self.pages.alive(held.length)
        if first < held.window_start:
            raise ValueError("the state was imported and has not run here yet: step, then export")
        rows = parcel.export(self.pools, self._spec, held, first)
        return Parcel(digest=self.digest, tokens=tuple(tokens[: held.length]), rows=rows)

    def import_(self, state: Parcel, tokens: Sequence[int]) -> Held | None:
        """A sequence of leading `tokens` with this state; None, and nothing changed, without room.

        Raises ValueError if the state has another layout, or is of other tokens.
        """
        state.check(self.digest, tokens)
        held = self.open()
        if held is None:
            return None
        if not self.pages.begin(held, len(state.tokens)):
            self.pages.release(held)
            return None
        self.put(held, state)
        return held

    def put(self, held: Held, state: Parcel) -> None:
        """Write a state into the pages that `pages.begin` took for it."""
        parcel.put(self.pools, self._spec, held, state)

    def unit_bytes(self) -> dict[tuple[str, str], int]:
        """Bytes of one page or slot of all layers, by group and cache kind."""
        return parcel.unit_bytes(self.pools, self._spec)

    def bytes(self, held: Held) -> dict[str, int]:
        """Bytes of the pages and the slot that a sequence holds, by cache kind."""
        return parcel.held_bytes(self.pools, self._spec, held)

    def release(self, held: Held) -> None:
        """Give everything back."""
        self.pages.release(held)
