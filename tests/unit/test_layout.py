"""The layout digest: equal where pages can be exchanged, different where they cannot."""

import dataclasses

import pytest
import torch

from dsv4.config import Yarn, preset
from dsv4.state import PoolSizes
from runtime.cache import Cache
from runtime.prefix import layout_digest
from tests import tiny

FLASH = preset("flash")


def digest(page: int = 128, dtype: torch.dtype = torch.bfloat16, **changes: object) -> str:
    return layout_digest(dataclasses.replace(FLASH, **changes), page, dtype)


@pytest.mark.parametrize(
    "change",
    [
        {"page": 256},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"mtp": 0},
        {"window": 64},
        {"kinds": FLASH.kinds[::-1]},
        {"hash_layers": (True,) * 43},
        {"index_topk": 256},
        {"norm_eps": 1e-5},
        {"compress_theta": 40_000.0},
        {"yarn": Yarn(factor=8.0)},
        {"yarn": None},
        {"vocab": 129_281},
    ],
    ids=str,
)
def test_whatever_decides_values_or_shapes_changes_it(change: dict) -> None:
    """A page of another layout would be read as if it were one of ours."""
    assert digest(**change) != digest()


@pytest.mark.parametrize(
    "change", [{"max_positions": 65_536}, {"bos": None}, {"eos": (1, 2)}], ids=str
)
def test_b10_an_unrelated_option_leaves_it(change: dict) -> None:
    """B10: what a page holds does not depend on how long a sequence may get, or on its end."""
    assert digest(**change) == digest()


def test_b10_pool_sizes_and_drafts_leave_it() -> None:
    cfg = tiny.short()
    caches = [
        Cache(
            cfg,
            PoolSizes(history_pages=n, window_pages=n + 1, slots=n, page_tokens=8, drafts=drafts),
            most=most,
            dtype=torch.float64,
        )
        for n, drafts, most in ((3, 0, 8), (5, 2, 30))
    ]
    assert caches[0].digest == caches[1].digest


def test_processes_and_versions_agree() -> None:
    """V4-Flash in bfloat16. If this changes, engines of two versions refuse each other's state:

    a field of `Config` was added or renamed, or `_VERSION` raised. Is that meant?
    """
    assert digest() == "2bfffab8df6099a773d39fcc830dc787ad48b09b1dcc3df8fbe2c4a1b4b15eb7"
