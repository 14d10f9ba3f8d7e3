"""What a plan of pools refuses, in which words, and what it takes by default."""

import dataclasses
import inspect
import re

import pytest
import torch

from dsv4 import model
from dsv4.context import Ctx
from dsv4.state import PoolSizes, pool_bytes, pool_spec
from runtime.engine import Engine
from runtime.memory import read_memory
from runtime.pages import fit
from runtime.pools import PoolOptions, measure, plan_pools, served
from tests import tiny
from tests.planned import BF16, FLASH, MILLION, gigabytes


def numbers(message: str, pattern: str) -> int:
    found = re.search(pattern, message)
    assert found, message
    return int(found[1])


@pytest.mark.parametrize(
    ("size", "options", "short"),
    [
        ("10MB", {}, "slots"),
        ("3GB", {"slots": 70}, "window pages"),
        ("10GB", {"slots": 30, "chunk": 65536, "max_model_len": 65536}, "window pages"),
        ("7GB", {"slots": 2}, "history pages"),
        ("7.3GB", {"slots": 8}, "history pages"),
        ("7.3GB", {"slots": 1, "chunk": 8192}, "history pages"),
        ("1.34GiB", {"max_model_len": 300_000, "drafts": 3}, "history pages"),
        ("40MB", {"slots": 1, "max_model_len": 8192}, "window pages"),
        ("13MB", {"slots": 1, "max_model_len": 8192}, "slots"),
    ],
)
def test_i5_i1_refusals_name_the_short_pool_and_remedies_that_hold(
    size: str, options: dict[str, int], short: str
) -> None:
    """I5: "needs 1.34 GiB, have 0.3" helps nobody. I1: nothing waits for pages that never come."""
    with pytest.raises(ValueError, match="cannot be served") as refused:
        gigabytes(FLASH, size, **options)
    told = str(refused.value)
    assert f"{short} are short" in told
    assert f"({size} as given)" in told
    asked = {"max_model_len": MILLION, **options}

    def works(memory: str, **changes: int) -> bool:
        try:
            return gigabytes(FLASH, memory, **(asked | changes)).num_bytes > 0
        except ValueError:
            return False

    enough = numbers(told, r"at least (\d+) bytes")
    slots = {"slots": asked.get("slots", 1)}  # by default as few as needed
    assert works(f"{enough}B", **slots)
    assert not works(f"{enough - 1}B", **slots)
    if "no length" in told:
        assert not works(size, max_model_len=1)
    else:
        length = numbers(told, r"in this memory at most max_model_len (\d+)")
        assert works(size, max_model_len=length)
        assert not works(size, max_model_len=length + 1)
    for pattern, changes, most in (
        (r"with 1 slot at most max_model_len (\d+)", {"slots": 1}, "max_model_len"),
        (r"at most (\d+) slots?", {}, "slots"),
        (r"chunks of at most (\d+) tokens", {}, "chunk"),
    ):
        if re.search(pattern, told):
            count = numbers(told, pattern)
            assert works(size, **changes, **{most: count})
            assert not works(size, **changes, **{most: count + 1})


def test_i5_each_remedy_is_offered_where_it_helps() -> None:
    def refusal(size: str, **options: int) -> str:
        with pytest.raises(ValueError, match="cannot be served") as refused:
            gigabytes(FLASH, size, **options)
        return str(refused.value)

    assert "; at most 1 slot" in refusal("7.3GB", slots=8)
    told = refusal("9.5GB", slots=2, chunk=65536, max_model_len=524_288)
    assert "chunks of at most" in told
    assert "with 1 slot at most max_model_len" in told
    assert "slots" not in refusal("7GB", slots=1).split("Remedy")[1]
    assert "no length, not even one page" in refusal("1MB")


