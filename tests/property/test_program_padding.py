"""A step that is padded to the shape of a program computes what it computes at its own size.

Nothing is compiled here: the plain steps run at the shapes that programs are made for, in engines
that are asked for anything, beside the same engines without such shapes.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.ladder import Ladder, ladder
from dsv4.batch import Batch, shape_of
from dsv4.config import Config
from dsv4.state import PoolSizes
from dsv4.tree import paths
from registry import programs
from runtime.drafts import RULES, Drafts
from runtime.engine import Engine
from runtime.pages import fit, kept_tokens, reach, window_width
from runtime.request import Limits, Request, Sampling
from tests import fake_model, real_model
from tests.fake_model import Model
from tests.property.test_serving import CONFIGS, MODELS, SAMPLINGS, Serving, machine

BOUND = 1e-10  # float64: other sizes of matrix products round otherwise


def at_program_sizes(made, asked: programs.Room) -> tuple[Model, list[Ladder]]:
    """The plain steps, at shapes of the ladders and at no others."""
    backbone, module = ladder(asked), programs._draft_ladder(asked)
    shapes = [{b.shape for b in steps.buckets} for steps in (backbone, module)]

    def checked(step, known):
        def run(*args):
            assert isinstance(args[-1], Batch)
            assert shape_of(args[-1]) in known
            return step(*args)

        return run

    drafts = made.draft is not None and asked.rows > 1
    model = Model(
        cfg=made.cfg,
        params=made.params,
        step=checked(made.step, shapes[0]),
        draft=checked(made.draft, shapes[1]) if drafts else made.draft,
        fit=lambda need: backbone.pick(need).shape,
        fit_draft=(lambda need: module.pick(need).shape) if drafts else None,
    )
    return model, [backbone, module]


class Padded(Serving):
    """The games of `test_serving`, with every step at the size of a program."""

    def opened(self) -> Engine:
        """Programs for just this engine."""
        asked = programs.room(
            CONFIGS[self.index],
            self.sizes,
            chunk=self.made["chunk"],
            budget=self.made["budget"],
            block=4,
        )
        model, _ = at_program_sizes(MODELS[self.index], asked)
        return Engine(model, self.sizes, **self.made)


def test_tokens_are_those_of_a_lone_run_at_its_own_sizes() -> None:
    """Company, preemption, hits, forks, parcels, drafts of any depth: as without programs."""
    machine(10, 15, Padded)


@pytest.mark.long
def test_tokens_are_those_of_a_lone_run_at_its_own_sizes_at_length() -> None:
    """The same, 1,000 games."""
    machine(1000, 30, Padded)


# In step with an engine without programs: all pools, after every step.


@st.composite
def wishes(draw, cfg: Config) -> list[Request]:
    """Prompts of one token, of pages, of chunks; greedy and sampled."""
    lengths = draw(st.lists(st.sampled_from((1, 3, 7, 8, 9, 16, 25, 40)), min_size=1, max_size=5))
    return [
        Request(
            prompt=real_model.prompt(n, seed=n, cfg=cfg),
            sampling=SAMPLINGS[(i + n) % len(SAMPLINGS)],
            limits=Limits(max_new_tokens=draw(st.sampled_from((1, 6, 17)))),
        )
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=8)
@given(
    depth=st.integers(0, 3),
    chunk=st.sampled_from((1, 5, 8, 24)),
    block=st.sampled_from((1, 4, 16)),
    tight=st.booleans(),
    data=st.data(),
)
def test_pools_are_those_of_steps_at_their_own_sizes(
    rule: str, depth: int, chunk: int, block: int, tight: bool, data: st.DataObject
) -> None:
    """Every row of every pool, the padding's included, in every step; pools too small for all."""
    plain = real_model.real()
    cfg = plain.cfg
    asked = data.draw(wishes(cfg))
    lengths = [r.longest(cfg) for r in asked]
    sizes = fit(cfg, lengths, most=chunk, page_tokens=cfg.page_tokens, drafts=depth)
    if tight:
        least = fit(cfg, [max(lengths)], most=chunk, page_tokens=cfg.page_tokens, drafts=depth)
        width = window_width(kept_tokens(cfg), cfg.page_tokens, reach(chunk, depth))
        sizes = dataclasses.replace(
            least, slots=sizes.slots, window_pages=max(least.window_pages, width + 1) + 1
        )
    room = programs.room(cfg, sizes, chunk=chunk, block=block)
    padded, _ = at_program_sizes(plain, room)
    drafts = Drafts(depth=depth, rule=rule, adaptive=False) if depth else None
    engines = [Engine(m, sizes, chunk=chunk, block=8, drafts=drafts) for m in (plain, padded)]
    copies = [[dataclasses.replace(r) for r in asked] for _ in engines]
    for engine, requests in zip(engines, copies, strict=True):
        for request in requests:
            engine.add(request)
    while not engines[0].idle:
        for engine in engines:
            engine.step()
        want, got = (paths(e.pools) for e in engines)
        for name, pool in want.items():
            scale = max(float(pool.abs().max()), 1.0)
            assert (got[name] - pool).abs().max() <= BOUND * scale, name
    assert engines[1].idle
    for a, b in zip(*copies, strict=True):
        assert b.error is None
        assert a.output == b.output
        assert a.finish == b.finish


