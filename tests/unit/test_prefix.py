"""Which prefixes hit, how far, and the reason that is told where one does not."""

import hashlib
import json
import struct
from collections.abc import Sequence

import pytest

from dsv4.config import Config, preset
from dsv4.state import PoolSizes
from runtime.pages import Held, Pages
from runtime.prefix import CacheReport, Prefix
from tests import tiny

PAGE = 8
CFG = tiny.short(max_positions=40_000)  # window 8


def ids(length: int, seed: int = 0) -> list[int]:
    """Tokens of which no two seeds have a page in common."""
    return [(i * 7 + seed * 1000 + i * i % 13) % 100_000 for i in range(length)]


class Served:
    """Pages with a prefix cache in front, and requests that come and go as the scheduler does it.

    Host integers only: that the rows are right as well is `property/test_restore.py`.
    """

    def __init__(
        self,
        cfg: Config = CFG,
        *,
        history: int = 200,
        window: int = 200,
        page: int = PAGE,
        drafts: int = 0,
        enabled: bool = True,
        most: int = 24,
    ) -> None:
        sizes = PoolSizes(
            history_pages=history, window_pages=window, slots=4, page_tokens=page, drafts=drafts
        )
        self.most = most
        self.running: list[Held] = []
        self.pages = Pages(cfg, sizes, most)
        self.prefix = Prefix(self.pages, "layout", enabled=enabled)

    def serve(
        self,
        tokens: Sequence[int],
        *,
        salt: str = "",
        extra: Sequence[str] = (),
        keep: bool = False,
    ) -> tuple[CacheReport, Held]:
        """One request from its hit to its end; `keep` leaves it running."""
        chain = self.prefix.chain(salt, extra)
        hit, report = self.prefix.match(chain, tokens)
        assert len(hit.history) * self.pages.page_tokens == report.hit
        held = self.pages.open()
        self.pages.restore(held, hit.history, hit.window)
        chain.published = len(hit.history)
        while held.length < len(tokens):
            count = min(self.most, len(tokens) - held.length)
            assert self.pages.append(held, count)
            self.pages.commit(held, count)
            self.prefix.publish(chain, held, tokens, len(tokens))
            self.pages.recycle(held)
        self.running.append(held)
        self.pages.audit(self.running)
        if not keep:
            self.prefix.ended(chain, held)
            self.pages.release(self.running.pop())
            self.pages.audit(self.running)
        return report, held

    def match(
        self, tokens: Sequence[int], *, salt: str = "", extra: Sequence[str] = ()
    ) -> CacheReport:
        """What a request would hit."""
        return self.prefix.match(self.prefix.chain(salt, extra), tokens)[1]


# How far.


@pytest.mark.parametrize("shared", [0, 1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 39, 40])
def test_b3_shared_tokens_hit_to_the_page(shared: int) -> None:
    """B3: two prompts that share k tokens hit floor(k / page) pages, wherever they part."""
    served = Served()
    served.serve(ids(40))
    report, _ = served.serve(ids(40)[:shared] + ids(33, seed=1))
    assert report.hit == shared // PAGE * PAGE
    assert report.limit == (shared + 33 - 1) // PAGE * PAGE


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 40, 41])
def test_b1_the_last_token_is_never_hit(length: int) -> None:
    """B1: a prompt that is all cached still computes a token: its logits are nowhere else."""
    served = Served()
    served.serve(ids(60))
    for _ in range(2):
        report, _ = served.serve(ids(length))
        assert report.hit == report.limit == (length - 1) // PAGE * PAGE
        assert report.hit < length


def test_a_longer_prompt_goes_on_where_a_shorter_one_ended() -> None:
    """A7: the turns of a conversation, each the one before and more."""
    served = Served()
    hits = [served.serve(ids(n))[0].hit for n in (20, 45, 46, 90)]
    assert hits == [0, 16, 40, 40]