def test_i1_large_chunks_reserve_window_pages_and_nothing_per_raw_token() -> None:
    """Chunks of 65,536 tokens on a model whose open inputs once were counted per token."""
    small, large = (
        gigabytes(FLASH, "8GB", slots=2, chunk=chunk, max_model_len=65536) for chunk in (512, 65536)
    )
    for group in ("slots", "history_pages"):
        assert small.layout.needs(65536)[group] == large.layout.needs(65536)[group]
    assert large.layout.needs(65536)["window_pages"] == 512
    assert large.largest(2) >= 65536
    assert small.largest() > large.largest()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": MILLION + 1}, f"max_model_len is 1048577; .* from 1 to {MILLION}"),
        ({"slots": 0}, "slots is 0"),
        ({"slots": True}, "slots is True"),
        ({"chunk": 0}, "chunk is 0"),
        ({"chunk": 2.5}, "chunk is 2.5"),
        ({"drafts": -1}, "drafts is -1; it must be a whole number from 0 to 8"),
        ({"drafts": 9}, "drafts is 9"),
        ({"page_tokens": 100}, "page_tokens is 100; it must be a multiple of 128"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"cached_windows": 1.5}, "cached_windows is 1.5"),
        ({"cached_windows": float("nan")}, "cached_windows is nan"),
    ],
)
def test_bad_options_are_refused(options: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan_pools(FLASH, BF16, read_memory("20GB"), PoolOptions(**options))


def test_drafts_need_a_draft_module() -> None:
    plain = dataclasses.replace(FLASH, mtp=0)
    assert served(FLASH, 2) is FLASH
    assert served(FLASH, 0) == served(plain, 0) == plain
    for make in (lambda: served(plain, 2), lambda: gigabytes(plain, "20GB", drafts=2)):
        with pytest.raises(ValueError, match="drafts is 2; this model has no draft module"):
            make()
    assert gigabytes(plain, "20GB") == gigabytes(FLASH, "20GB")


def test_a_model_with_a_draft_module_steps_over_pools_without_its_caches() -> None:
    cfg = tiny.short()
    assert cfg.mtp
    params, ids = tiny.params(cfg), tiny.tokens(cfg, 2, 20)
    batch = tiny.batch(cfg, [(ids[0], 0), (ids[1], 0)], pages=3)
    logits = []
    for c in (cfg, served(cfg, 0)):
        out, pools = model.step(params, tiny.pools(c, 2, 3, torch.float32), batch, Ctx(cfg))
        assert (pools.mtp is None) == (c.mtp == 0)
        logits.append(out.logits)
    assert torch.equal(*logits)


# Defaults, and pools of given sizes.


def test_defaults_are_the_engines() -> None:
    options = PoolOptions()
    assert options.chunk == inspect.signature(Engine).parameters["chunk"].default
    plan = gigabytes(FLASH, "80GB")
    assert plan.sizes.page_tokens == fit(FLASH, [1], most=1).page_tokens
    assert plan.sizes.drafts == PoolSizes(history_pages=2, window_pages=2, slots=2).drafts
    assert plan.max_model_len == FLASH.max_positions


@pytest.mark.parametrize("size", ["7.3GB", "8GB", "10GB", "16GiB", "80GB"])
def test_default_slots_never_cost_the_longest_sequence(size: str) -> None:
    plan = gigabytes(FLASH, size)
    assert plan.largest() == MILLION
    assert 1 <= plan.sizes.slots - 1 <= 64
    running = plan.layout.cost(plan.sizes.slots - 1, MILLION) - plan.layout.cost(1, MILLION)
    assert running <= plan.memory.num_bytes / 8


def test_the_share_of_cached_windows_is_kept() -> None:
    none, some, all_ = (
        plan_pools(FLASH, BF16, read_memory("80GB"), PoolOptions(slots=4, cached_windows=share))
        for share in (0, 0.2, 1)
    )
    assert none.cached_windows == 0
    assert 3000 < some.usable("history_pages") * 128 / some.cached_windows < 5000
    assert all_.usable("history_pages") < 8192 + 8  # what is left is less than a window page


def test_given_sizes_are_measured() -> None:
    sizes = fit(FLASH, [100_000], most=512, drafts=2)
    plan = measure(FLASH, BF16, sizes, chunk=512, max_model_len=100_000)
    assert plan.sizes == sizes
    assert plan.num_bytes == plan.memory.num_bytes == pool_bytes(pool_spec(FLASH, sizes), BF16)
    assert plan.fits(100_000) == 1
    assert plan.largest() == 100_096
    told = r"history pages, the pool has 782.*at most 100096 tokens; with (\d+) bytes"
    with pytest.raises(ValueError, match=told) as refused:
        measure(FLASH, BF16, sizes, chunk=512, max_model_len=100_097)
    more = numbers(str(refused.value), r"with (\d+) bytes")
    assert more - plan.num_bytes == plan.layout.price("history_pages")
    with pytest.raises(ValueError, match="window pages, the pool has 7"):
        measure(FLASH, BF16, sizes, chunk=8192, max_model_len=100_000)
