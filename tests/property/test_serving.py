"""Whatever happens around a request, it gets the tokens of a lone, cold, undrafted run.

A state machine over a real engine in float64: requests arrive with prompts that share prefixes, in
chunks under any budget, on pools that are too small for all (so that some are preempted and pages
are evicted), are aborted, forked, sent away and taken in again as parcels, with drafts of any
depth, greedy and sampled. The reference is another engine with no cache, no drafts and no company.
"""

import dataclasses
import functools

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as play

from dsv4 import model, mtp
from dsv4.config import Config
from dsv4.context import Ctx
from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.pages import fit, kept_tokens, reach, window_width
from runtime.request import Limits, Request, Sampling, Status
from tests import tiny

# Every layer kind and mix; windows shorter and longer than a group; selection that bites.
CONFIGS = tuple(
    tiny.short(
        kinds,
        hashed,
        mtp=1,
        csa_rate=csa,
        hca_rate=hca,
        window=window,
        index_topk=topk,
        max_positions=96,
        eos=(7,),
    )
    for kinds, hashed, csa, hca, window, topk in (
        ("wchc", 0, 4, 8, 8, 2),
        ("cch", 1, 2, 6, 5, 3),
        ("hc", 0, 4, 8, 4, 1),
        ("hwc", 2, 2, 6, 2, 4),
        ("cw", 0, 4, 8, 16, 2),
        ("wh", 1, 2, 6, 8, 1),
    )
)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=5, seed=2**40),
    Sampling(temperature=1.3, top_p=0.9, seed=9),
)
LENGTHS = (1, 5, 8, 17, 24, 33, 48)
STEMS = 3  # families of prompts that share everything but their ends


@dataclasses.dataclass(frozen=True)
class Model:
    """What an engine is given: the plain steps, and random parameters."""

    cfg: Config
    index: int
    fit = fit_draft = None  # steps as they stand

    @functools.cached_property
    def params(self):
        """Of the config's index as seed."""
        return tiny.params(self.cfg, self.index, torch.float64)

    def step(self, params, pools, batch):
        """The backbone."""
        return model.step(params, pools, batch, Ctx(self.cfg))

    def draft(self, params, pools, streams, batch):
        """The draft module."""
        return mtp.draft(params, pools, streams, batch, Ctx(self.cfg))


MODELS = tuple(Model(cfg, i) for i, cfg in enumerate(CONFIGS))


def prompt(index: int, stem: int, length: int, tail: int) -> tuple[int, ...]:
    """`length` tokens of a family; the last one differs by `tail`."""
    cfg = CONFIGS[index]
    ids = tiny.tokens(cfg, 1, length, seed=100 + stem)[0].tolist()
    return (*ids[:-1], (ids[-1] + tail) % cfg.vocab)


@functools.cache
def lone(index: int, ids: tuple[int, ...], sampling: Sampling, limits: Limits) -> tuple:
    """Output and reason of a run with nothing before, beside or ahead of it."""
    cfg = CONFIGS[index]
    request = Request(prompt=ids, sampling=sampling, limits=limits)
    sizes = fit(cfg, [request.longest(cfg)], most=len(ids))
    (request,) = Engine(MODELS[index], sizes, chunk=len(ids), cache=False).generate([request])
    return tuple(request.output), request.finish