# Every engine finds room in the programs that were made for it.


@st.composite
def orders(draw) -> dict:
    """Sizes and options of an engine."""
    depth, slots, chunk = (
        draw(st.integers(0, 8)),
        draw(st.integers(1, 20)),
        draw(st.integers(1, 80)),
    )
    mtp = draw(st.integers(int(depth > 0), 1))
    cfg = tiny_config(draw(st.sampled_from(("w", "wc", "ch", "wch", "h"))), mtp)
    page = cfg.page_tokens * draw(st.integers(1, 3))
    width = window_width(kept_tokens(cfg), page, reach(chunk, depth))
    longest = -(-cfg.max_positions // page)
    least = slots * (1 + depth)
    return {
        "cfg": cfg,
        "sizes": PoolSizes(
            history_pages=1 + longest + draw(st.integers(-longest // 2, 60)),
            window_pages=1 + width + draw(st.integers(0, 60)),
            slots=1 + slots,
            page_tokens=page,
            drafts=depth,
        ),
        "chunk": chunk,
        "budget": draw(st.one_of(st.none(), st.integers(least, least + 200))),
        "block": draw(st.sampled_from((1, 8, 16))),
    }


def tiny_config(kinds: str, mtp: int) -> Config:
    """Small, with ends of sequences at every size."""
    return real_model.tiny.short(kinds, 0, mtp=mtp, eos=(100,), max_positions=150)


@settings(max_examples=40)
@given(order=orders(), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=24))
def test_an_engine_finds_a_program_for_every_step(order: dict, lengths: list[int]) -> None:
    """Construction refuses nothing, and nothing that arises is without a program."""
    cfg, sizes = order.pop("cfg"), order.pop("sizes")
    room = programs.room(cfg, sizes, **order)
    plain = fake_model.counter(cfg, (lambda p: p % 5 > 0) if cfg.mtp else None)
    model, (backbone, _) = at_program_sizes(plain, room)
    drafts = Drafts(depth=sizes.drafts, adaptive=False) if sizes.drafts else None
    engine = Engine(model, sizes, drafts=drafts, **order)
    able = (sizes.history_pages - 1) * sizes.page_tokens
    asked = [
        Request(
            prompt=[i % 90 for i in range(min(n, able - 10))],
            limits=Limits(max_new_tokens=1 + n % 9),
            sampling=Sampling(temperature=n % 2, seed=n),
        )
        for n in lengths
        if able > 11
    ]
    for request in engine.generate(asked):
        assert request.error is None
    assert len(backbone.buckets) <= 60


@given(order=orders(), more=st.integers(0, 3))
def test_engines_of_about_one_size_share_programs(order: dict, more: int) -> None:
    """A few pages or slots more ask for the same programs, unless a rung lies between."""
    cfg, sizes = order.pop("cfg"), order.pop("sizes")
    room = programs.room(cfg, sizes, **order)
    assert room.seqs in {1, 4, 16, 64}
    longest = -(-cfg.max_positions // sizes.page_tokens)
    assert room.history in {8, 64, longest}
    assert room.history >= min(longest, sizes.history_pages - 1)
    slots = min(sizes.slots + more, room.seqs + 1)
    wider = dataclasses.replace(sizes, slots=slots, window_pages=sizes.window_pages + more)
    assert programs.room(cfg, wider, **order) == room


# What is refused.


def engine_with(room_of: dict, **more) -> Engine:
    """An engine over a real model, with programs for sizes of others."""
    made = real_model.real()
    drafts = more.get("drafts")
    sizes = fit(made.cfg, [96] * more.pop("requests", 4), most=24, page_tokens=8,
                drafts=drafts.depth if drafts else 0)  # fmt: skip
    room = programs.room(made.cfg, sizes, chunk=24, block=8)
    model, _ = at_program_sizes(made, dataclasses.replace(room, **room_of))
    return Engine(model, sizes, **({"chunk": 24} | more))


def test_an_engine_fits_its_programs() -> None:
    assert engine_with({}).idle
    assert engine_with({}, drafts=Drafts(depth=2)).idle


@pytest.mark.parametrize(
    ("room_of", "more", "message"),
    [
        ({"seqs": 2}, {}, r"seqs=4.*Room\(seqs=2"),
        ({"tokens": 20}, {}, r"tokens=28.*tokens=20"),
        ({"history": 2}, {}, r"history=16.*history=2"),
        ({"window": 9}, {}, r"window=5.*window=9"),
        ({"rows": 2}, {"drafts": Drafts(depth=2)}, r"wanted=12.*rows=2"),
        ({}, {"budget": 200}, r"tokens=200.*tokens=28"),
        ({}, {"exact": True}, r"programs have shapes of their own.*backend eager"),
    ],
)
def test_programs_too_small_for_an_engine_are_refused(
    room_of: dict, more: dict, message: str
) -> None:
    """At construction, with the sizes in the message."""
    with pytest.raises(ValueError, match=message):
        engine_with(room_of, **more)


def test_programs_for_drafts_are_refused_without() -> None:
    """Their pools have a part that those of this engine would lack."""
    made = real_model.real()
    sizes = fit(made.cfg, [96] * 2, most=24, page_tokens=8, drafts=2)
    model, _ = at_program_sizes(made, programs.room(made.cfg, sizes, chunk=24))
    assert Engine(model, sizes, chunk=24, drafts=Drafts(depth=2)).idle
    with pytest.raises(ValueError, match=r"made for pools with drafts.*sizes with drafts = 0"):
        Engine(model, sizes, chunk=24)


def test_other_chunks_have_other_window_tables() -> None:
    """Columns are page indices modulo the width, so a wider table is no room for a narrower."""
    made = real_model.real()
    sizes = fit(made.cfg, [96] * 2, most=24, page_tokens=8)
    model, _ = at_program_sizes(made, programs.room(made.cfg, sizes, chunk=24))
    with pytest.raises(ValueError, match=r"window=3.*window=5"):
        Engine(model, sizes, chunk=8, budget=20)


def test_padding_never_reads_what_it_stands_in() -> None:
    """Page 0 and slot 0 are never written, so a step pads with zeros whatever ran before."""
    engine = engine_with({})
    for n in (17, 3, 40):
        engine.add(Request(prompt=real_model.prompt(n), limits=Limits(max_new_tokens=9)))
    engine.drain()
    units = paths(engine._cache._spec)
    for name, pool in paths(engine.pools).items():
        assert not torch.any(pool[: units[name].unit]), name
        assert torch.any(pool), name
