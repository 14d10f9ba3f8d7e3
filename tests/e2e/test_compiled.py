"""From a checkpoint to compiled steps: once cold, then found by every start after it.

One model of one layer, in float32, is compiled by the command line for two prompts: three programs.
All tests here use these, so that nothing is compiled twice.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from compiler.programs import Programs
from compiler.store import Store
from dsv4 import config_json, model
from dsv4.batch import Batch, blank, shape_of
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools, PoolSizes, init_pools
from dsv4.tree import leaves, paths, tmap
from registry import cli
from registry.build import build
from registry.model import CompiledModel
from registry.programs import compile_model, room
from runtime.engine import Engine
from runtime.pages import fit
from runtime.request import Limits, Request, Sampling
from runtime.save import save
from tests import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.compiled]

ROOT = Path(__file__).resolve().parents[2]
CFG = tiny.short("c", 0, sinkhorn=2, mtp=0, max_positions=256, bos=0, eos=(1,))
CHUNK = 8
PROMPTS = ("5,6,7,8,9", ",".join(str(i % 150) for i in range(2, 72)))
CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"


@dataclasses.dataclass(frozen=True)
class Cold:
    """The first start, and where it was."""

    folder: Path  # the checkpoint
    root: Path  # the store
    users: Path  # the user's own cache of inductor
    out: str
    err: str


def words(folder: Path, root: Path, backend: str = "inductor") -> list[str]:
    """A command line for two prompts."""
    given: dict[str, object] = {
        "--model": folder,
        "--backend": backend,
        "--cache-dir": root,
        "--dtype": "float32",
        "--chunk": CHUNK,
        "--max-new-tokens": 6,
    }
    told = [str(word) for pair in given.items() for word in pair]
    return ["generate", *told, "--ignore-eos", "--token-ids", *PROMPTS]


def run(*given: str) -> tuple[int, str, str]:
    """The command line: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(given))
    return code, out.getvalue(), err.getvalue()


def compiles() -> dict[str, dict[str, int]]:
    """All that dynamo, AOT and inductor count, but calls out of kernels: loading counts them."""
    counted = {name: dict(c) for name, c in counters.items()}
    counted.get("inductor", {}).pop("extern_calls", None)
    return {name: c for name, c in counted.items() if c}


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Cold:
    """The one start that compiles."""
    folder, root, users = (tmp_path_factory.mktemp(n) for n in ("model", "store", "users"))
    save(tiny.params(CFG), CFG, folder)
    (folder / "config.json").write_text(json.dumps(config_json.write(CFG)))
    before = compiles()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_DIR, str(users))
        code, out, err = run(*words(folder, root))
        assert os.environ[CACHE_DIR] == str(users)
    assert code == 0, err
    assert compiles() != before, "what counts compiles counts nothing"
    return Cold(folder, root, users, out, err)


@pytest.fixture(scope="module")
def warm(cold: Cold) -> CompiledModel:
    """A start in the same process that finds all programs."""
    store = Store(cold.root)
    made = build(
        cold.folder, backend="inductor", dtype=torch.float32, drafts=False, cache_dir=cold.root
    )
    sizes = fit(CFG, [100] * 3, most=CHUNK)
    asked = room(made.cfg, sizes, chunk=CHUNK)
    made = compile_model(made, asked, store, page_tokens=sizes.page_tokens)
    assert str(store.counts) == "3 graphs, 3 hits"
    return made


def programs(made: CompiledModel) -> Programs:
    """Of its steps."""
    assert isinstance(made.step, Programs)
    return made.step


# Starts.

LINE = r"graphs \[(#* *)\] +(\d) / 3  (found|compiled) in (\d+\.\d\d) s: step (\S+) (.*)"


def told(err: str) -> list[tuple[str, ...]]:
    """The lines of programs."""
    return re.findall(LINE, err)


def timeline(err: str) -> dict[str, float]:
    """The table of seconds."""
    rows = re.findall(r"^(\w+) +(\d+\.\d\d) s +(\d+\.\d) %$", err, re.MULTILINE)
    assert abs(sum(float(share) for _, _, share in rows[:-1]) - 100) <= 0.1 * len(rows)
    assert float(rows[-1][2]) == 100
    return {name: float(s) for name, s, _ in rows}


def check_timeline(err: str) -> dict[str, float]:
    """K5: its parts add up to the whole."""
    parts = timeline(err)
    ready_s = parts["ready"]
    assert list(parts) == ["imports", "registry", "weights", "graphs", "pools", "other", "ready"]
    assert sum(parts.values()) - ready_s == pytest.approx(ready_s, abs=0.005 * len(parts))
    return parts


