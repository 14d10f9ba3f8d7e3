"""What an amount of memory buys, held against the pages and the admission that will spend it."""

import dataclasses
import inspect
import json
import random
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import model
from dsv4.config import Config, preset
from dsv4.context import Ctx
from dsv4.state import PoolSizes, init_pools, pool_bytes, pool_spec, sequence_bytes
from dsv4.tree import leaves
from runtime import admission, pools_report
from runtime.engine import Engine
from runtime.layout import GROUPS, Layout
from runtime.memory import Memory, read_memory
from runtime.pages import Held, Pages, fit
from runtime.pools import PoolOptions, PoolPlan, measure, plan_pools, served
from runtime.prefix import Hit, Prefix
from runtime.request import Request
from tests import tiny

BF16 = torch.bfloat16
FLASH = preset("flash")
MILLION = 1_048_576  # tokens
# Spec section 15.4, from its counts of entries: compressed of CSA with their indexer keys,
# compressed of HCA, windows, and the open inputs of section 15.3.
MAIN = 5_505_024 * (1024 + 256) + 163_840 * 1024
WINDOWS = 44 * 128 * 1024
OPEN = 4 * (21 * 2 * 8 * 1024 + 21 * 2 * 8 * 256 + 20 * 2 * 128 * 512)
# What a window page holds beyond that, so that a sequence can resume there: the A halves of the
# last CSA group (1.1), and the 4 streams of the last token for the draft module.
OVERLAP, STREAMS = 21 * 4 * 2 * (512 + 128) * 4, 4 * 4096 * 2


def gigabytes(cfg: Config, size: str, **options: int) -> PoolPlan:
    return plan_pools(cfg, BF16, read_memory(size), PoolOptions(**options))


# A plan is what pages and admission will do. Small models: their numbers of pages are small.

SMALL = (
    tiny.short(),  # window 8, rates 4 and 8, draft module
    tiny.short("hw"),
    tiny.short(window=2),  # the overlap header outlives the window
    tiny.short(window=20, mtp=0),
    tiny.config("w", 0),  # no compressor: history pages are free
)


@st.composite
def plans(draw: st.DrawFn) -> PoolPlan:
    cfg = draw(st.sampled_from(SMALL))
    page = cfg.page_tokens * draw(st.integers(1, 3) if cfg.rates else st.integers(3, 20))
    drafts = draw(st.integers(0, 4)) if cfg.mtp else 0
    chunk, slots = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    length = draw(st.integers(1, 12 * page))
    layout = Layout(cfg=cfg, dtype=BF16, page_tokens=page, chunk=chunk, drafts=drafts)
    more = sum(
        draw(st.integers(0, 20)) * layout.price(g) for g in ("window_pages", "history_pages")
    )
    options = PoolOptions(
        max_model_len=length, slots=slots, chunk=chunk, drafts=drafts, page_tokens=page
    )
    return plan_pools(cfg, BF16, Memory(layout.cost(slots, length) + more, "a test"), options)


def pages_of(plan: PoolPlan) -> Pages:
    return Pages(plan.cfg, plan.sizes, plan.layout.chunk)


def life(
    pages: Pages, plan: PoolPlan, held: Held, tokens: int, rng: random.Random
) -> Iterator[None]:
    """A sequence of `tokens` tokens, step by step, as the scheduler runs one.

    Its prompt is of any length; with drafts, any number of them is accepted. It must never be short
    of a page.
    """
    chunk, depth = plan.layout.chunk, plan.layout.drafts
    known, proposed = rng.randint(1, tokens), 0  # tokens of prompt and output, drafts of the next
    while known <= tokens:
        owed = known - held.length
        if owed > chunk:
            count, kept, ahead = chunk, chunk, int(depth > 0)
        else:
            count, kept = owed + proposed, owed + rng.randint(0, proposed)
            propose = max(0, min(depth, tokens - known))
            ahead = min(max(propose, int(depth > 0)), tokens - held.length - count)
            known += 1 + kept - owed
            proposed = max(min(propose, tokens - known), 0)
        assert pages.append(held, count, ahead), "the plan promised this page"
        yield
        pages.commit(held, kept)
        pages.recycle(held)
    assert held.length == tokens


