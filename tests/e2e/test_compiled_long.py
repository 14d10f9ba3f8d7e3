"""Compiled steps at length: processes that are killed and that race, damage, drafts, the preset.

The short form, and what a program must compute, is in `test_compiled.py`.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from compiler.programs import Programs
from compiler.store import Store
from dsv4 import config_json, model, mtp
from dsv4.batch import blank
from dsv4.config import Config, preset
from dsv4.context import Ctx
from dsv4.state import PoolSizes, init_pools
from dsv4.tree import tmap
from registry.build import build
from registry.model import CompiledModel
from registry.programs import compile_model, room
from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.pages import fit
from runtime.request import Limits, Request, Sampling
from runtime.save import save
from tests import tiny
from tests.e2e.test_compiled import compiles

pytestmark = [pytest.mark.e2e, pytest.mark.compiled, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
CFG = tiny.short("w", 0, sinkhorn=2, mtp=0, max_positions=64, bos=0, eos=(1,))


# Processes.


def command(folder: Path, root: Path, *more: str) -> list[str]:
    """One prompt: two programs."""
    main = "import sys, torch; torch.set_num_threads(1); from registry import cli; "
    main += "raise SystemExit(cli.main(sys.argv[1:]))"
    return [
        sys.executable, "-c", main, "generate", "--model", str(folder), "--backend", "inductor",
        "--cache-dir", str(root), "--dtype", "float32", "--chunk", "8", "--max-new-tokens", "5",
        "--ignore-eos", "--token-ids", "5,6,7,8,9,10,11,12,13,14", *more,
    ]  # fmt: skip


def begin(folder: Path, root: Path, *more: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = command(folder, root, *more)
    return subprocess.Popen(words, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


def end(process: "subprocess.Popen[str]") -> tuple[str, list[str], str]:
    """What it wrote, how it came by each program, and all it told."""
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out, re.findall(r" / 2  (found|compiled) in", err), err


def test_killed_raced_damaged_and_changed(tmp_path: Path) -> None:
    """One store through a day: whoever starts, the text is the same and no program is lost."""
    folder, root = tmp_path / "model", tmp_path / "store"
    save(tiny.params(CFG), CFG, folder)
    (folder / "config.json").write_text(json.dumps(config_json.write(CFG)))

    # Killed with the first program made and the second begun.
    first = begin(folder, root)
    assert first.stderr is not None
    for line in first.stderr:
        if " 1 / 2 " in line:
            break
    else:
        pytest.fail("no program was made")
    first.send_signal(signal.SIGKILL)
    assert first.wait(60) == -signal.SIGKILL
    first.communicate()

    # Two at once: each program is there or is made by one of them alone.
    both = [begin(folder, root) for _ in range(2)]
    (want, hows, err), (other, more, told) = (end(p) for p in both)
    assert want == other
    assert (hows[0], more[0]) == ("found", "found")
    assert sorted((hows[1], more[1])) == ["compiled", "found"]
    made = err if hows[1] == "compiled" else told
    # The dead one had begun it, unless it died before that.
    note = re.findall(r"compiled in [^\n]*?(\([^\n]*\))?$", made, re.MULTILINE)
    assert note in ([""], ["(unfinished: no manifest.sha256, as if who built it was killed)"])

    # One byte of machine code.
    victim = sorted(root.rglob("files/kernels/**/*.so"))[0]
    code = bytearray(victim.read_bytes())
    code[len(code) // 2] ^= 1
    victim.write_bytes(bytes(code))
    out, hows, err = end(begin(folder, root))
    assert out == want
    assert sorted(hows) == ["compiled", "found"]
    assert victim.name in err

    # Another dtype has programs of its own, and takes none away.
    assert end(begin(folder, root, "--dtype", "bfloat16"))[1] == ["compiled", "compiled"]
    out, hows, err = end(begin(folder, root))
    assert (out, hows) == (want, ["found", "found"])
    assert "\n2 graphs, 2 hits\n" in err


def test_a_shape_that_nobody_foresaw(tmp_path: Path) -> None:
    """Without strict it is compiled once, counted, kept, and computes what eager does."""
    plain = build(CFG, seed=0, dtype=torch.float32)
    made = build(CFG, seed=0, dtype=torch.float32, backend="inductor", cache_dir=tmp_path)
    sizes = fit(CFG, [24], most=8)
    asked = room(CFG, sizes, chunk=8)

    def start() -> CompiledModel:
        return compile_model(
            made, asked, Store(tmp_path), page_tokens=sizes.page_tokens, strict=False
        )

    for seen in (1, 2):
        model_ = start()
        step = model_.step
        assert isinstance(step, Programs)
        shape = dataclasses.replace(step.ladder.buckets[-1].shape, tokens=10, wanted=3)
        pools = init_pools(CFG, sizes, torch.float32)
        with torch.no_grad():
            got, _ = step(model_.params, tmap(torch.clone, pools), blank(shape))
            before = compiles()
            step(model_.params, tmap(torch.clone, pools), blank(shape))
            assert compiles() == before
            want, _ = plain.step(plain.params, pools, blank(shape))
        assert step.late == 1, seen
        off = (got.logits - want.logits).abs().max()
        assert off <= 1e-5 * want.logits.abs().max()


# Drafts, bfloat16, and the preset.


@dataclasses.dataclass
class Seen:
    """How far programs were from float64, next to how far the plain steps were."""

    steps: Counter
    ours: list[float]
    plain: list[float]


def beside_float64(made: CompiledModel, cfg: Config) -> tuple[CompiledModel, Seen]:
    """Its steps and drafts, measured against float64 from the same pools in every call."""
    values = build(cfg, seed=0, dtype=made.params.embed.dtype).params
    exact = tiny.cast(values, torch.float64)
    seen, ctx = Seen(Counter(), [], []), Ctx(cfg)

    def against(name: str, plain, run):
        def step(ours, pools, *rest):
            wide = tmap(lambda x: x.double() if x.is_floating_point() else x, (pools, *rest))
            best, _ = plain(exact, *wide, ctx)
            other, _ = plain(values, tmap(torch.clone, pools), *rest, ctx)
            out, after = run(ours, pools, *rest)
            scale = best.logits.abs().max()
            for told, x in ((seen.ours, out), (seen.plain, other)):
                told.append(float((x.logits.double() - best.logits).norm() / scale))
            seen.steps[name] += 1
            return out, after

        return step

    return dataclasses.replace(
        made,
        step=against("step", model.step, made.step),
        draft=None if made.draft is None else against("draft", mtp.draft, made.draft),
    ), seen


def serve(made: CompiledModel, sizes: PoolSizes, chunk: int, depth: int) -> list[Request]:
    """A few requests, one after the other and together."""
    drafts = Drafts(depth=depth, adaptive=False) if depth else None
    engine = Engine(made, sizes, chunk=chunk, drafts=drafts)
    asked = [
        Request(
            prompt=tiny.tokens(made.cfg, 1, n, seed=n)[0].tolist(),
            sampling=Sampling(temperature=i % 2, seed=i),
            limits=Limits(max_new_tokens=12, ignore_eos=True),
        )
        for i, n in enumerate((1, 9, 24, 5))
    ]
    for request in engine.generate(asked):
        assert request.error is None
    return asked


@pytest.mark.parametrize(
    ("cfg", "depth"),
    [
        pytest.param(tiny.short("wch", 1, sinkhorn=2, max_positions=64), 1, id="drafts"),
        pytest.param(
            dataclasses.replace(preset("tiny"), mtp=0, max_positions=512), 0, id="preset"
        ),
    ],
)  # fmt: skip
def test_bfloat16_is_as_near_as_the_plain_steps(cfg: Config, depth: int, tmp_path: Path) -> None:
    """By statistics, as routes and selections flip: against float64, over all steps of a serving.

    The mean distance is at most 1.25 times that of the plain steps, and the second start finds all.
    """
    made = build(cfg, seed=0, backend="inductor", drafts=depth > 0, cache_dir=tmp_path)
    sizes = fit(cfg, [64], most=8, drafts=depth)
    asked = room(made.cfg, sizes, chunk=8)

    def start() -> tuple[CompiledModel, Store]:
        store = Store(tmp_path)
        return compile_model(made, asked, store, page_tokens=sizes.page_tokens), store

    compiled, store = start()
    assert store.counts.hits == 0
    again, store = start()
    assert store.counts.hits == store.counts.graphs
    assert store.counts.grown == 0
    measured, seen = beside_float64(compiled, made.cfg)
    before = compiles()
    serve(measured, sizes, 8, depth)
    want = serve(compiled, sizes, 8, depth)
    got = serve(again, sizes, 8, depth)
    assert compiles() == before  # K1, with drafts
    assert [r.output for r in got] == [r.output for r in want]
    assert set(seen.steps) == {"step", *(("draft",) if depth else ())}
    assert sum(seen.ours) <= 1.25 * sum(seen.plain)
