"""The README's Python runs as it stands."""

import re
from pathlib import Path

import pytest

from compiler.store import Store
from dsv4 import config
from dsv4.state import PoolSizes
from registry.build import build
from registry.programs import compile_model, room
from runtime.engine import Engine
from runtime.request import Limits, Request

pytestmark = pytest.mark.e2e

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    names: dict = {}
    for block in blocks:
        exec(block, names)
    told = capsys.readouterr().out
    assert "torch.Size([2, 300, 2048])" in told
    assert "128 of 150 tokens hit (unit 128)" in told
    assert "tokens per step with drafts" in told
    gradients = names["gradients"]
    assert gradients["layers.0.attn.wq_a"].abs().max() > 0
    assert not any("tid2eid" in name for name in gradients)
    again = names["build"](names["folder"], dtype=names["torch"].float32)
    first, second = (m.params.layers[2].ffn.w1 for m in (names["served"], again))
    assert names["torch"].equal(first, second)
    assert all(r.finish for r in names["requests"])


def test_the_example_of_programs_runs() -> None:
    """With a backend that needs no compiler: names, arguments and their order."""
    (block,) = re.findall(r"```\n(model = build.*?)```", README.read_text("utf-8"), re.DOTALL)
    cfg = config.preset("tiny")
    sizes = PoolSizes(history_pages=5, window_pages=5, slots=3, page_tokens=cfg.page_tokens)
    names = {
        "build": lambda folder, *, backend: build(cfg, seed=0, backend=backend),
        **{f.__name__: f for f in (room, compile_model, Store, Engine)},
        **{"folder": None, "sizes": sizes},
    }
    exec(block.replace('"inductor"', '"eager"'), names)
    (request,) = requests = [Request(prompt=range(2, 12), limits=Limits(max_new_tokens=4))]
    names["engine"].generate(requests)
    assert len(request.tokens) == 14