def run(pages: Pages, plan: PoolPlan, tokens: list[int], rng: random.Random) -> None:
    """Sequences of these lengths, all at once, in any order of steps."""
    helds = [pages.open() for _ in tokens]
    lives = [life(pages, plan, h, n, rng) for h, n in zip(helds, tokens, strict=True)]
    while lives:
        one = rng.choice(lives)
        if next(one, lives) is lives:
            lives.remove(one)
    pages.audit(helds)
    for held, n in zip(helds, tokens, strict=True):
        rests = plan.layout.rests(n)
        assert (len(held.window), len(held.history)) == (
            rests["window_pages"],
            rests["history_pages"],
        )
        pages.release(held)


@given(plans(), st.integers(0, 2**32))
def test_i1_the_largest_request_fits_and_one_token_more_does_not(plan: PoolPlan, seed: int) -> None:
    pages, largest = pages_of(plan), plan.largest()
    assert largest >= plan.max_model_len
    assert plan.fits(largest) >= 1
    pages.check(largest)
    plan.check(largest)
    run(pages, plan, [largest], random.Random(seed))
    if largest == plan.cfg.max_positions:
        return  # no request is longer
    assert plan.fits(largest + 1) == 0
    with pytest.raises(ValueError, match=r"(history|window) pages of") as refused:
        pages.check(largest + 1)
    with pytest.raises(ValueError, match="cannot be served") as foretold:
        plan.check(largest + 1)
    # Both name the pool that is short.
    short = "history pages" if "history pages" in str(refused.value) else "window pages"
    assert f"{short}, the pool has" in str(foretold.value)
    if short == "window pages":
        return  # one more is needed for some ways to cut the prompt into chunks, not for all
    held = pages.open()
    while held.length < largest:
        count = min(plan.layout.chunk, largest - held.length)
        assert pages.append(held, count)
        pages.commit(held, count)
        pages.recycle(held)
    assert not pages.append(held, 1)


def admitted(plan: PoolPlan, tokens: int) -> int:
    """How many prompts of `tokens` tokens are let in before any has been computed."""
    pages, running, nothing = pages_of(plan), [], Hit((), ())
    while True:
        request = Request(prompt=[1] * tokens)
        if not admission.fits(pages, running, request, nothing):
            return len(running)
        request.held = pages.open()
        running.append(request)


@given(plans(), st.data())
def test_i1_as_many_fit_as_are_admitted_at_once_and_they_all_finish(
    plan: PoolPlan, data: st.DataObject
) -> None:
    """All of it may be prompt. That the admitted fit on to their ends is what is promised."""
    num_seqs = data.draw(st.integers(1, plan.sizes.slots - 1))
    largest = plan.largest(num_seqs)
    tokens = data.draw(st.integers(1, plan.cfg.max_positions))
    for n in {tokens, largest} - {0}:
        assert admitted(plan, n) == plan.fits(n)
        if plan.fits(n):
            rng = random.Random(data.draw(st.integers(0, 2**32)))
            run(pages_of(plan), plan, [n] * plan.fits(n), rng)
    if largest:
        assert plan.fits(largest) >= num_seqs
    if largest < plan.cfg.max_positions:
        assert plan.fits(largest + 1) < num_seqs


def test_i1_admission_spares_pages_to_generate_into() -> None:
    """Four times two pages are eight, but the fourth is not let in beside three that run."""
    sizes = PoolSizes(history_pages=9, window_pages=99, slots=9, page_tokens=8)
    plan = measure(SMALL[0], BF16, sizes, chunk=8, max_model_len=64)
    assert admitted(plan, 16) == plan.fits(16) == 3
    assert admitted(plan, 8) == plan.fits(8) == 7
    assert [plan.largest(n) for n in (1, 2, 3, 4, 7, 8)] == [64, 24, 16, 8, 8, 0]