def test_a_cold_start_tells_what_it_compiles(cold: Cold) -> None:
    """A line per program, the counts, and where the time went."""
    lines = told(cold.err)
    assert [(line[1], line[2]) for line in lines] == [(str(i), "compiled") for i in (1, 2, 3)]
    assert [len(line[0].strip()) for line in lines] == [10, 20, 30]
    assert [line[5] for line in lines] == [
        "1 tokens, 1 sequences, 4 pages, closes 1",
        "4 tokens, 4 sequences, 4 pages, closes 4",
        "12 tokens, 4 sequences, 4 pages, closes 7",
    ]
    assert "\n3 graphs, 0 hits\n" in cold.err
    parts = check_timeline(cold.err)
    assert sum(float(line[3]) for line in lines) <= parts["graphs"] + 0.02
    assert parts["graphs"] > 0.5 * parts["ready"]


def test_a_second_start_finds_everything(cold: Cold) -> None:
    """ "N graphs, N hits", the same text, and nothing was compiled."""
    before = compiles()
    code, out, err = run(*words(cold.folder, cold.root))
    assert (code, out) == (0, cold.out)
    assert [line[2] for line in told(err)] == ["found"] * 3
    assert "\n3 graphs, 3 hits\n" in err  # none added to, all kept
    check_timeline(err)
    assert compiles() == before


def test_json_stays_pure(cold: Cold) -> None:
    code, out, err = run(*words(cold.folder, cold.root), "--json")
    assert (code, err) == (0, "")
    outputs = json.loads(out)["outputs"]
    assert [" ".join(map(str, o["token_ids"])) in cold.out for o in outputs] == [True, True]


