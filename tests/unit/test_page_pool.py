"""One pool of pages: free, owned, cached; who is evicted first; what its check can see."""

from collections.abc import Callable

import pytest

from runtime import page_pool
from runtime.page_pool import PagePool


def key(i: int) -> bytes:
    return i.to_bytes(4, "little")


def cached(count: int, order: list[int] | None = None) -> tuple[PagePool, list[int]]:
    """A pool all of whose pages are cached, page i under key(i); given back in `order`."""
    pool = PagePool("pages", count + 1)
    pages = pool.take(count)
    for i, page in enumerate(pages):
        pool.publish(page, key(i))
    pool.drop([pages[i] for i in (order or range(count))])
    assert (pool.cached, pool.available, pool.owned) == (count, count, 0)
    return pool, pages


def test_padding_is_never_given() -> None:
    """Index 0 is where padding tokens write: whoever owned it would read theirs."""
    pool = PagePool("pages", 4)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert (pool.available, pool.owned) == (0, 3)


def test_misuse_is_seen_at_once() -> None:
    pool = PagePool("pages", 4)
    (page,) = pool.take(1)
    pool.drop([page])
    with pytest.raises(AssertionError, match="not owned"):
        pool.drop([page])
    with pytest.raises(AssertionError, match="is free, not cached"):
        pool.share([page])
    with pytest.raises(AssertionError, match="published but not owned"):
        pool.publish(page, key(0))
    with pytest.raises(AssertionError, match="4 pages of 3"):
        pool.take(4)
    pool.check([])


def test_free_pages_go_before_cached_ones() -> None:
    pool = PagePool("pages", 5)
    a, b = pool.take(2)
    pool.publish(a, key(0))
    pool.drop([a, b])
    taken = pool.take(3)
    assert a not in taken
    assert pool.find(key(0)) == a
    assert pool.take(1) == [a]
    assert pool.find(key(0)) is None
    assert pool.was_evicted(key(0))


def test_least_recently_used_is_evicted_first() -> None:
    """Order is that of giving back, and a hit renews it."""
    pool, pages = cached(5, order=[3, 1, 0, 4, 2])
    pool.share([pages[1]])  # hit, and given back last
    pool.drop([pages[1]])
    gone = [pages.index(pool.take(1)[0]) for _ in range(5)]
    assert gone == [3, 0, 4, 2, 1]


def test_a_hit_page_is_not_evicted() -> None:
    pool, pages = cached(3)
    pool.share([pages[0], pages[0]])  # two sequences
    assert set(pool.take(2)) == {pages[1], pages[2]}
    assert pool.find(key(0)) == pages[0]
    pool.check([pages[0], *pages])
    pool.drop([pages[0]])
    assert pool.available == 0  # the other one still has it
    pool.drop([pages[0]])
    assert pool.available == 1


def test_landmarks_are_evicted_last() -> None:
    """Marked while cached or while owned, and whatever their age."""
    pool = PagePool("pages", 7)
    pages = pool.take(6)
    for i, page in enumerate(pages):
        pool.publish(page, key(i))
    pool.landmark(key(0))  # owned
    pool.drop(pages)
    pool.landmark(key(3))  # cached
    pool.landmark(key(99))  # nobody's: nothing happens
    pool.check([])
    assert [pages.index(pool.take(1)[0]) for _ in range(6)] == [1, 2, 4, 5, 0, 3]


def test_a_landmark_is_one_no_more_when_its_page_is_used_again() -> None:
    pool, pages = cached(2)
    pool.landmark(key(0))
    assert pool.take(2)  # both evicted
    pool.publish(pages[0], key(7))
    pool.publish(pages[1], key(8))
    pool.drop(pages)
    assert pool.take(1) == [pages[0]]  # older; a stale mark would keep it


def test_the_first_page_under_a_key_stays_the_one() -> None:
    """Two requests compute one prompt at the same time: the second's page has no key and is freed.

    Were it the other way round, sequences that share the first would share a page with no key.
    """
    pool = PagePool("pages", 4)
    a, b = pool.take(2)
    pool.publish(a, key(0))
    pool.publish(b, key(0))
    pool.publish(a, key(1))  # a page keeps the key that it has
    assert pool.find(key(0)) == a
    assert pool.find(key(1)) is None
    pool.check([a, b])
    pool.drop([a, b])
    assert pool.cached == 1
    pool.check([])