@given(plans())
def test_all_memory_is_spent_and_no_more(plan: PoolPlan) -> None:
    spec = pool_spec(plan.cfg, plan.sizes)
    assert plan.num_bytes == pool_bytes(spec, BF16) <= plan.memory.num_bytes
    assert plan.fits(plan.max_model_len) >= 1
    grows = "history_pages" if plan.layout.price("history_pages") else "window_pages"
    assert plan.memory.num_bytes - plan.num_bytes < plan.layout.price(grows)
    told = pools_report.facts(plan)
    assert told["largest_request"] == plan.largest()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert plan.hit_rule in pools_report.lines(told)


@pytest.mark.parametrize("drafts", [0, 3])
def test_i3_tensors_take_the_bytes_that_were_planned(drafts: int) -> None:
    """The sizing is the pool spec's, not an estimate: down to the byte."""
    plan = plan_pools(
        tiny.short(), BF16, Memory(3_000_000, "a test"), PoolOptions(slots=2, drafts=drafts)
    )
    made = leaves(init_pools(plan.cfg, plan.sizes, BF16))
    assert sum(t.numel() * t.element_size() for t in made) == plan.num_bytes


def test_i3_i2_little_memory_holds_long_sequences_of_v4() -> None:
    """Other planners found 13.5K tokens in 5.4 GB and 150K in 7.7 GiB."""
    assert gigabytes(FLASH, "5.4GB", max_model_len=1, slots=1).largest() > 600_000
    assert gigabytes(FLASH, "7.7GiB", slots=1, drafts=5).largest() == MILLION


# Bytes of Flash. Spec section 15.


@pytest.mark.parametrize("drafts", [0, 3])
def test_i2_a_million_tokens_cost_what_the_specification_says_and_at_most_a_page_per_group(
    drafts: int,
) -> None:
    """Section 15.4: 7.23 GB with the draft module's windows.

    A window page is 462,848 bytes larger than the section's windows: its header, of which 32,768
    are the draft module's streams. Without drafts neither those are paid for nor its windows.
    """
    whole = MAIN + WINDOWS + OPEN
    assert whole == 7_232_176_128
    assert sum(sequence_bytes(FLASH, MILLION, BF16).values()) == whole
    plan = gigabytes(FLASH, "20GB", slots=1, drafts=drafts)
    price = {group: plan.layout.price(group) for group in GROUPS}
    module = WINDOWS // 44 + STREAMS if not drafts else 0
    assert price["window_pages"] == WINDOWS + OVERLAP + STREAMS - module
    assert price["history_pages"] * 8192 == MAIN
    # Rows of a ring for each draft: 2 * width wide values, twice for the overlap of CSA.
    assert price["slots"] == OPEN + drafts * 2 * 4 * (21 * 2 * (512 + 128) + 20 * 512)
    extra = OVERLAP + STREAMS + price["slots"] - OPEN - module
    assert plan.rests_bytes(MILLION) == whole + extra

    pages = Pages(plan.cfg, plan.sizes, plan.layout.chunk)
    held = pages.open()
    while held.length < MILLION:
        count = min(512 if held.length < MILLION - 300 else 1, MILLION - held.length)
        assert pages.append(held, count)
        pages.commit(held, count)
        pages.recycle(held)
        if held.length % 7 and held.length < MILLION - 300:
            continue
        ideal = sequence_bytes(plan.cfg, held.length, BF16)
        own = len(held.history) * price["history_pages"], len(held.window), 1
        assert 0 <= own[0] - ideal["compressed"] - ideal["index keys"] < price["history_pages"]
        assert own[1] <= WINDOWS // ideal["window"] + 1
        held_bytes = own[0] + own[1] * price["window_pages"] + price["slots"]
        assert held_bytes == plan.rests_bytes(held.length)
        assert held_bytes <= sum(ideal.values()) + sum(price.values())
    assert len(held.history) == 8192
    assert len(held.window) == 1


