"""Exact prefix reuse: which pages of earlier sequences a new one begins with, and why not more.

Page b of a sequence is found under a key that is a hash of everything it depends on: all tokens up
to its end, the cache layout, and what the request asks to be kept apart by (salt, extra keys).

A hit of b pages needs the history pages 1 .. b and the window pages that the next token can still
see (one page for V4), which also hold the overlap rows and the draft module's input streams of the
boundary. That is all of the state at a multiple of the page (128 tokens for V4): the open groups
are empty there. So a hit is zero-copy, the same code path as any other step, and bit-equal to a
cold run where steps are laid out alike (`Engine(exact=True)`). Nothing is replayed.

Every window page that falls behind its window stays cached until its place is needed, so two
prompts that share k tokens hit floor(k / 128) * 128 of them. Evicted first are pages in the middle
of prompts; pages where a prompt or an answer ended, and every 8,192nd token, go last.

Keys are sha-256 (spec: runtime algorithms 1.5): 128 tokens cost 1.7 us, 14 ms per million tokens,
so there is nothing to win by a weaker hash, and a fixed one can be compared between processes. The
salt is hashed first, so a tenant can neither hit nor probe what another one has.
"""

import dataclasses
import hashlib
import json
import sys
from array import array
from collections.abc import Sequence

import torch

from dsv4.config import Config
from runtime.page_pool import Key
from runtime.pages import Held, Pages

_LANDMARK_TOKENS = 8_192
_VERSION = "dsv4 pages 1"


def layout_digest(cfg: Config, page_tokens: int, dtype: torch.dtype) -> str:
    """Names what a page holds: two caches with one digest can exchange pages.

    Of the config all that decides values or shapes, so also whether there are rows of a draft
    module; not how many pages there are, how prompts are chunked, or how many drafts are made.
    """
    facts = dataclasses.asdict(cfg)
    for name in ("max_positions", "bos", "eos"):
        del facts[name]
    facts |= {"page_tokens": page_tokens, "dtype": str(dtype), "version": _VERSION}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """How much of a request's prompt was found, and why not more."""

    tokens: int  # of the prompt, or of prompt and output where a preempted request resumes
    hit: int  # tokens whose state was found
    limit: int  # the most that could hit: whole pages, and one token must be computed
    unit: int  # tokens: hits are multiples of it
    reason: str  # "full", "forked", "imported", or why not more: see `why`

    @property
    def why(self) -> str:
        """One sentence for people."""
        told = {
            "full": "every whole page before the last token was found",
            "short": f"fewer than {self.unit + 1} tokens hold no whole page before the last token",
            "disabled": "the prefix cache is off for this engine or request",
            "no such prefix": f"no earlier request had the same {self.hit + self.unit} tokens",
            "salt": "the request has a salt or extra keys, and no earlier one with these had "
            f"the same {self.hit + self.unit} tokens",
            "evicted": f"the page that ends at token {self.hit + self.unit} had to make room",
            "window page gone": f"the history goes further than token {self.hit}, but the window "
            "pages there had to make room: more window pages would keep them",
            "forked": "the state was copied from a running request",
            "imported": "the state came with the request",
        }
        return f"{self.hit} of {self.tokens} tokens hit (unit {self.unit}): {told[self.reason]}"


@dataclasses.dataclass(frozen=True)
class Hit:
    """Pages to begin with."""

    history: tuple[int, ...]
    window: tuple[int, ...]  # the newest of them


@dataclasses.dataclass(eq=False)
class Chain:
    """The keys of a request's pages, as far as they were needed so far."""

    root: Key
    keys: list[Key] = dataclasses.field(default_factory=list)
    salted: bool = False
    published: int = 0  # leading pages of the held sequence that were published


