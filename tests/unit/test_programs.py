"""Programs are found or made, one per bucket, and never for a batch that was not foreseen.

The backend here keeps a file per program and runs the function as it stands.
"""

import dataclasses
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler import key_parts
from compiler.backend import EAGER, Backend, Compile
from compiler.key import Key
from compiler.ladder import Bucket, Room, ladder
from compiler.program import Program, any_rows, seal
from compiler.programs import Programs
from compiler.store import Store
from dsv4.batch import Shape, blank
from dsv4.config import preset
from dsv4.state import PoolSizes, init_pools, pool_spec
from dsv4.tree import leaves
from registry.build import build
from registry.model import CompiledModel
from registry.programs import _Example, compile_model
from runtime.engine import Engine
from runtime.pages import fit
from runtime.request import Limits, Request
from tests import tiny

CFG = tiny.short("c", 0, sinkhorn=2, mtp=0, max_positions=64, eos=())
ROOM = Room(seqs=2, rows=1, tokens=12, block=4, history=8, window=3, rates=CFG.rates)
PAGE = 8


@dataclasses.dataclass
class Fake:
    """A backend that counts what it is asked for."""

    built: int = 0
    loaded: int = 0
    number: str = "1"
    failing: Exception | None = None

    def build(self, fn: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> Any:
        """A file with the shapes."""
        self.built += 1
        assert not torch.is_grad_enabled()
        assert args[-1].tokens.dtype == torch.int64
        (folder / "deep").mkdir()
        (folder / "deep" / "program").write_text(f"{len(args[-1].tokens)} tokens")
        if self.failing is not None:
            raise self.failing
        return fn

    def load(self, fn: Callable[..., Any], folder: Path) -> Any:
        """The function, if the file is there."""
        self.loaded += 1
        assert (folder / "deep" / "program").read_text().endswith("tokens")
        if self.failing is not None:
            failing, self.failing = self.failing, None
            raise failing
        return fn

    @property
    def backend(self) -> Backend:
        """The plain backend, and this."""
        compile_ = Compile(lambda: self.number, self.build, self.load)
        return dataclasses.replace(EAGER, name="fake", compile=compile_)


def model_of(
    fake: Fake, dtype: torch.dtype = torch.float32, seed: int = 0, **more
) -> CompiledModel:
    cfg = dataclasses.replace(CFG, **more)
    return dataclasses.replace(build(cfg, seed=seed, dtype=dtype), backend=fake.backend)


def start(
    fake: Fake, root: Path, model: CompiledModel | None = None, **more
) -> tuple[CompiledModel, list[Program], Store]:
    """A start: the model, its programs as they became ready, and the store."""
    store, told = Store(root), list[Program]()
    asked: dict = {"page_tokens": PAGE} | more
    room = asked.pop("room", ROOM)

    def tell(program: Program, total: int) -> None:
        told.append(program)
        assert len(told) <= total

    made = compile_model(model or model_of(fake), room, store, told=tell, **asked)
    return made, told, store


BUCKETS = len(ladder(ROOM).buckets)


def test_cold_and_warm(tmp_path: Path) -> None:
    """The second start makes nothing and finds everything."""
    fake = Fake()
    model, told, store = start(fake, tmp_path)
    assert (fake.built, fake.loaded) == (BUCKETS, 0)
    assert [p.label for p in told] == [f"step {b}" for b in ladder(ROOM).buckets]
    assert not any(p.found for p in told)
    assert str(store.counts) == f"{BUCKETS} graphs, 0 hits"
    assert model.why[-1] == f"{BUCKETS} programs of fake in {tmp_path}"
    assert model.draft is None
    assert model.fit_draft is None
    _, told, store = start(fake, tmp_path)
    assert (fake.built, fake.loaded) == (BUCKETS, BUCKETS)
    assert all(p.found and p.note is None and p.ready_s >= 0 for p in told)
    assert str(store.counts) == f"{BUCKETS} graphs, {BUCKETS} hits"


def test_a_backend_without_programs_keeps_its_steps(tmp_path: Path) -> None:
    model = build(CFG, seed=0)
    assert compile_model(model, ROOM, Store(tmp_path), page_tokens=PAGE) is model
    assert list(tmp_path.iterdir()) == []


def _another_version(fake: Fake, _: pytest.MonkeyPatch) -> dict:
    fake.number = "2"
    return {}


def _other_code(_: Fake, patch: pytest.MonkeyPatch) -> dict:
    patch.setattr(key_parts, "source_digest", lambda _: "0" * 64)
    return {}


def _other_threads(_: Fake, patch: pytest.MonkeyPatch) -> dict:
    patch.setattr(torch, "get_num_threads", lambda: 7)
    return {}


def _model(dtype: torch.dtype = torch.float32, **more):
    return lambda fake, _: {"model": model_of(fake, dtype, **more)}


def _qat(fake: Fake, _: pytest.MonkeyPatch) -> dict:
    model = model_of(fake)
    return {"model": dataclasses.replace(model, ctx=dataclasses.replace(model.ctx, qat=True))}


def _strides(fake: Fake, _: pytest.MonkeyPatch) -> dict:
    model = model_of(fake)
    turned = model.params.head.t().contiguous().t()
    return {
        "model": dataclasses.replace(
            model, params=dataclasses.replace(model.params, head=turned)
        )
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_another_version, id="backend"),
        pytest.param(_other_code, id="code"),
        pytest.param(_other_threads, id="threads"),
        pytest.param(_model(torch.bfloat16), id="dtype"),
        pytest.param(_model(window=4), id="config"),
        pytest.param(_model(hash_layers=(True,)), id="layers"),
        pytest.param(_qat, id="qat"),
        pytest.param(_strides, id="strides"),
        pytest.param(lambda *_: {"page_tokens": 16}, id="pages"),
        pytest.param(
            lambda *_: {"room": dataclasses.replace(ROOM, window=4)}, id="window table"
        ),
    ],
)  # fmt: skip
def test_what_changes_a_program_makes_new_ones(
    change: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the old ones stay, for a start as before."""
    fake = Fake()
    start(fake, tmp_path)
    with monkeypatch.context() as patch:
        more = change(fake, patch)
        _, told, _ = start(fake, tmp_path, more.pop("model", None), **more)
    assert not any(p.found for p in told)
    assert fake.built == 2 * BUCKETS
    fake.number = "1"
    _, told, _ = start(fake, tmp_path)
    assert all(p.found for p in told)


def test_weights_and_sizes_of_pools_do_not(tmp_path: Path) -> None:
    """One program serves all fine-tunes of a model, and pools of any size."""
    fake = Fake()
    start(fake, tmp_path)
    model, told, _ = start(fake, tmp_path, model_of(fake, seed=5))
    assert all(p.found for p in told)
    for tokens in (24, 64):
        sizes = fit(model.cfg, [tokens] * 2, most=8, page_tokens=PAGE)
        assert Engine(model, sizes, chunk=8).idle


def test_a_damaged_program_is_made_again(tmp_path: Path) -> None:
    """One of them, and its line says why."""
    fake = Fake()
    start(fake, tmp_path)
    victim = sorted(tmp_path.rglob("program"))[0]
    victim.write_text("9" + victim.read_text()[1:])
    _, told, store = start(fake, tmp_path)
    (made,) = (p for p in told if not p.found)
    assert re.search(r"deep/program", made.note or "")
    assert str(store.counts) == f"{BUCKETS} graphs, {BUCKETS - 1} hits"
    assert all(p.found for p in start(fake, tmp_path)[1])


def test_a_program_that_cannot_be_loaded_is_made_again(tmp_path: Path) -> None:
    """Whole, and yet of no use: by a disk that lies or a compiler that cannot read its own."""
    fake = Fake()
    start(fake, tmp_path)
    fake.failing = RuntimeError("not mine")
    _, told, _ = start(fake, tmp_path)
    assert [p.found for p in told] == [False] + [True] * (BUCKETS - 1)


def test_a_step_that_cannot_be_compiled_fails_the_start(tmp_path: Path) -> None:
    """As the backend raised it, and nothing is kept."""
    fake = Fake(failing=NotImplementedError("no such operator"))
    with pytest.raises(NotImplementedError, match="no such operator"):
        start(fake, tmp_path)
    assert fake.built == 1
    assert not list(tmp_path.rglob("program"))


def test_a_store_that_cannot_keep_still_gives_programs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    fake = Fake()
    _, told, store = start(fake, blocked)
    assert len(told) == BUCKETS
    assert store.off is not None
    assert str(store.counts) == f"{BUCKETS} graphs, 0 hits, {BUCKETS} not kept"
    assert "every start compiles them" in caplog.text


# Drafts.


def test_drafts_have_programs_of_their_own(tmp_path: Path) -> None:
    """With a row more of each sequence, and no closings."""
    fake = Fake()
    room = dataclasses.replace(ROOM, rows=3, window=4)
    model, told, _ = start(fake, tmp_path, model_of(fake, mtp=1), room=room)
    assert isinstance(model.draft, Programs)
    shapes = [b.shape for b in model.draft.ladder.buckets]
    assert [p.label.split()[0] for p in told].count("draft") == len(shapes)
    assert {s.closes for s in shapes} == {()}
    assert {s.tokens for s in shapes} == {1, 2, 4, 8, 14}
    assert model.fit_draft == model.draft.fit
    # Without drafts the draft module of the parameters is not compiled.
    model, told, _ = start(fake, tmp_path, model_of(fake, mtp=1))
    assert {p.label.split()[0] for p in told} == {"step"}
    assert model.draft is None


def test_drafts_without_a_module_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no draft module"):
        start(Fake(), tmp_path, room=dataclasses.replace(ROOM, rows=2))
    assert list(tmp_path.iterdir()) == []


# Which program a batch goes to.


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> CompiledModel:
    return start(Fake(), tmp_path_factory.mktemp("store"))[0]


def test_every_bucket_runs(programs: CompiledModel) -> None:
    sizes = PoolSizes(history_pages=9, window_pages=9, slots=3, page_tokens=PAGE)
    pools = init_pools(CFG, sizes, torch.float32)
    for bucket in ladder(ROOM).buckets:
        out, pools = programs.step(programs.params, pools, blank(bucket.shape))
        assert out.logits.shape == (bucket.shape.wanted, CFG.vocab)


def _odd() -> Shape:
    return dataclasses.replace(ladder(ROOM).buckets[-1].shape, tokens=13)


def test_strict_programs_refuse_another_shape(programs: CompiledModel) -> None:
    """K1: nothing is compiled after the start."""
    step = programs.step
    assert isinstance(step, Programs)
    with pytest.raises(ValueError, match=r"no program was made for Shape\(tokens=13.*strict=False"):
        step(programs.params, None, blank(_odd()))
    assert step.late == 0
    assert step.strict


def test_others_compile_late_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once per shape, counted, and kept for the next start."""
    fake = Fake()
    model, _, _ = start(fake, tmp_path, strict=False)
    step = model.step
    assert isinstance(step, Programs)
    pools = init_pools(
        CFG, PoolSizes(history_pages=9, window_pages=9, slots=3, page_tokens=PAGE), torch.float32
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            step(model.params, pools, blank(_odd()))
    assert step.late == 1
    assert fake.built == BUCKETS + 1
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("compiling while serving: no program was made for Shape(tokens=13")
    again, _, _ = start(fake, tmp_path, strict=False)
    again.step(model.params, pools, blank(_odd()))
    assert fake.built == BUCKETS + 1


def test_a_served_model_never_needs_another(tmp_path: Path) -> None:
    fake = Fake()
    model, _, _ = start(fake, tmp_path)
    sizes = fit(CFG, [60, 30], most=8, page_tokens=PAGE)
    engine = Engine(model, sizes, chunk=8, budget=10)
    asked = [
        Request(prompt=[(7 * n + i) % 160 for i in range(n)], limits=Limits(max_new_tokens=9))
        for n in (1, 5, 12, 30, 8)
    ]
    plain = Engine(build(CFG, seed=0, dtype=torch.float32), sizes, chunk=8, budget=10)
    want = plain.generate([dataclasses.replace(r) for r in asked])
    assert [r.output for r in engine.generate(asked)] == [r.output for r in want]
    assert isinstance(model.step, Programs)
    assert model.step.late == 0
    assert fake.built == BUCKETS


# One program.


def program(run: Callable[..., Any]) -> Program:
    return Program("step decode", run, True, 0.0, None)


def test_other_arguments_are_an_error_of_the_caller() -> None:
    def run(*_: object) -> None:
        raise RuntimeError("GuardManager check failed, reason: tensor 'pools' dtype mismatch")

    with pytest.raises(
        ValueError, match=r"step decode was made for other arguments.*'pools' dtype"
    ):
        program(run)(1)


def test_other_failures_stay_what_they_are() -> None:
    def run(*_: object) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        program(run)(1)


def test_seal_needs_a_backend_that_compiles(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="backend eager does not compile"):
        seal(lambda: None, (), EAGER, Key.of({"step": "x", "bucket": "y"}), Store(tmp_path))


@pytest.mark.parametrize("name", ["flash", "pro", "tiny", "c", "wch", "hc"])
@pytest.mark.parametrize("depth", range(9))
def test_pools_of_one_example_stand_for_all(name: str, depth: int) -> None:
    """Numbers of rows that are equal in the example are equal in every engine."""
    cfg = preset(name) if name in ("flash", "pro", "tiny") else tiny.short(name, hca_rate=6)
    cfg = cfg if depth else dataclasses.replace(cfg, mtp=0)

    class Model:  # what `_pools` looks at
        params = type("P", (), {"embed": torch.empty(1, device="meta")})

    for page in range(cfg.page_tokens, 8 * cfg.page_tokens + 1, cfg.page_tokens):
        example = _Example(Model, cfg, depth, page, None, {})  # pyright: ignore[reportArgumentType]
        pools = example._pools()
        sizes = PoolSizes(history_pages=2, window_pages=2, slots=2, page_tokens=page, drafts=depth)
        ways: dict[int, set] = {}
        for pool, leaf in zip(leaves(pools), leaves(pool_spec(cfg, sizes)), strict=True):
            ways.setdefault(pool.shape[0], set()).add((leaf.group, leaf.unit))
        assert all(len(found) == 1 for found in ways.values()), (page, ways)
        assert min(ways) > 1  # 0 and 1 are never left open


def test_rows_of_pools_are_left_open() -> None:
    sizes = PoolSizes(history_pages=5, window_pages=7, slots=3, page_tokens=PAGE)
    pools = any_rows(init_pools(CFG, sizes, torch.float32))
    for leaf in leaves(pools):
        assert leaf._dynamo_dynamic_indices == {0}


def test_labels() -> None:
    shape = dataclasses.replace(ladder(ROOM).buckets[0].shape, closes=())
    assert str(Bucket("late", shape)) == "late 1 tokens, 1 sequences, 8 pages, closes none"