@pytest.mark.parametrize(("name", "csa", "hca"), [("flash", 21, 20), ("pro", 30, 31)])
def test_i2_bytes_per_token_by_kind(name: str, csa: int, hca: int) -> None:
    """Section 15.2."""
    plan = gigabytes(preset(name), "30GB", drafts=1, max_model_len=8192)
    told = pools_report.facts(plan)
    assert told["bytes_per_token"] == {
        "compressed": csa * 1024 / 4 + hca * 1024 / 128,
        "index keys": csa * 256 / 4,
        "total": {"flash": 6880, "pro": 9848}[name],
    }
    assert plan.bytes_per_token == told["bytes_per_token"]["total"]
    kinds = {group: set(has["kinds"]) for group, has in told["groups"].items()}
    assert kinds == {
        "slots": {"open inputs", "draft rows"},
        "window_pages": {"window", "overlap", "draft streams"},
        "history_pages": {"compressed", "index keys"},
    }
    for has in told["groups"].values():
        assert has["bytes"] == has["count"] * sum(has["kinds"].values())
    assert told["bytes"] == sum(has["bytes"] for has in told["groups"].values())


def test_b13_a_stored_prefix_keeps_reachable_state_alone() -> None:
    """Another pool took 300 GB for a million tokens: it stored the open inputs of every token."""
    plan = gigabytes(FLASH, "20GB", slots=1, drafts=3)
    assert plan.prefix_bytes(MILLION) == MAIN + WINDOWS + OVERLAP + STREAMS
    assert plan.prefix_bytes(MILLION) / MILLION < 6_886
    assert plan.prefix_bytes(127) == 0
    assert (
        plan.prefix_bytes(255)
        == plan.prefix_bytes(128)
        == MAIN // 8192 + WINDOWS + (OVERLAP + STREAMS)
    )


@pytest.mark.parametrize("cfg", SMALL)
def test_b13_a_hit_shares_the_pages_that_the_plan_counts(cfg: Config) -> None:
    plan = plan_pools(cfg, BF16, Memory(10**7, "a test"), PoolOptions(slots=2, page_tokens=24))
    pages = pages_of(plan)
    prefix = Prefix(pages, "layout", enabled=True)
    serve(prefix, pages, range(250))
    hit, _ = prefix.match(prefix.chain("", ()), range(250))
    found = {"slots": 0, "window_pages": len(hit.window), "history_pages": len(hit.history)}
    assert len(hit.history) == 10
    assert plan.prefix_bytes(250) == plan.layout.num_bytes(found)


def serve(prefix: Prefix, pages: Pages, tokens: range) -> None:
    """Compute a prompt, one token at a time, and leave it in the cache."""
    held, chain = pages.open(), prefix.chain("", ())
    for _ in tokens:
        assert pages.append(held, 1)
        pages.commit(held, 1)
        prefix.publish(chain, held, tokens, len(tokens))
        pages.recycle(held)
    prefix.ended(chain, held)
    pages.release(held)


@pytest.mark.parametrize("drafts", range(9))
@pytest.mark.parametrize("name", ["flash", "pro", "tiny"])
def test_b2_b4_b5_the_hit_unit_is_told_and_drafts_do_not_change_it(name: str, drafts: int) -> None:
    cfg = preset(name)
    plan = gigabytes(cfg, "30GB", drafts=drafts, max_model_len=min(4096, cfg.max_positions))
    cache = pools_report.facts(plan)["prefix_cache"]
    assert cache["hit_tokens"] == plan.sizes.page_tokens <= 128
    assert f"hit unit: one page, {plan.sizes.page_tokens} tokens" in cache["rule"]
    assert "with any number of drafts or none" in cache["rule"]


@pytest.mark.parametrize("drafts", [0, 1, 8])
def test_b2_b4_b5_prompts_hit_as_the_rule_says(drafts: int) -> None:
    """Other rules: none below 4,096 tokens, or 16,384 and twice that with drafts."""
    plan = gigabytes(FLASH, "8GB", slots=2, drafts=drafts, max_model_len=8192)
    unit, least = map(int, re.findall(r"(\d+) tokens", plan.hit_rule))
    pages = pages_of(plan)
    prefix = Prefix(pages, "layout", enabled=True)
    serve(prefix, pages, range(5000))
    for length in (1, 100, unit, least - 1, least, 2 * unit, 2 * unit + 1, 1000, 4096, 4999, 5000):
        _, report = prefix.match(prefix.chain("", ()), range(length))
        assert report.hit == (length - 1) // unit * unit
        assert (report.hit > 0) == (length >= least)


# Refusals.


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