class Prefix:
    """The prefix cache over the pools of `Pages`."""

    def __init__(self, pages: Pages, digest: str, *, enabled: bool) -> None:
        """`digest` is the layout's. A cache that is not enabled never hits and keeps nothing."""
        self.enabled = enabled
        self._pages = pages
        self.digest = digest

    def chain(self, salt: str, extra: Sequence[str]) -> Chain:
        """The empty chain of a request."""
        root = hashlib.sha256(json.dumps([self.digest, salt, list(extra)]).encode()).digest()
        return Chain(root=root, salted=bool(salt or extra))

    def _extend(self, chain: Chain, tokens: Sequence[int], pages: int) -> None:
        """Hash the pages of `tokens` up to page index `pages`."""
        n = self._pages.page_tokens
        for b in range(len(chain.keys), pages):
            ids = array("I", tokens[b * n : (b + 1) * n])
            if sys.byteorder == "big":
                ids.byteswap()
            before = chain.keys[-1] if chain.keys else chain.root
            chain.keys.append(hashlib.sha256(before + ids.tobytes()).digest())

    def match(self, chain: Chain | None, tokens: Sequence[int]) -> tuple[Hit, CacheReport]:
        """The longest prefix of `tokens` that is cached; at least one token is left to compute."""
        n = self._pages.page_tokens
        limit = (len(tokens) - 1) // n
        if chain is None or not self.enabled:
            return self._miss(tokens, limit, "disabled")
        history, window = self._pages.history, self._pages.window
        self._extend(chain, tokens, limit)
        found = 0
        while found < limit and history.find(chain.keys[found]) is not None:
            found += 1
        hit = found
        while hit and any(
            window.find(chain.keys[j]) is None for j in range(self._pages.alive(hit * n), hit)
        ):
            hit -= 1
        pages = Hit(
            history=tuple(self._found(history.find(k)) for k in chain.keys[:hit]),
            window=tuple(
                self._found(window.find(k)) for k in chain.keys[self._pages.alive(hit * n) : hit]
            ),
        )
        if limit == 0:
            reason = "short"
        elif hit == limit:
            reason = "full"
        elif hit < found:
            reason = "window page gone"
        elif history.was_evicted(chain.keys[found]):
            reason = "evicted"
        else:
            reason = "salt" if chain.salted else "no such prefix"
        return pages, CacheReport(len(tokens), hit * n, limit * n, n, reason)

    def _miss(self, tokens: Sequence[int], limit: int, reason: str) -> tuple[Hit, CacheReport]:
        n = self._pages.page_tokens
        return Hit((), ()), CacheReport(len(tokens), 0, limit * n, n, reason)

    @staticmethod
    def _found(page: int | None) -> int:
        assert page is not None, "a page went while it was matched"
        return page

    def publish(self, chain: Chain, held: Held, tokens: Sequence[int], prompt: int) -> None:
        """Make the pages that became full findable. `prompt` is the number of prompt tokens.

        Call it after a step has succeeded and before dead window pages are recycled: only then is
        the state of every token below `held.length` known to be right, and still there.
        """
        n = self._pages.page_tokens
        full = held.length // n
        if not self.enabled or full <= chain.published:
            return
        self._extend(chain, tokens, full)
        for b in range(chain.published, full):
            key = chain.keys[b]
            self._pages.history.publish(held.history[b], key)
            if b >= held.window_start:
                self._pages.window.publish(held.window[b - held.window_start], key)
                if b + 1 == prompt // n or (b + 1) * n % _LANDMARK_TOKENS == 0:
                    self._mark(chain, b + 1)
        chain.published = full

    def ended(self, chain: Chain, held: Held) -> None:
        """Keep the newest boundary of a sequence that stops running: it may well go on there."""
        if self.enabled:
            self._mark(chain, held.length // self._pages.page_tokens)
        chain.published = 0

    def _mark(self, chain: Chain, boundary: int) -> None:
        for key in chain.keys[self._pages.alive(boundary * self._pages.page_tokens) : boundary]:
            self._pages.window.landmark(key)

    def retract(self, chain: Chain) -> None:
        """Let no page of a request that failed be found: its state may be the reason."""
        for key in chain.keys:
            self._pages.history.retract(key)
            self._pages.window.retract(key)

    def forget(self) -> None:
        """Empty the cache, for example when the weights change."""
        self._pages.history.forget()
        self._pages.window.forget()