@pytest.mark.parametrize("backend", ["eager", "kernels"])
def test_backends_give_the_same_tokens(backend: str, cold: Cold, tmp_path: Path) -> None:
    """Without programs: no line about them, and nothing is written."""
    code, out, err = run(*words(cold.folder, tmp_path, backend))
    assert (code, out) == (0, cold.out)
    assert "graphs" not in err
    assert not [f for f in tmp_path.iterdir() if f.name != "kernels"]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("torchair", "backend torchair cannot run here: torch_npu"),
        ("fast", "backend 'fast' is unknown; use one of auto, eager, kernels, inductor, torchair"),
    ],
)
def test_one_clear_line(backend: str, message: str, cold: Cold, tmp_path: Path) -> None:
    code, out, err = run(*words(cold.folder, tmp_path, backend))
    assert (code, out) == (2, "")
    assert err.startswith(f"dsv4: error: {message}")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_k3_the_users_cache_is_left_alone(
    cold: Cold, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """K3: nothing was written there, and the variable is as before, set or not."""
    assert list(cold.users.iterdir()) == []
    for value in (None, str(tmp_path)):
        monkeypatch.delenv(CACHE_DIR, raising=False)
        if value is not None:
            monkeypatch.setenv(CACHE_DIR, value)
        assert run(*words(cold.folder, cold.root))[0] == 0
        assert os.environ.get(CACHE_DIR) == value
        assert list(tmp_path.iterdir()) == []


FRESH = """
import sys, torch
torch.set_num_threads(1)
from registry import cli
from tests.e2e.test_compiled import compiles
code = cli.main(sys.argv[1:])
print("compiles", compiles(), file=sys.stderr)
raise SystemExit(code)
"""


def test_another_process_finds_everything(cold: Cold) -> None:
    """Nothing of the first process is needed but its files."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FRESH, *words(cold.folder, cold.root)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == cold.out
    assert "\n3 graphs, 3 hits\n" in done.stderr
    assert done.stderr.endswith("compiles {}\n")


# What programs compute.


def against_plain(made: CompiledModel, params: Params, seen: Counter) -> CompiledModel:
    """Its steps, each compared with the plain one over the same pools, which stay where they are.

    `params` are those of the plain step. `seen` counts steps by shape.
    """
    ctx = Ctx(made.cfg)

    def step(ours: Params, pools: Pools, batch: Batch):
        want, kept = model.step(params, tmap(torch.clone, pools), batch, ctx)
        places = [x.data_ptr() for x in leaves(pools)]
        out, after = made.step(ours, pools, batch)
        assert [x.data_ptr() for x in leaves(after)] == places, "pools moved"
        assert_close(out, want)
        assert_close(after, kept)
        seen[shape_of(batch)] += 1
        return out, after

    return dataclasses.replace(made, step=step)


def assert_close(got: object, want: object) -> None:
    """Within 1e-5 of the largest number of each tensor."""
    theirs = paths(want)
    for name, x in paths(got).items():
        y = theirs[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        off = (x.double() - y.double()).abs().max()
        assert off <= 1e-5 * y.double().abs().max(), (name, float(off))


@pytest.fixture(scope="module")
def plain(cold: Cold) -> Params:
    """The parameters as they are in the checkpoint."""
    return build(cold.folder, dtype=torch.float32, drafts=False).params


def requests() -> list[Request]:
    """Prompts of one token, of chunks, over page ends (64); greedy and sampled."""
    return [
        Request(
            prompt=tiny.tokens(CFG, 1, n, seed=n)[0].tolist(),
            sampling=Sampling(temperature=i % 2, seed=n),
            limits=Limits(max_new_tokens=9, ignore_eos=True),
            logprobs=1,
        )
        for i, n in enumerate((1, 5, 12, 60, 130, 8, 63))
    ]


def test_serving_compiles_nothing_and_computes_what_eager_does(
    warm: CompiledModel, plain: Params
) -> None:
    """K1, and every bucket: many requests, four at a time, against the plain step each time."""
    seen = Counter()
    made = against_plain(warm, plain, seen)
    engine = Engine(made, fit(CFG, [140] * 4, most=CHUNK), chunk=CHUNK, budget=12)
    before = compiles()
    for request in engine.generate(requests()):
        assert len(request.output) == 9
    engine.add(requests()[0])
    engine.drain()  # one sequence alone
    assert compiles() == before
    steps = programs(warm)
    assert steps.late == 0
    assert set(seen) == {b.shape for b in steps.ladder.buckets}
    assert min(seen.values()) >= 5


def test_splits_of_the_same_tokens_agree(warm: CompiledModel, plain: Params) -> None:
    """12 tokens of one prompt, 2 x 6, 4 x 3, 12 x 1: the same tokens and nearly the same logits."""
    outputs, scores = [], []
    for chunk in (12, 6, 3, 1):
        made = against_plain(warm, plain, Counter())
        engine = Engine(made, fit(CFG, [24] * 4, most=12), chunk=chunk, budget=12)
        asked = [
            Request(
                prompt=tiny.tokens(CFG, 1, 12, seed=i)[0].tolist(),
                limits=Limits(max_new_tokens=4, ignore_eos=True),
                logprobs=0,
            )
            for i in range(4)
        ]
        engine.generate(asked)
        outputs.append([r.output for r in asked])
        scores.append(torch.tensor([[s.token for s in r.scores] for r in asked]))
    assert all(o == outputs[0] for o in outputs)
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], rtol=0, atol=1e-4)


def pools_of(pages: int, dtype: torch.dtype = torch.float32, page_tokens: int = 64) -> Pools:
    """Zeroed pools with so many pages of both groups."""
    sizes = PoolSizes(
        history_pages=pages, window_pages=pages, slots=6, page_tokens=page_tokens
    )  # fmt: skip
    return init_pools(CFG, sizes, dtype)


def allocated_bytes(made: CompiledModel, pools: Pools, batch: Batch) -> int:
    """All that one step allocates."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    with torch.no_grad(), profile(activities=kinds, profile_memory=True) as seen:
        made.step(made.params, pools, batch)
    return sum(max(e.cpu_memory_usage, 0) for e in seen.events() or ())


def test_a_write_costs_its_rows_and_not_the_pool(warm: CompiledModel) -> None:
    """A step over pools of 100 times the pages allocates as many bytes, far fewer than a pool."""
    for bucket in programs(warm).ladder.buckets:
        batch = blank(bucket.shape)
        _, small, large = (allocated_bytes(warm, pools_of(n), batch) for n in (40, 40, 4000))
        assert 0 < small == large  # the first also makes what kernels work in
        assert large < pools_of(4000).layers[0].window.nbytes / 20


def _other_pools() -> Iterator[tuple[str, Pools, str]]:
    yield "dtype", pools_of(9, torch.bfloat16), "expected Float, actual BFloat16"
    yield "page size", pools_of(9, page_tokens=128), "['pools'].page_tokens == 64"
    narrow = pools_of(9)
    layer = dataclasses.replace(narrow.layers[0], window=narrow.layers[0].window[:, :-8])
    yield (
        "width",
        dataclasses.replace(narrow, layers=(layer,)),
        "window' size mismatch at index 1. expected 80",
    )
    yield "layers", dataclasses.replace(pools_of(9), layers=()), "len(L['pools'].layers) == 1"


@pytest.mark.parametrize("case", list(_other_pools()), ids=lambda case: case[0])
def test_other_arguments_are_refused(case: tuple[str, Pools, str], warm: CompiledModel) -> None:
    """By name, before anything is written; nothing is compiled for them."""
    _, pools, name = case
    kept, before = tmap(torch.clone, pools), compiles()
    shape = programs(warm).ladder.buckets[0].shape
    message = "was made for other arguments; it is not compiled again"
    with torch.no_grad(), pytest.raises(ValueError, match=message) as no:
        warm.step(warm.params, pools, blank(shape))
    assert name in str(no.value)
    assert str(no.value).startswith("program step decode 1 tokens")
    for x, y in zip(leaves(pools), leaves(kept), strict=True):
        assert torch.equal(x, y)
    assert compiles() == before


def test_a_batch_without_a_program_is_refused(warm: CompiledModel) -> None:
    """K1: a strict model compiles nothing after its start, whatever it is asked."""
    before = compiles()
    odd = dataclasses.replace(programs(warm).ladder.buckets[0].shape, tokens=3)
    with pytest.raises(ValueError, match=r"no program was made for Shape\(tokens=3"):
        warm.step(warm.params, pools_of(4), blank(odd))
    assert compiles() == before
