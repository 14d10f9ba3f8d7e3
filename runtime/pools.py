"""What an amount of memory buys: pool sizes, and what pools of a size can serve.

`plan_pools` spends the memory in this order:
1. index 0 of every group, which belongs to padding;
2. a slot for every sequence that runs at once, and the window pages that it can come to hold: a
   running sequence must never have to wait for these;
3. history pages for one sequence of `max_model_len`: without them it could never be served;
4. of what is left, the share `cached_windows` for more window pages, the places at which a cached
   prefix can be resumed;
5. history pages for all the rest: they are what running sequences and cached prefixes compete for.

`Layout` counts. `PoolPlan.fits` and `largest` foretell `Pages.check` and `admission.fits`, which
decide when a request comes; tests hold them together.
"""

import bisect
import dataclasses

import torch

from dsv4.config import Config
from dsv4.state import PoolSizes, sequence_bytes
from runtime.columns import size
from runtime.drafts import MOST
from runtime.layout import GROUPS, Layout
from runtime.memory import Memory
from runtime.pages import page_size, spare
from runtime.ranges import real, whole
from runtime.rules import CHUNK

_SLOTS = 64  # by default at most: each costs its open inputs and windows even when it is idle
_SLOT_SHARE = 8  # and slots with their windows take at most one part in so many of the memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """What pools are planned for."""

    max_model_len: int | None = None  # tokens one sequence must reach; None: all positions
    slots: int | None = None  # sequences that run at once; None: an eighth of the memory, 1 to 64
    chunk: int = CHUNK  # most prompt tokens of one sequence per step
    drafts: int = 0  # depth of drafting
    page_tokens: int | None = None  # None: see `pages.page_size`
    # Share of the remainder for window pages to resume at. 0.2 makes about one place per 4,000
    # cached tokens of V4-Flash.
    cached_windows: float = 0.2

    def __post_init__(self) -> None:
        """Raise ValueError naming the field, the value and what is allowed."""
        for name in ("max_model_len", "slots", "page_tokens"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        whole("chunk", self.chunk, 1)
        whole("drafts", self.drafts, 0, MOST)
        real("cached_windows", self.cached_windows, 0, 1)


def served(cfg: Config, drafts: int) -> Config:
    """The config by which an engine makes pools: no caches of a draft module that drafts nothing.

    `model.step` takes such pools; `mtp.draft` alone needs the others. Raises ValueError for drafts
    of a model that has no draft module.
    """
    if drafts and not cfg.mtp:
        raise ValueError(f"drafts is {drafts}; this model has no draft module, so it must be 0")
    return cfg if drafts else dataclasses.replace(cfg, mtp=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """Pool sizes, what they cost and what they can serve."""

    layout: Layout
    sizes: PoolSizes
    memory: Memory
    max_model_len: int  # tokens

    @property
    def cfg(self) -> Config:
        """What `init_pools` makes these pools by: see `served`."""
        return self.layout.cfg

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return self.layout.num_bytes({group: getattr(self.sizes, group) for group in GROUPS})

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a sequence grows by per token: its rows of the history pages."""
        return self.layout.price("history_pages") / self.layout.page_tokens

    @property
    def cached_windows(self) -> int:
        """Window pages beyond what the running sequences can come to hold."""
        running = self.layout.least(self.usable("slots"), self.max_model_len)["window_pages"]
        return max(self.sizes.window_pages - running, 0)

    def usable(self, group: str) -> int:
        """Pages or slots of a group without index 0."""
        return getattr(self.sizes, group) - 1

    def needs_bytes(self, tokens: int) -> int:
        """Most bytes that one sequence can come to hold until it has `tokens` tokens."""
        return self.layout.num_bytes(self.layout.needs(tokens))

    def rests_bytes(self, tokens: int) -> int:
        """Bytes that one sequence of `tokens` tokens holds between two steps."""
        return self.layout.num_bytes(self.layout.rests(tokens))

    def prefix_bytes(self, tokens: int) -> int:
        """Bytes that stay for a cached prefix of `tokens` tokens, resumable at its last page.

        Whole history pages, and the window pages that the next token can see. Open inputs are not
        stored: at a page's end no group is open.
        """
        page = self.layout.page_tokens
        return self.layout.num_bytes(self.layout.rests(tokens // page * page) | {"slots": 0})

    def waste(self, tokens: int) -> float:
        """Share of `rests_bytes` that a cache without pages would not need. Spec section 15.4."""
        ideal = sum(sequence_bytes(self.cfg, tokens, self.layout.dtype).values())
        return max(1 - ideal / self.rests_bytes(tokens), 0.0)

    def fits(self, tokens: int) -> int:
        """How many sequences of `tokens` tokens run at once, however much of it is prompt.

        0 beyond the model's positions.
        """
        whole("tokens", tokens, 1)
        if tokens > self.cfg.max_positions:
            return 0
        one, most = self.layout.needs(tokens), self.usable("slots")
        for group in ("window_pages", "history_pages"):
            have = self.usable(group)
            most = bisect.bisect(
                range(1, most + 1), have, key=lambda n, k=one[group]: n * k + spare(n - 1)
            )
        return most

    def largest(self, num_seqs: int = 1) -> int:
        """Most tokens that each of `num_seqs` sequences can have when all run at once."""
        whole("num_seqs", num_seqs, 1)
        if num_seqs > self.usable("slots"):
            return 0
        history, window = (
            max(self.usable(group) - spare(num_seqs - 1), 0) // num_seqs
            for group in ("history_pages", "window_pages")
        )
        pages = min(history, window) if window < self.layout.width(self.layout.chunk) else history
        return min(pages * self.layout.page_tokens, self.cfg.max_positions)

    def check(self, tokens: int) -> None:
        """Raise ValueError if a sequence of `tokens` tokens can never run, naming the pool."""
        whole("tokens", tokens, 1, self.cfg.max_positions)
        have = {group: getattr(self.sizes, group) for group in GROUPS}
        least = self.layout.least(1, tokens)
        short = [group for group in GROUPS if have[group] < least[group]]
        if not short:
            return
        told = ", ".join(f"{least[g] - 1} {_title(g)}, the pool has {have[g] - 1}" for g in short)
        more = self.layout.num_bytes({g: max(have[g], least[g]) for g in GROUPS})
        raise ValueError(
            f"a sequence of {tokens} tokens cannot be served: in chunks of {self.layout.chunk} "
            f"tokens and pages of {self.layout.page_tokens} it needs {told}. These pools serve at "
            f"most {self.largest()} tokens; with {more} bytes in all instead of {self.num_bytes} "
            f"they serve {tokens}"
        )

    @property
    def hit_rule(self) -> str:
        """Which prompts the prefix cache can help, in one line."""
        page = self.layout.page_tokens
        return (
            f"hit unit: one page, {page} tokens, with any number of drafts or none; prompts of "
            f"{page + 1} tokens or more can hit, in multiples of {page}"
        )


def plan_pools(
    cfg: Config, dtype: torch.dtype, memory: Memory, options: PoolOptions | None = None
) -> PoolPlan:
    """The largest pools in `memory`, which is for the caches alone, of a model of dtype `dtype`.

    Raises ValueError for drafts of a model without a draft module; and if `max_model_len` cannot be
    served, naming the pool that is short, the largest length that can be, and what would help.
    """
    if not isinstance(memory, Memory):
        raise ValueError(f'memory is {memory!r:.60}; give runtime.memory.read_memory("8GiB")')
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {dtype!r:.60}; give a torch.dtype")
    asked = options or PoolOptions()
    cfg = served(cfg, asked.drafts)
    wanted = cfg.max_positions if asked.max_model_len is None else asked.max_model_len
    whole("max_model_len", wanted, 1, cfg.max_positions)
    layout = Layout(
        cfg=cfg,
        dtype=dtype,
        page_tokens=asked.page_tokens or page_size(cfg),
        chunk=asked.chunk,
        drafts=asked.drafts,
    )
    running = asked.slots or _slots(layout, memory.num_bytes, wanted)
    counts = layout.least(running, wanted)
    left = memory.num_bytes - layout.num_bytes(counts)
    if left < 0:
        raise ValueError(_refusal(layout, memory, running, wanted))
    window, history = layout.price("window_pages"), layout.price("history_pages")
    # Without compressors history costs nothing: then all the rest is windows.
    cached = int(left * asked.cached_windows) // window if history else left // window
    counts["window_pages"] += cached
    if history:
        counts["history_pages"] += (left - cached * window) // history
    else:
        each = layout.needs(cfg.max_positions)["history_pages"]
        counts["history_pages"] = 1 + running * each + spare(running - 1)
    return PoolPlan(layout=layout, sizes=layout.sizes(counts), memory=memory, max_model_len=wanted)


def measure(
    cfg: Config, dtype: torch.dtype, sizes: PoolSizes, *, chunk: int, max_model_len: int
) -> PoolPlan:
    """What given pools cost and serve. Raises ValueError if `max_model_len` is not among it."""
    whole("chunk", chunk, 1)
    sizes.check(cfg)
    page, drafts = sizes.page_tokens, sizes.drafts
    cfg = served(cfg, drafts)
    layout = Layout(cfg=cfg, dtype=dtype, page_tokens=page, chunk=chunk, drafts=drafts)
    taken = Memory(layout.num_bytes({g: getattr(sizes, g) for g in GROUPS}), "these pools")
    plan = PoolPlan(layout=layout, sizes=sizes, memory=taken, max_model_len=max_model_len)
    plan.check(max_model_len)
    return plan


def _slots(layout: Layout, memory: int, tokens: int) -> int:
    """The default number of sequences that run at once: never more than `tokens` leaves room for.

    At least 1, whether or not it fits.
    """
    each = layout.cost(2, tokens) - layout.cost(1, tokens)
    most = max(min(_SLOTS, memory // _SLOT_SHARE // each), 1)
    return max(bisect.bisect(range(1, most + 1), memory, key=lambda n: layout.cost(n, tokens)), 1)


def _title(group: str) -> str:
    return group.replace("_", " ")


def _refusal(layout: Layout, memory: Memory, slots: int, tokens: int) -> str:
    """The pool at which the memory ends, what it needs and has, and what would help."""
    least, left = layout.least(slots, tokens), memory.num_bytes
    bought: list[str] = []
    for group in GROUPS:
        price = layout.price(group)
        if least[group] * price > left:
            break
        left -= least[group] * price
        bought.append(f"{least[group] - 1} {_title(group)}")
    else:
        raise AssertionError("the memory is enough")
    need, has = least[group] - 1, max(left // price - 1, 0)
    width = layout.needs(tokens)["window_pages"]
    each = {
        "slots": "one per sequence",
        "window_pages": f"{width} for each of {slots} that run in chunks of {layout.chunk} tokens",
        "history_pages": f"of {layout.page_tokens} tokens each",
    }[group]
    after = f" after {' and '.join(bought)}" if bought else ""
    return (
        f"max_model_len {tokens} cannot be served: {_title(group)} are short. {need} are needed, "
        f"{each}, and {has} fit: with index 0 they take {size(least[group] * price)}, and "
        f"{size(left)} are left{after} of {size(memory.num_bytes)} ({memory.source}). "
        f"Remedy: {'; '.join(_remedies(layout, memory.num_bytes, slots, tokens))}"
    )


def _remedies(layout: Layout, memory: int, slots: int, tokens: int) -> list[str]:
    """What would be served, each with everything else as asked for."""
    length, alone = layout.longest(memory, slots), layout.longest(memory, 1)
    enough = layout.cost(slots, tokens)
    told = [
        f"in this memory at most max_model_len {length}"
        if length
        else "in this memory no length, not even one page",
        f"for {tokens} tokens at least {enough} bytes ({size(enough)})",
    ]
    if alone > length:
        told.append(f"with 1 slot at most max_model_len {alone}")
    fewer = bisect.bisect(range(1, slots), memory, key=lambda n: layout.cost(n, tokens))
    if fewer:
        told.append(f"at most {fewer} slot{'s' if fewer > 1 else ''}")
    smaller = bisect.bisect(
        range(1, layout.chunk),
        memory,
        key=lambda n: dataclasses.replace(layout, chunk=n).cost(slots, tokens),
    )
    if smaller:
        told.append(f"chunks of at most {smaller} tokens")
    return told
