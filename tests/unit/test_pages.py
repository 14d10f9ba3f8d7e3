"""The laws of appending, committing, taking back and sharing, on host integers alone."""

import copy
import random

import pytest

from dsv4.state import PoolSizes
from runtime.pages import Held, Pages, kept_tokens, reach, window_width
from tests import tiny

CFG = tiny.short()  # window 8, rates 4 and 8, a draft module: 8 positions are kept
MOST = 24


def sizes(
    history: int = 20, window: int = 20, slots: int = 5, page: int = 8, drafts: int = 0
) -> PoolSizes:
    return PoolSizes(
        history_pages=history, window_pages=window, slots=slots, page_tokens=page, drafts=drafts
    )


def pages_of(most: int = MOST, **changes: int) -> Pages:
    return Pages(CFG, sizes(**changes), most)


def grown(pages: Pages, tokens: int, most: int = MOST) -> Held:
    """A sequence of this length, as steps of at most `most` tokens make it."""
    held = pages.open()
    while held.length < tokens:
        count = min(most, tokens - held.length)
        assert pages.append(held, count)
        pages.commit(held, count)
        pages.recycle(held)
    return held


def everything(pages: Pages) -> tuple:
    """All that a refused call must leave as it was, in a form that compares."""
    pools = [copy.deepcopy(vars(p)) for p in (pages.history, pages.window, pages.slots)]
    return pools, pages.history_table.tolist(), pages.window_table.tolist()


def state(held: Held) -> tuple:
    return held.length, held.written, held.window_start, [*held.history], [*held.window]


def test_kept_positions() -> None:
    """The window; or the group before, whose header an open group reads; one more with drafts."""
    plain = {"mtp": 0}
    assert kept_tokens(tiny.short(window=8, **plain)) == 7
    assert kept_tokens(tiny.short(window=2, **plain)) == 4  # a CSA group reaches further back
    assert kept_tokens(tiny.short("hw", window=2, **plain)) == 1  # HCA has no overlap
    assert kept_tokens(tiny.short(window=8)) == 8  # the last token may be computed again
    assert kept_tokens(tiny.short("w", 0, window=1, **plain)) == 0


