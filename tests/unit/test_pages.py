"""Ownership of pages and slots."""

import random

import pytest

from dsv4.config import Config
from dsv4.state import PoolSizes
from runtime.pages import FreeList, Held, Pages, fit, kept_tokens, window_width
from tests import tiny

CFG = tiny.short()  # window 8, rates 4 and 8


def sizes(history: int = 20, window: int = 20, slots: int = 5, page: int = 8) -> PoolSizes:
    return PoolSizes(history_pages=history, window_pages=window, slots=slots, page_tokens=page)


def test_padding_is_never_given() -> None:
    pool = FreeList("pages", 4)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.free == 0


def test_faults_are_seen() -> None:
    pool = FreeList("pages", 4)
    (page,) = pool.take(1)
    pool.give([page])
    with pytest.raises(AssertionError, match="not owned"):
        pool.give([page])
    with pytest.raises(AssertionError, match="4 pages of 3"):
        pool.take(4)
    a, b = pool.take(2)
    pool.check([a, b])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check([a, a])
    with pytest.raises(AssertionError, match="leaked"):
        pool.check([a])


def test_window_pages_are_recycled() -> None:
    """Page j is dead when page_tokens * (j + 1) <= length - window + 1, and not before."""
    pages = Pages(CFG, sizes(history=200), 1)
    held = pages.admit(1000)
    assert held is not None
    most = 0
    for length in range(1, 1001):
        pages.grow(held, length)
        most = max(most, len(held.window))
        pages.recycle(held, length)
        alive = [j for j in range(-(-length // 8)) if 8 * (j + 1) > length - CFG.window + 1]
        assert list(range(held.window_start, held.window_start + len(held.window))) == alive
        assert len(held.history) == -(-length // 8)
    assert most <= pages.width
    pages.audit([held])
    pages.release(held, 1000)
    pages.audit([])


def test_headers_outlive_a_short_window() -> None:
    """A CSA group after a page boundary reads the header of the page before until it closes."""
    assert kept_tokens(tiny.short(window=2)) == 4
    assert kept_tokens(tiny.short("hw", window=2)) == 1
    assert kept_tokens(tiny.short(window=8)) == 7


@pytest.mark.parametrize("page", [8, 16])
@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_width_is_the_most_and_no_more(page: int, count: int) -> None:
    keep = kept_tokens(CFG)
    spans = [
        (start + count - 1) // page - max(start - keep, 0) // page + 1 for start in range(3 * page)
    ]
    assert max(spans) == window_width(keep, page, count)


def test_promises() -> None:
    """What is admitted can always grow; what may not fit waits; what never fits is refused."""
    pages = Pages(CFG, sizes(history=8, window=20), 8)  # 7 history pages
    first = pages.admit(32)
    assert first is not None
    assert pages.admit(32) is None  # 4 + 4 of 7, though nothing is taken yet
    second = pages.admit(24)
    assert second is not None
    pages.grow(first, 32)
    pages.grow(second, 24)
    pages.audit([first, second])
    pages.release(first, 32)
    assert pages.admit(32) is not None
    pages.check(56)
    with pytest.raises(ValueError, match=r"57 tokens, which need 8 history pages .* has 7"):
        pages.check(57)
    with pytest.raises(ValueError, match="window pages"):
        Pages(CFG, sizes(window=3), 8).check(57)


def test_slots_run_out() -> None:
    pages = Pages(CFG, sizes(slots=2), 8)
    assert pages.admit(8) is not None
    assert pages.admit(8) is None


def test_random_lives() -> None:
    """No page is lost or owned twice over 2,000 random steps; in the end all are free."""
    rng = random.Random(0)
    pages = Pages(CFG, sizes(history=40, window=16, slots=6), 24)
    live: list[tuple[Held, int, int]] = []  # held, room, length
    for _ in range(2000):
        if rng.random() < 0.3 and (held := pages.admit(room := rng.randint(1, 100))):
            live.append((held, room, 0))
        if not live:
            continue
        i = rng.randrange(len(live))
        held, room, length = live[i]
        grown = min(room, length + rng.randint(1, 24))
        pages.grow(held, grown)
        pages.recycle(held, grown)
        live[i] = (held, room, grown)
        if grown == room or rng.random() < 0.1:
            pages.release(held, room)
            del live[i]
        pages.audit([h for h, _, _ in live])
    for held, room, _ in live:
        pages.release(held, room)
    pages.audit([])
    assert pages.history.free == 39


@pytest.mark.parametrize("cfg", [CFG, tiny.config("w", 0), tiny.config()])
def test_fit(cfg: Config) -> None:
    """Pools made for some lengths hold exactly these at once."""
    lengths = [1, 70, 300, 128]
    made = fit(cfg, lengths, most=32)
    pages = Pages(cfg, made, 32)
    for n in lengths:
        pages.check(n)
        assert pages.admit(n) is not None
    assert pages.admit(1) is None