def test_an_earlier_token_changes_every_later_key() -> None:
    """Equal pages behind different ones are not the same state: a chain, not a set of pages."""
    served = Served()
    served.serve(ids(48))
    for at in range(0, 48, 5):
        other = ids(48)
        other[at] += 1
        assert served.match(other).hit == min(at // PAGE * PAGE, 40)
    assert served.match(ids(48)[8:]).hit == 0  # nor do pages move


@pytest.mark.parametrize("shared", [32_768, 127, 128, 129])
def test_b3_two_64k_prompts(shared: int) -> None:
    """B3: sharing 32K they hit 32K; V4-Flash's own numbers."""
    served = Served(preset("flash"), history=1100, window=1100, page=128, most=8192)
    served.serve(ids(65_536))
    report, _ = served.serve(ids(65_536)[:shared] + ids(65_536 - shared, seed=3))
    assert report.hit == shared // 128 * 128


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_b2_b4_the_unit_is_the_page_whatever_is_drafted(drafts: int) -> None:
    """B2: prompts under 4,096 tokens hit. B4: identical ones do, with drafts or without."""
    for mtp in (0, 1):
        cfg = preset("flash") if mtp else tiny.config("wch", mtp=0, window=128)
        served = Served(cfg, page=128, drafts=drafts, most=512)
        reports = [served.serve(ids(300))[0] for _ in range(3)]
        assert [(r.hit, r.unit) for r in reports] == [(0, 128), (256, 128), (256, 128)]
        assert served.match(ids(129)).hit == 128
        assert served.match(ids(128)).hit == 0


# Who may hit.


def test_salts_and_extra_keys_keep_tenants_apart() -> None:
    served = Served()
    tenants = [("", ()), ("a", ()), ("b", ()), ("", ("a",)), ("a", ("a",)), ("a", ("a", "b"))]
    tenants += [("a", ("ab",)), ("a", ("b", "a"))]
    for salt, extra in tenants:
        assert served.match(ids(40), salt=salt, extra=extra).hit == 0
        served.serve(ids(40), salt=salt, extra=extra)
        assert served.match(ids(40), salt=salt, extra=extra).hit == 32


def test_a_cache_that_is_off_keeps_nothing() -> None:
    served = Served(enabled=False)
    for _ in range(2):
        report, _ = served.serve(ids(40))
        assert (report.hit, report.reason) == (0, "disabled")
    assert served.pages.history.cached == served.pages.window.cached == 0


def test_a_request_without_a_chain_hits_nothing() -> None:
    served = Served()
    served.serve(ids(40))
    hit, report = served.prefix.match(None, ids(40))
    assert (hit.history, hit.window, report.hit, report.reason) == ((), (), 0, "disabled")


def test_forget_empties_both_pools() -> None:
    served = Served()
    served.serve(ids(40))
    _, running = served.serve(ids(40), keep=True)
    served.prefix.forget()
    report = served.match(ids(40))
    assert (report.hit, report.reason) == (0, "no such prefix")
    served.pages.audit([running])


def test_a_running_request_can_be_hit() -> None:
    """And goes on owning its pages when the one that hit them ends."""
    served = Served()
    _, running = served.serve(ids(40), keep=True)
    report, _ = served.serve(ids(48))
    assert report.hit == 40
    assert served.running == [running]
    assert served.match(ids(48)).hit == 40


# Why not more.


def squeezed(window: int, history: int) -> Served:
    """A cache of ids(40), then so many other tokens that something had to go."""
    served = Served(window=window, history=history)
    served.serve(ids(40))
    return served


def test_reason_full_and_short() -> None:
    served = squeezed(200, 200)
    assert served.match(ids(40)).reason == "full"
    assert served.match(ids(40)).why == (
        "32 of 40 tokens hit (unit 8): every whole page before the last token was found"
    )
    assert served.match(ids(8)).reason == "short"
    # B5: the rule itself is told.
    assert served.match(ids(8)).why == (
        "0 of 8 tokens hit (unit 8): fewer than 9 tokens hold no whole page before the last token"
    )


def test_reason_no_such_prefix_and_salt() -> None:
    served = squeezed(200, 200)
    part = ids(16) + ids(30, seed=5)
    assert served.match(part).why == (
        "16 of 46 tokens hit (unit 8): no earlier request had the same 24 tokens"
    )
    salted = served.match(part, salt="x")
    assert (salted.hit, salted.reason) == (0, "salt")
    assert salted.why == (
        "0 of 46 tokens hit (unit 8): the request has a salt or extra keys, and no earlier one "
        "with these had the same 8 tokens"
    )
    assert served.match(part, extra=["x"]).reason == "salt"


def test_reason_disabled() -> None:
    assert Served(enabled=False).match(ids(40)).why == (
        "0 of 40 tokens hit (unit 8): the prefix cache is off for this engine or request"
    )


def test_reason_evicted() -> None:
    """The end of the chain went first, so that what is left is still of use."""
    served = squeezed(200, 9)  # 8 history pages, 5 of them cached
    served.serve(ids(33, seed=1))  # 5 pages
    report = served.match([*ids(40), 1])
    assert (report.hit, report.reason) == (24, "evicted")
    assert report.why == (
        "24 of 41 tokens hit (unit 8): the page that ends at token 32 had to make room"
    )


def test_reason_window_page_gone() -> None:
    """History reaches on, but the boundary there has no window: nothing is replayed."""
    served = squeezed(9, 200)
    for seed in (1, 2):
        served.serve(ids(47, seed=seed))
    report = served.match([*ids(24), 1])
    assert (report.hit, report.reason) == (0, "window page gone")
    assert report.why == (
        "0 of 25 tokens hit (unit 8): the history goes further than token 0, but the window pages "
        "there had to make room: more window pages would keep them"
    )


def test_every_reason_has_a_sentence() -> None:
    for reason in ("forked", "imported"):
        assert CacheReport(9, 8, 8, 8, reason).why.startswith("8 of 9 tokens hit (unit 8): the st")
    with pytest.raises(KeyError):
        _ = CacheReport(9, 8, 8, 8, "luck").why


# What stays.


def test_prompt_ends_are_evicted_after_the_middle() -> None:
    """Few window pages keep the places where one goes on, though the middle is as new."""
    served = Served(window=13)
    served.serve(ids(49))  # 7 window pages, of which the one that ends at 48 is a landmark
    served.serve(ids(49, seed=1))  # takes what is free, then 2 of the middle
    served.serve(ids(49, seed=2))
    for seed in range(3):
        assert served.match(ids(49, seed=seed)).hit == 48
        assert served.match(ids(25, seed=0)).reason == "window page gone"


def test_every_8192nd_token_is_kept_longer() -> None:
    served = Served(history=8000, window=300, most=512)
    served.serve(ids(8_192 + 200))
    served.serve(ids(8_000, seed=1))  # 1,000 window pages: all of the middle goes
    parted = ids(8_192 + 100) + ids(9, seed=2)
    assert served.match(parted).hit == 8_192


def test_eviction_never_touches_owned_pages() -> None:
    """However short pages are, a running sequence keeps its own, published or not."""
    served = Served(history=16, window=12)
    _, running = served.serve(ids(40), keep=True)
    was = [*running.history], [*running.window]
    for seed in range(1, 9):
        served.serve(ids(56, seed=seed))
    assert (running.history, running.window) == was
    assert served.pages.history.find(served_key(ids(8))) == running.history[0]
    assert served.pages.history.was_evicted(served_key(ids(8, seed=1)))


def test_what_is_not_committed_is_not_found() -> None:
    """Drafts that may be rejected must not be published: the next request would read them."""
    served = Served()
    chain, held = served.prefix.chain("", ()), served.pages.open()
    assert served.pages.append(held, 24)
    served.pages.commit(held, 15)
    served.prefix.publish(chain, held, ids(24), 24)
    assert served.match(ids(24)).hit == 8


def served_key(page: Sequence[int], before: bytes | None = None) -> bytes:
    """The key of a page by its definition, for a cache of layout "layout" without a salt."""
    root = hashlib.sha256(json.dumps(["layout", "", []]).encode()).digest()
    return hashlib.sha256((before or root) + struct.pack(f"<{len(page)}I", *page)).digest()


def test_keys_are_values_on_which_processes_agree() -> None:
    """B10: no seed of the process, no count of pages: a key may be sent to another machine."""
    served = Served()
    served.serve(ids(16))
    first = served_key(ids(16)[:8])
    assert served.pages.history.find(first) is not None
    assert served.pages.window.find(first) is not None
    assert served.pages.history.find(served_key(ids(16)[8:], before=first)) is not None
    fixed = "77661e8eb891ef51eeb3ea745a6c218e25c2f8c3da4cdaa5e4a5ddb07a8ca19d"
    assert served_key(range(8)).hex() == fixed
    served.serve(list(range(8)))
    assert served.pages.history.find(bytes.fromhex(fixed)) is not None
