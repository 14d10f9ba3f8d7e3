"""What an amount of memory buys, held against the pages and the admission that will spend it."""

import json
import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.config import Config, preset
from dsv4.state import PoolSizes, init_pools, pool_bytes, pool_spec, sequence_bytes
from dsv4.tree import leaves
from runtime import admission, pools_report
from runtime.layout import GROUPS, Layout
from runtime.memory import Memory
from runtime.pages import Held, Pages
from runtime.pools import PoolOptions, PoolPlan, measure, plan_pools
from runtime.prefix import Hit, Prefix
from runtime.request import Request
from tests import tiny
from tests.planned import BF16, FLASH, MILLION, gigabytes

# Spec section 15.4, from its counts of entries: compressed of CSA with their indexer keys,
# compressed of HCA, windows, and the open inputs of section 15.3.
MAIN = 5_505_024 * (1024 + 256) + 163_840 * 1024
WINDOWS = 44 * 128 * 1024
OPEN = 4 * (21 * 2 * 8 * 1024 + 21 * 2 * 8 * 256 + 20 * 2 * 128 * 512)
# What a window page holds beyond that, so that a sequence can resume there: the A halves of the
# last CSA group (1.1), and the 4 streams of the last token for the draft module.
OVERLAP, STREAMS = 21 * 4 * 2 * (512 + 128) * 4, 4 * 4096 * 2


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