class Serving(RuleBasedStateMachine):
    """One engine, and everybody who ever came."""

    @initialize(
        index=st.integers(0, len(CONFIGS) - 1),
        depth=st.sampled_from((0, 1, 2, 3, 5, 8)),
        pages=st.integers(1, 2),
        chunk=st.integers(1, 24),
        spare=st.integers(0, 6),
        slots=st.integers(1, 5),
        tight=st.sampled_from((True, True, False)),
        adaptive=st.booleans(),
    )
    def start(self, index, depth, pages, chunk, spare, slots, tight, adaptive) -> None:
        """Pools for one longest request, or for some more."""
        cfg = CONFIGS[index]
        page = cfg.page_tokens * pages
        self.index, self.everybody = index, []
        sizes = fit(cfg, [88] * (1 if tight else slots), most=chunk, page_tokens=page, drafts=depth)
        width = window_width(kept_tokens(cfg), page, reach(chunk, depth))
        self.sizes = dataclasses.replace(
            sizes,
            slots=1 + slots,
            history_pages=sizes.history_pages + spare,
            window_pages=max(sizes.window_pages, width + 1) + spare // 2,
        )
        self.made = {
            "chunk": chunk,
            "budget": max(chunk, slots * (1 + depth)) + spare,
            "drafts": Drafts(depth=depth, adaptive=adaptive, window=4, rest=3) if depth else None,
        }
        self.engine = self.opened()

    def opened(self) -> Engine:
        """The engine of this game."""
        return Engine(MODELS[self.index], self.sizes, **self.made)

    def live(self) -> list[Request]:
        """Those who wait or run."""
        return [r for r in self.everybody if r.finish is None]

    @rule(
        stem=st.integers(0, STEMS - 1),
        length=st.sampled_from(LENGTHS),
        tail=st.integers(0, 1),
        sampling=st.sampled_from(SAMPLINGS),
        new=st.sampled_from((1, 4, 20, 40)),
        priority=st.sampled_from((0, 0, 1, -1)),
        salt=st.sampled_from(("", "", "tenant")),
        cache=st.sampled_from((True, True, False)),
        drafting=st.sampled_from((True, True, False)),
    )
    def arrive(self, stem, length, tail, sampling, new, **wishes) -> None:
        """Somebody comes."""
        request = Request(
            prompt=prompt(self.index, stem, length, tail),
            sampling=sampling,
            limits=Limits(max_new_tokens=new),
            **wishes,
        )
        self.everybody.append(self.engine.add(request))

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        """Time passes."""
        for _ in range(count):
            self.engine.step()
            self.engine.audit()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Somebody leaves."""
        self.engine.abort(data.draw(st.sampled_from(self.live())))

    @precondition(lambda self: any(r.output for r in self.live()))
    @rule(data=st.data(), sampling=st.sampled_from(SAMPLINGS))
    def fork(self, data: st.DataObject, sampling: Sampling) -> None:
        """Somebody tries another way from here."""
        parent = data.draw(st.sampled_from([r for r in self.live() if r.output]))
        limits = Limits(max_new_tokens=3)
        self.everybody.append(self.engine.fork(parent, sampling=sampling, limits=limits))

    @precondition(lambda self: any(r.computed for r in self.live()))
    @rule(data=st.data(), tail=st.integers(0, 1))
    def transfer(self, data: st.DataObject, tail: int) -> None:
        """Somebody's state goes on in an engine with other pools and another depth of drafts."""
        source = data.draw(st.sampled_from([r for r in self.live() if r.computed]))
        parcel = self.engine.export(source)
        ids = (
            *parcel.tokens,
            (source.tokens[len(parcel.tokens)] + tail) % CONFIGS[self.index].vocab,
        )
        request = Request(prompt=ids, limits=Limits(max_new_tokens=4), parcel=parcel)
        self.everybody.append(self.engine.add(request))

    @rule()
    def empty_the_cache(self) -> None:
        """The prefixes are forgotten."""
        self.engine.forget_prefixes()

    @invariant()
    def nothing_is_lost(self) -> None:
        """No page twice, none lost."""
        if hasattr(self, "engine"):
            self.engine.audit()

    def teardown(self) -> None:
        """All come to their ends, the same as if they had been alone."""
        if not hasattr(self, "engine"):
            return
        steps = 0
        while not self.engine.idle:
            self.engine.step()
            steps += 1
            assert steps < 200 * (1 + len(self.everybody)), "it does not end"
        self.engine.audit()
        pages = self.engine._cache.pages
        for pool in (pages.history, pages.window, pages.slots):
            assert pool.available == pool.capacity
        for r in self.everybody:
            assert r.status is Status.DONE
            output, finish = lone(self.index, tuple(r.prompt), r.sampling, r.limits)
            if r.finish == "abort":
                assert tuple(r.output) == output[: len(r.output)]
            else:
                assert (tuple(r.output), r.finish) == (output, finish)


def machine(examples: int, steps: int, game: type[Serving] = Serving) -> None:
    """Play that many games."""
    play(
        game,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_tokens_are_those_of_a_lone_run() -> None:
    """A7, B1, C1, C2, C4, C11: company, preemption, hits, forks, parcels, drafts change nothing."""
    machine(40, 20)


@pytest.mark.long
def test_tokens_are_those_of_a_lone_run_at_length() -> None:
    """C15: the same, 2,000 games."""
    machine(2000, 30)
