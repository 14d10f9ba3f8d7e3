"""What a sequence costs in pages, however long it gets, and pools that are made for given lengths.

V4-Flash's own numbers; no tensor is allocated (meta pools), tokens are counts.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from dsv4.config import Config, preset
from dsv4.state import init_pools, pool_spec, sequence_bytes
from runtime.pages import Held, Pages, fit, page_size, reach, spare
from runtime.parcel import held_bytes
from tests import tiny

FLASH = preset("flash")
TOKENS = 300_000
PAGE = 128


def life(pages: Pages, chunk: int, until: int, tokens: int) -> Iterator[tuple[Held, int]]:
    """One sequence in chunks up to `until`, then token by token; it and the step just appended."""
    held = pages.open()
    while held.length < tokens:
        count = min(chunk, until - held.length) if held.length < until else 1
        assert pages.append(held, count)
        yield held, count
        pages.commit(held, count)
        pages.recycle(held)


@pytest.mark.parametrize("chunk", [512, 300])
def test_a_long_sequence_costs_section_15_4_and_a_page_of_each_group(chunk: int) -> None:
    """I2, B13: 300,000 tokens cost 2.07 GB of history, 11.5 MB of window and one slot, no more.

    A page kept per step, or window pages kept for good (45 KB a token), would be seen.
    """
    sizes = fit(FLASH, [TOKENS], most=chunk)
    assert sizes.page_tokens == page_size(FLASH) == PAGE
    spec = pool_spec(FLASH, sizes)
    pools = init_pools(FLASH, sizes, torch.bfloat16, torch.device("meta"))
    pages = Pages(FLASH, sizes, chunk)
    at_rest = 0
    for held, count in life(pages, chunk, TOKENS - 2_000, TOKENS):
        n = held.written
        assert len(held.history) == -(-n // PAGE)
        assert len(held.window) <= -(-(pages.keep + count) // PAGE) + 1
        if held.length >= TOKENS - 2_000:  # decoding
            assert len(held.window) <= 2
        at_rest = max(at_rest, len(held.window)) if count == 1 else 0
    assert at_rest == 2
    assert len(held.history) == 2344
    pages.audit([held])

    ideal, paged = sequence_bytes(FLASH, TOKENS, torch.bfloat16), held_bytes(pools, spec, held)
    assert ideal == {
        "compressed": 1_660_784_640,  # (21 * 75,000 + 20 * 2,343) * 1,024
        "index keys": 403_200_000,  # 21 * 75,000 * 256
        "window": 5_767_168,  # 44 * 128 * 1,024
        "open inputs": 12_206_080,
    }
    page = {"compressed": 708_608, "index keys": 172_032, "window": 5_767_168, "open inputs": 0}
    for kind, most in page.items():
        assert ideal[kind] <= paged[kind] <= ideal[kind] + most, kind
    assert paged["compressed"] + paged["index keys"] == 2344 * 880_640
    # Headers are of the page, not of the token: 4 rows of A halves, and one token's streams.
    assert paged["overlap"] == 2 * 21 * 4 * 2 * (512 + 128) * 4
    assert paged["draft streams"] == 2 * 4 * 4096 * 2
    assert paged.keys() == {*ideal, "overlap", "draft streams"}


def test_section_15_4() -> None:
    """I3: the worked total of the spec, 7.23 GB at 2 ** 20 tokens."""
    parts = sequence_bytes(FLASH, 2**20, torch.bfloat16)
    assert parts == {
        "compressed": 5_637_144_576 + 167_772_160,
        "index keys": 1_409_286_144,
        "window": 5_767_168,
        "open inputs": 12_206_080,
    }
    assert round(sum(parts.values()) / 1e9, 2) == 7.23


def lockstep(pages: Pages, lengths: list[int], most: int, drafts: int) -> bool:
    """Grow all at once to their lengths, a full step of each before any commits."""
    helds = [pages.open() for _ in lengths]
    while any(h.length < n for h, n in zip(helds, lengths, strict=True)):
        counts = [min(most, n - h.length) for h, n in zip(helds, lengths, strict=True)]
        for h, n, count in zip(helds, lengths, counts, strict=True):
            ahead = min(reach(most, drafts) - most, n - h.length - count)
            if count and not pages.append(h, count, ahead):
                return False
        for h, count in zip(helds, counts, strict=True):
            pages.commit(h, count)
        pages.audit(helds)
        for h in helds:
            pages.recycle(h)
    return True


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    "cfg",
    [tiny.short(), tiny.config("w", 0), tiny.config(), FLASH],
    ids=["short", "w", "tiny", "flash"],
)
def test_pools_that_fit_hold_these_lengths_at_once(cfg: Config, drafts: int) -> None:
    """I1: and without the pages that admission spares they just do: nothing else is in vain."""
    lengths, most = [1, 70, 300, 128, 6 * page_size(cfg)], 32
    made = fit(cfg, lengths, most=most, drafts=drafts)
    pages = Pages(cfg, made, most)
    for n in lengths:
        pages.check(n)
    assert lockstep(pages, lengths, most, drafts)
    left = spare(len(lengths) - 1)
    assert (pages.history.available, pages.slots.available) == (left, 0)
    less = dataclasses.replace(made, history_pages=made.history_pages - left - 1)
    assert not lockstep(Pages(cfg, less, most), lengths, most, drafts)


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_window_pages_that_fit_are_needed(drafts: int) -> None:
    """Sequences that are all at their widest at the same time use every one of them."""
    cfg, most, lengths = tiny.short(), 11, [90, 90, 90]
    made = fit(cfg, lengths, most=most, page_tokens=8, drafts=drafts)
    pages = Pages(cfg, made, most)
    assert lockstep(pages, lengths, most, drafts)
    fewer = dataclasses.replace(made, window_pages=made.window_pages - spare(2) - 1)
    assert not lockstep(Pages(cfg, fewer, most), lengths, most, drafts)
