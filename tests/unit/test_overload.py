"""More requests than there is room for: bounded waiting, flat memory, right answers or refusals."""

import dataclasses
import gc
import random
import re
import tracemalloc

import pytest

from dsv4.state import PoolSizes
from runtime import page_pool
from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.request import Limits, Request, Status
from runtime.rules import Overloaded
from tests import fake_model
from tests.desk import Desk

CFG = dataclasses.replace(fake_model.CFG, eos=())
SLOTS = 10


def sizes(drafts: int = 0) -> PoolSizes:
    """Room for 10 requests of middle size: 50 pages of 8 tokens."""
    return PoolSizes(
        history_pages=51, window_pages=41, slots=SLOTS + 1, page_tokens=8, drafts=drafts
    )


def engine(**more) -> Engine:
    settings = {"chunk": 16, "budget": 32} | more
    drafts: Drafts | None = settings.get("drafts")
    model = fake_model.counter(CFG, (lambda p: p % 3 > 0) if drafts else None)
    return Engine(model, sizes(drafts.depth if drafts else 0), **settings)


def requests(count: int, seed: int = 0, **more) -> list[Request]:
    """Prompts of 1 to 60 tokens, no two beginning alike, and 1 to 16 new tokens."""
    rng = random.Random(seed)
    return [
        Request(
            prompt=[rng.randrange(CFG.vocab) for _ in range(rng.choice((1, 8, 30, 60)))],
            limits=Limits(max_new_tokens=rng.randint(1, 16)),
            **more,
        )
        for _ in range(count)
    ]


def right(request: Request) -> bool:
    """Whether a request has counted on from its prompt to its limit."""
    first, n = request.prompt[-1] + 1, request.limits.max_new_tokens
    return request.output == [(first + i) % CFG.vocab for i in range(n)]


@pytest.mark.parametrize("drafts", [None, Drafts(depth=2)])
def test_500_requests_on_pools_for_10_wait_a_bounded_time(drafts: Drafts | None) -> None:
    """Each has ended within the steps that the scheduler's docstring gives, after those before."""
    e = engine(drafts=drafts, budget=48)
    desk = Desk(sizes(drafts.depth if drafts else 0), chunk=16, budget=48, drafts=drafts)
    made = [e.add(r) for r in requests(500)]
    ended: dict[int, int] = {}
    step = 0
    while not e.idle:
        step += 1
        for event in e.step():
            if event.finish is not None:
                ended[event.request.id] = step
        if step % 50 == 0:
            e.audit()
    before = 0
    for request in made:
        assert ended[request.id] <= before + desk.bound(request)
        before = max(before, ended[request.id])
        assert right(request)
    assert step < 500 * 33  # and in truth far less, since ten run at once:
    assert step < sum(desk.bound(r) for r in made) / 4


def test_a_full_queue_refuses_clearly_and_every_accepted_answer_is_right() -> None:
    e = engine(max_waiting=20)
    offered = requests(500)
    taken, refused = [], []
    for i, request in enumerate(offered):
        try:
            taken.append(e.add(request))
        except Overloaded as error:
            refused.append(str(error))
        if i % 3 == 0:
            e.step()
    again = [r for r in offered if r.status is Status.NEW]
    assert len(again) == len(refused) > 100
    told = r"\d+ requests wait and max_waiting is 20: this one was not taken; try again .*"
    assert all(re.fullmatch(told, r) for r in refused)
    e.drain()
    assert all(right(r) for r in taken)
    assert len(taken) > 100
    for request in again[:20]:
        e.add(request)  # refused once, taken later
    e.drain()
    assert all(right(r) for r in again[:20])
    e.audit()


def test_memory_is_flat() -> None:
    """What 400 requests leave behind, once the first 100 have warmed everything up: nothing."""
    e = engine(cache=False, drafts=Drafts(depth=2), budget=48)

    def serve(count: int, seed: int) -> None:
        e.generate(requests(count, seed))
        for request in requests(20, seed + 1):
            e.abort(e.add(request))
        gc.collect()

    serve(100, 0)
    tracemalloc.start()
    serve(20, 1)
    before = tracemalloc.get_traced_memory()[0]
    for seed in range(2, 6):
        serve(100, seed)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000  # a request that is kept costs over 2,000


def test_the_cache_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of pages that are there, and of so many that had to make room."""
    monkeypatch.setattr(page_pool, "_REMEMBERED", 64)
    e = engine()
    e.generate(requests(200))
    for pool in (e._cache.pages.history, e._cache.pages.window):
        assert len(pool._index) <= pool.capacity
        assert len(pool._evicted) == 64
    scheduler = e._scheduler
    assert not scheduler._live
    assert not scheduler.waiting._heap
    assert not scheduler._imports
    assert not e._streams


def churn(count: int, seed: int) -> None:
    """Arrivals, priorities, shared prefixes, aborts and forks; pools are whole at the end."""
    rng = random.Random(seed)
    e = engine(drafts=Drafts(depth=rng.choice((1, 3))), max_waiting=40, budget=56)
    pools = (e._cache.pages.history, e._cache.pages.window, e._cache.pages.slots)
    start = [p.available for p in pools]
    live: list[Request] = []
    made = done = refused = 0
    while made < count or live:
        for _ in range(rng.choice((0, 0, 1, 4)) if made < count else 0):
            prefix = [rng.randrange(3)] * rng.choice((0, 8, 20, 32))
            tail = [rng.randrange(CFG.vocab) for _ in range(rng.randint(1, 24))]
            request = Request(
                prompt=prefix + tail,
                limits=Limits(max_new_tokens=rng.randint(1, 20)),
                priority=rng.choice((0, 0, 0, -1, 2)),
                cache=rng.random() < 0.9,
                drafting=rng.random() < 0.9,
            )
            made += 1
            try:
                live.append(e.add(request))
            except Overloaded:
                refused += 1
        if live and rng.random() < 0.05:
            e.abort(rng.choice(live))
        if live and rng.random() < 0.05:
            parent = rng.choice(live)
            try:
                live.append(e.fork(parent, limits=Limits(max_new_tokens=3)))
            except ValueError:  # it has ended, the queue is full, or the child would be too long
                refused += 1
        e.step()
        if rng.random() < 0.1:
            e.audit()
        for request in [r for r in live if r.status is Status.DONE]:
            assert request.finish == "abort" or right(request)
            done += 1
            live.remove(request)
    assert e.idle
    e.audit()
    assert [p.available for p in pools] == start
    assert done > count / 3
    assert e._scheduler.preemptions > 0


def test_churn() -> None:
    """The short form of the next test."""
    churn(500, seed=0)


@pytest.mark.long
def test_churn_of_10_000_requests() -> None:
    """Pools equal the start after 10,000 requests: nothing leaks, nothing stands still."""
    churn(10_000, seed=1)