@pytest.mark.parametrize("mtp", [0, 1])
def test_window_pages_are_recycled_exactly(mtp: int) -> None:
    """Page j goes when its last position is out of every later query's reach, and not before.

    One step early loses keys; one late is a leak of a page per sequence.
    """
    cfg = tiny.short(mtp=mtp, max_positions=2000)
    pages = Pages(cfg, sizes(history=200), 1)
    held = pages.open()
    for length in range(1, 1001):
        assert pages.append(held, 1)
        assert len(held.window) <= pages.width
        pages.commit(held, 1)
        pages.recycle(held)
        first_seen = length - (cfg.window - 1) - mtp
        alive = [j for j in range(-(-length // 8)) if 8 * (j + 1) - 1 >= first_seen]
        assert list(range(held.window_start, held.window_start + len(held.window))) == alive
        assert len(held.history) == -(-length // 8)
        assert sorted(filter(None, pages.window_table[held.slot])) == sorted(held.window)
        pages.audit([held])
    pages.release(held)
    pages.audit([])
    assert pages.window.available == pages.window.capacity


@pytest.mark.parametrize("page", [8, 16])
@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_width_is_the_most_and_no_more(page: int, count: int) -> None:
    keep = kept_tokens(CFG)
    spans = [
        (start + count - 1) // page - max(start - keep, 0) // page + 1 for start in range(3 * page)
    ]
    assert max(spans) == window_width(keep, page, count)


@pytest.mark.parametrize("drafts", [0, 1, 3, 6])
def test_the_widest_step_fills_the_window_table(drafts: int) -> None:
    """Tokens, drafts to verify and drafts to propose fit at every alignment; at one, just so."""
    pages = pages_of(MOST, drafts=drafts)
    widest = 0
    for start in range(30):
        held = grown(pages, start, 1)
        assert pages.append(held, MOST + drafts, ahead=drafts + (drafts > 0))
        assert held.written - held.length == MOST + drafts
        widest = max(widest, len(held.window))
        pages.audit([held])
        pages.release(held)
    assert widest == pages.width
    assert reach(MOST, drafts) == MOST + 2 * drafts + (drafts > 0)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 31])
def test_append_and_rollback_is_nothing(length: int) -> None:
    """Afterwards any number of tokens can be appended as if it had never been (spec 10.4)."""
    for count in range(1, 20):
        pages = pages_of()
        held, twin = grown(pages, length), grown(pages, length)
        assert pages.append(held, count)
        pages.rollback(held, count)
        assert (held.length, held.written) == (twin.length, twin.written)
        assert pages.append(held, 5)
        assert pages.append(twin, 5)
        assert len(held.history) == max(-(-(length + 5) // 8), -(-(length + count) // 8))
        assert (held.length, held.written) == (twin.length, twin.written)
        pages.audit([held, twin])


@pytest.mark.parametrize("length", [0, 5, 8, 15])
def test_commit_of_k_is_k_tokens(length: int) -> None:
    """Whatever the other appended tokens were, and in one piece or token by token."""
    for count in range(1, 14):
        for k in range(count + 1):
            pages = pages_of()
            held, twin = grown(pages, length), grown(pages, length + k, 1)
            assert pages.append(held, count)
            pages.commit(held, k)
            pages.recycle(held)
            assert (held.length, held.written) == (length + k, length + k)
            assert held.window_start == twin.window_start
            pages.audit([held, twin])


def test_no_more_is_committed_or_taken_back_than_was_appended() -> None:
    pages = pages_of()
    held = grown(pages, 10)
    assert pages.append(held, 3)
    with pytest.raises(AssertionError, match="more tokens committed than appended"):
        pages.commit(held, 4)
    with pytest.raises(AssertionError, match="more tokens taken back than appended"):
        pages.rollback(held, 4)
    with pytest.raises(AssertionError, match="a step stands between"):
        pages.step_back(held)


@pytest.mark.parametrize(("history", "window"), [(5, 20), (20, 5)])
def test_an_append_that_cannot_be_served_changes_nothing(history: int, window: int) -> None:
    """Neither pool may have lost a page when the other one is short."""
    pages = pages_of(history=history, window=window)
    held, other = grown(pages, 12), grown(pages, 3)  # 3 of 4 pages
    before, was = everything(pages), state(held)
    assert not pages.append(held, 13)  # 25 tokens: 2 pages
    assert not pages.append(held, 12, ahead=1)
    assert (everything(pages), state(held)) == (before, was)
    assert pages.room(held) == 12
    assert pages.append(held, pages.room(held))
    assert pages.room(held) == 0
    pages.audit([held, other])


def test_room_is_bounded_by_the_width_of_the_window_table() -> None:
    pages = pages_of(8)
    held = grown(pages, 20, 8)
    assert pages.append(held, pages.room(held))
    assert len(held.window) == pages.width
    pages.audit([held])


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17, 30])
def test_a_fork_shares_full_pages_and_copies_the_open_one(length: int) -> None:
    pages = pages_of()
    held = grown(pages, length)
    free = pages.history.available, pages.window.available
    assert pages.append(held, 3)  # not valid: they do not go with a fork
    taken = len(held.history) - -(-length // 8)
    made = pages.fork(held)
    assert made is not None
    new, copies = made
    full, part = length // 8, int(length % 8 > 0)
    assert (new.length, new.written, new.slot != held.slot) == (length, length, True)
    assert new.history[:full] == held.history[:full]
    assert not set(new.history[full:]) & set(held.history)
    assert new.window_start == held.window_start
    assert copies.slots == ((held.slot, new.slot),)
    assert len(copies.history) == len(copies.window) == part
    if part:
        assert copies.history == ((held.history[full], new.history[full]),)
        at = full - held.window_start
        assert copies.window == ((held.window[at], new.window[at]),)
    assert pages.history.available == free[0] - taken - part
    assert pages.window.available == free[1] - taken - part
    pages.audit([held, new])
    pages.release(held)  # the parent goes: what is shared stays
    pages.audit([new])
    pages.release(new)
    pages.audit([])
    assert pages.history.available == pages.history.capacity


@pytest.mark.parametrize("short", ["slots", "history", "window"])
def test_a_fork_without_room_changes_nothing(short: str) -> None:
    pages = pages_of(**{"slots": 3, "history": 4, "window": 4, short: 2 if short == "slots" else 3})
    held = grown(pages, 12)
    before, was = everything(pages), state(held)
    assert pages.fork(held) is None
    assert (everything(pages), state(held)) == (before, was)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 30])
def test_begin_takes_what_a_sequence_of_that_length_holds(length: int) -> None:
    pages = pages_of()
    twin, held = grown(pages, length), pages.open()
    assert pages.begin(held, length)
    assert (held.length, held.written, held.window_start) == (length, length, twin.window_start)
    assert (len(held.history), len(held.window)) == (len(twin.history), len(twin.window))
    pages.audit([twin, held])


@pytest.mark.parametrize(("history", "window"), [(5, 20), (20, 3)])
def test_begin_without_room_changes_nothing(history: int, window: int) -> None:
    pages = pages_of(history=history, window=window)
    other, held = grown(pages, 8), pages.open()
    before = everything(pages)
    assert not pages.begin(held, 30)  # 4 pages, 2 of them in the window
    assert everything(pages) == before
    assert state(held) == (0, 0, 0, [], [])
    pages.audit([other, held])


@pytest.mark.parametrize("length", range(1, 34))
def test_step_back_needs_no_page_that_was_recycled(length: int) -> None:
    """The token that is computed again sees its whole window, at every alignment."""
    pages = pages_of()
    held = grown(pages, length, 1)
    pages.step_back(held)
    assert held.length == held.written == length - 1
    assert held.window_start * 8 <= max(length - 1 - (CFG.window - 1), 0)
    pages.audit([held])
    assert pages.append(held, 1)
    pages.commit(held, 1)
    pages.audit([held])


def test_forget_keeps_the_slot_and_nothing_else() -> None:
    pages = pages_of()
    held, other = grown(pages, 30), grown(pages, 12)
    slot = held.slot
    pages.forget(held)
    assert (held.slot, state(held)) == (slot, (0, 0, 0, [], []))
    assert not pages.history_table[slot].any()
    assert not pages.window_table[slot].any()
    pages.audit([held, other])
    assert pages.append(held, 9)
    pages.audit([held, other])


def test_the_tail_of_a_forgotten_chain_is_evicted_first() -> None:
    """A page is of use only with all before it, so they must go from the end (I7)."""
    pages = pages_of(history=6)
    held = grown(pages, 32)
    chain = [*held.history]
    for i, page in enumerate(chain):
        pages.history.publish(page, bytes([i]))
    pages.release(held)
    taken = [pages.history.take(1)[0] for _ in range(5)]  # one was free
    assert taken[1:] == chain[::-1]


def test_check_names_the_pool_that_is_short() -> None:
    """I1, I3: what can never be held is refused with numbers, not queued for ever."""
    pages_of(8, history=8).check(56)
    with pytest.raises(ValueError, match=r"57 tokens, which need 8 history pages .* pool has 7"):
        pages_of(8, history=8).check(57)
    with pytest.raises(ValueError, match=r"57 tokens, which need 3 window pages .* pool has 2"):
        pages_of(8, window=3).check(57)
    pages_of(8, window=4).check(57)  # 3 pages: a long sequence needs no more


def test_slots_run_out() -> None:
    pages = pages_of(slots=2)
    held = pages.open()
    assert pages.slots.available == 0
    with pytest.raises(AssertionError, match="1 slots of 0"):
        pages.open()
    pages.release(held)
    assert pages.open().slot == held.slot


@pytest.mark.parametrize("field", ["history", "window", "window_start", "length", "table"])
def test_audit_sees_a_sequence_that_disagrees(field: str) -> None:
    pages = pages_of()
    held = grown(pages, 20)
    pages.audit([held])
    if field == "table":
        pages.window_table[held.slot, held.window_start % pages.width] = 0
    elif field in ("length", "window_start"):
        setattr(held, field, getattr(held, field) + 1)
    else:
        getattr(held, field).pop()
    with pytest.raises(AssertionError):
        pages.audit([held])


def advance(pages: Pages, held: Held, rng: random.Random) -> bool:
    """A step with drafts, some rejected; sometimes its last token a second time."""
    count, drafts, ahead = rng.randint(1, MOST), rng.randint(0, 3), rng.randint(0, 4)
    length = held.length
    if not pages.append(held, count + drafts, ahead):
        assert held.length == held.written == length
        return False
    pages.rollback(held, rejected := rng.randint(0, drafts))
    pages.commit(held, count + drafts - rejected)
    pages.recycle(held)
    assert held.length == held.written == length + count + drafts - rejected
    if rng.random() < 0.1:
        pages.step_back(held)
        assert pages.append(held, 1)
        pages.commit(held, 1)
    return True


def test_random_lives() -> None:
    """No page is lost or owned twice over 2,000 random steps; in the end all are free."""
    rng = random.Random(0)
    pages = pages_of(MOST, history=40, window=16, slots=6, drafts=3)
    live: list[Held] = []
    refused = forks = shared = 0
    for step in range(2000):
        if rng.random() < 0.2 and pages.slots.available:
            live.append(pages.open())
            if rng.random() < 0.3:
                refused += not pages.begin(live[-1], rng.randint(1, 40))
        if not live:
            continue
        held = rng.choice(live)
        if rng.random() < 0.15 and (made := pages.fork(held)) is not None:
            live.append(made[0])
            forks += 1
        refused += not advance(pages, held, rng)
        if held.history and rng.random() < 0.1:
            pages.history.publish(held.history[0], step.to_bytes(2, "little"))
        if held.length > 100 or rng.random() < 0.1:
            pages.release(held)
            live.remove(held)
        pages.audit(live)
        shared += max(pages.history._count) > 1
    assert min(refused, forks, shared) > 50, "the test met no shortage, or no sharing"
    for held in live:
        pages.release(held)
    pages.audit([])
    assert [p.available for p in (pages.history, pages.window, pages.slots)] == [39, 15, 5]