def test_unowned_counts_what_a_hit_would_take_from_what_is_available() -> None:
    pool, pages = cached(3)
    pool.share(pages[:1])
    assert pool.unowned(pages) == 2
    pool.share(pages)
    assert pool.unowned(pages) == 0
    pool.check([pages[0], *pages])


def test_the_memory_of_evicted_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs for a year must not keep a key per page that it ever evicted."""
    monkeypatch.setattr(page_pool, "_REMEMBERED", 10)
    pool = PagePool("pages", 2)
    for i in range(100):
        (page,) = pool.take(1)
        pool.publish(page, key(i))
        pool.drop([page])
    assert [i for i in range(100) if pool.was_evicted(key(i))] == list(range(89, 99))
    assert len(pool._evicted) == 10


def test_a_key_that_comes_back_is_not_told_as_evicted() -> None:
    pool, _ = cached(1)
    (page,) = pool.take(1)
    assert pool.was_evicted(key(0))
    pool.publish(page, key(0))
    assert not pool.was_evicted(key(0))


def test_forget_empties_the_cache_and_leaves_what_is_owned() -> None:
    pool, pages = cached(4)
    pool.landmark(key(1))
    pool.take(1)  # evicts key 0
    pool.share([pages[2]])
    pool.forget()
    assert [pool.find(key(i)) for i in range(4)] == [None] * 4
    assert not pool.was_evicted(key(0))  # what is gone was not evicted for room
    assert (pool.cached, pool.available, pool.owned) == (0, 2, 2)
    pool.check([pages[0], pages[2]])
    pool.drop([pages[0], pages[2]])
    assert pool.cached == 0  # an owned page lost its key too
    pool.check([])


def _lost(pool: PagePool) -> None:
    pool._free.pop()


def _free_twice(pool: PagePool) -> None:
    pool._free.append(pool._free[0])


def _free_and_cached(pool: PagePool) -> None:
    pool._free.append(next(iter(pool._plain)))


def _free_and_owned(pool: PagePool) -> None:
    pool._free.append(pool._count.index(1))


def _cached_without_key(pool: PagePool) -> None:
    pool._unpublish(next(iter(pool._plain)))


def _key_of_a_free_page(pool: PagePool) -> None:
    pool._key[pool._free[0]] = key(9)
    pool._index[key(9)] = pool._free[0]


def _index_of_another_page(pool: PagePool) -> None:
    pool._index[key(0)] = pool._count.index(1)


def _counted_once_too_often(pool: PagePool) -> None:
    pool._count[pool._count.index(1)] += 1


def _padding_owned(pool: PagePool) -> None:
    pool._count[0] = 1


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (_lost, "lost"),
        (_free_twice, "free twice"),
        (_free_and_cached, "free and cached"),
        (_free_and_owned, "owned and available"),
        (_cached_without_key, "cached without a key"),
        (_key_of_a_free_page, "keys of free pages"),
        (_index_of_another_page, None),
        (_counted_once_too_often, "the pool counts"),
        (_padding_owned, "the pool counts"),
    ],
)
def test_check_sees_every_corruption(harm: Callable[[PagePool], None], match: str | None) -> None:
    """Each of them would give one page to two sequences, or lose it."""
    pool = PagePool("pages", 6)
    pages = pool.take(3)
    pool.publish(pages[0], key(0))
    pool.publish(pages[1], key(1))
    pool.drop(pages[:2])
    pool.check([pages[2]])
    harm(pool)
    with pytest.raises(AssertionError, match=match):
        pool.check([pages[2]])


def test_check_sees_other_owners() -> None:
    pool = PagePool("pages", 4)
    a, b = pool.take(2)
    pool.check([a, b])
    for owners in ([a], [a, a], [a, b, b], [a, b, 3], []):
        with pytest.raises(AssertionError, match="the pool counts"):
            pool.check(owners)
    with pytest.raises(AssertionError, match="padding is owned"):
        pool.check([0, a, b])
