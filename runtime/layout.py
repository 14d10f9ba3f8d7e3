"""What one page and one slot of a model's pools cost, and how many of each a sequence holds.

Bytes come from the pool spec alone, so that a new kind of cache is counted once it is declared.
Counts come from the arithmetic by which pages are owned (`pages.py`) and sequences are admitted
(`admission.py`), so that what is planned is what will be served.
"""

import bisect
import dataclasses
import functools
from types import MappingProxyType

import torch

from dsv4.config import Config
from dsv4.state import PoolSizes, pool_spec
from dsv4.tree import leaves
from runtime.pages import kept_tokens, reach, spare, window_width

# `PoolLeaf.group` -> the field of `PoolSizes` that counts it, in the order of buying.
_FIELDS = MappingProxyType({"slots": "slots", "window": "window_pages", "history": "history_pages"})
GROUPS = tuple(_FIELDS.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What one page and one slot cost, and how many of each a sequence holds."""

    cfg: Config
    dtype: torch.dtype
    page_tokens: int
    chunk: int  # most prompt tokens of one sequence per step
    drafts: int = 0  # depth of drafting: tokens that may be written and then rejected

    @functools.cached_property
    def kinds(self) -> dict[str, dict[str, int]]:
        """Bytes of one page or slot by group, then by cache kind."""
        found: dict[str, dict[str, int]] = {group: {} for group in GROUPS}
        for leaf in leaves(pool_spec(self.cfg, self.sizes(dict.fromkeys(GROUPS, 2)))):
            kinds, row = found[_FIELDS[leaf.group]], leaf.shape[1] * leaf.dtype(self.dtype).itemsize
            kinds[leaf.kind] = kinds.get(leaf.kind, 0) + (leaf.unit - leaf.slack) * row
            if leaf.slack:
                kinds["draft rows"] = kinds.get("draft rows", 0) + leaf.slack * row
        return found

    def sizes(self, counts: dict[str, int]) -> PoolSizes:
        """Pools of these counts by group, index 0 included."""
        return PoolSizes(**counts, page_tokens=self.page_tokens, drafts=self.drafts)

    def price(self, group: str) -> int:
        """Bytes of one page or slot of a group."""
        return sum(self.kinds[group].values())

    def num_bytes(self, counts: dict[str, int]) -> int:
        """Bytes of so many pages and slots."""
        return sum(count * self.price(group) for group, count in counts.items())

    def width(self, tokens: int) -> int:
        """Most window pages of a sequence that is given `tokens` tokens in one step."""
        return window_width(kept_tokens(self.cfg), self.page_tokens, reach(tokens, self.drafts))

    def needs(self, tokens: int) -> dict[str, int]:
        """The most that one sequence can come to hold until it has `tokens` tokens, by group."""
        pages = -(-tokens // self.page_tokens)
        return {
            "slots": 1,
            "window_pages": min(pages, self.width(self.chunk)),
            "history_pages": pages,
        }

    def rests(self, tokens: int) -> dict[str, int]:
        """What one sequence of `tokens` tokens holds between two steps, by group."""
        pages = -(-tokens // self.page_tokens)
        dead = max(tokens - kept_tokens(self.cfg), 0) // self.page_tokens
        return {"slots": 1, "window_pages": pages - dead, "history_pages": pages}

    def least(self, slots: int, tokens: int) -> dict[str, int]:
        """The smallest pools in which `slots` sequences run, one of them up to `tokens` tokens."""
        one = self.needs(tokens)
        return {
            "slots": 1 + slots,
            "window_pages": 1 + slots * one["window_pages"] + spare(slots - 1),
            "history_pages": 1 + one["history_pages"],
        }

    def cost(self, slots: int, tokens: int) -> int:
        """Bytes of `least`."""
        return self.num_bytes(self.least(slots, tokens))

    def longest(self, memory: int, slots: int) -> int:
        """Most tokens that `least` can have in `memory` bytes; 0 if not even one page fits."""
        page, last = self.page_tokens, self.cfg.max_positions
        counts = range(1, -(-last // page) + 1)
        pages = bisect.bisect(counts, memory, key=lambda n: self.cost(slots, n * page))
        return min(pages * page, last)
