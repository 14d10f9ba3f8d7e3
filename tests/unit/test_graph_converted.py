"""The acceptance of offline lowering: tiny and a slice of flash, decode and mixed, 0 missing.

At the highest evidence this machine allows: torchair's own converters where the files of the
torch_npu wheel are (README, "Test it", puts them there), else the list of converters. Each graph
has a process of its own, as torchair needs.
"""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compiler import torchair_list
from tools import graph_wheel

ROOT = Path(__file__).resolve().parents[2]
WHEEL = graph_wheel.find()
CONVERTS = graph_wheel.why_not(WHEEL) is None
needs_wheel = pytest.mark.skipif(not CONVERTS, reason=str(graph_wheel.why_not(WHEEL)))


def _run(*args: object, tool: str = "graph") -> tuple[int, str]:
    command = [sys.executable, "-m", f"tools.{tool}", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return done.returncode, done.stdout


@dataclasses.dataclass(frozen=True)
class Op:
    """An operator of a GE graph, read from its text."""

    name: str
    kind: str
    fed: list[str]


def _graph(text: str) -> list[Op]:
    def field(block: str, name: str) -> list[str]:
        return re.findall(rf'^  {name}: "(.*)"', block, re.M)

    blocks = text.split("\nop {")[1:]
    return [Op(field(b, "name")[0], field(b, "type")[0], field(b, "input")) for b in blocks]


def _reads_before_writes(ops: list[Op]) -> int:
    """How many reads of a pool its write waits for: by control edges, nothing else orders them."""
    writes = {op.fed[0]: op for op in ops if op.kind == "ScatterNdUpdate"}
    reads = [(op, p) for op in ops for p in writes.keys() & set(op.fed) if op is not writes[p]]
    for read, pool in reads:
        assert f"{read.name}:-1" in writes[pool].fed
    return len(reads)


@pytest.mark.parametrize("bucket", ["decode", "mixed"])
@pytest.mark.parametrize(
    ("model", "pools", "layers", "waits"),
    [(("tiny",), 26, 5, 13), (("flash", "--layers", 4), 18, 4, 9)],
)
def test_nothing_is_missing(
    model: tuple, pools: int, layers: int, waits: int, bucket: str, tmp_path: Path
) -> None:
    text = tmp_path / "graph.pbtxt"
    code, out = _run(*model, "--bucket", bucket, *(("--out", text) if CONVERTS else ()))
    assert code == 0, out
    assert " 0 missing, 0 faults" in out
    assert f"written pools: {pools}\n" in out
    assert "evidence 3 run:       no" in out
    if not CONVERTS:
        assert "evidence 2 converted: not tried: " in out
        return
    version = torchair_list.read().torch_npu
    assert f"evidence 2 converted: yes: by torchair of torch_npu {version}" in out
    assert f"in place: {pools} of {pools}; " in out
    refs = re.search(r"_ref_data_idx = \[(.*)\]", out)
    assert refs
    assert len(set(refs[1].split(", "))) == pools
    assert "TensorMove operators left: 0 []" in out
    ops = _graph(text.read_text(encoding="utf-8"))
    kinds = [op.kind for op in ops]
    assert kinds.count("ScatterNdUpdate") == pools
    assert kinds.count("GroupedMatmul") == 3 * layers
    assert kinds.count("MoeInitRoutingV3") == kinds.count("MoeFinalizeRoutingV2") == layers
    assert _reads_before_writes(ops) == waits  # rings and headers


@needs_wheel
def test_an_operator_without_converter_is_named() -> None:
    """Case of the tool itself: torchair refuses the plain write, and the rest is still reported."""
    code, out = _run("bench_100m", "--plain")
    assert code == 1
    assert re.search(r"^missing: aten\.index_put\.default: .*not implemented", out, re.M)
    assert " 1 missing, " in out
    assert "evidence 2 converted: no" in out


@needs_wheel
def test_the_graph_means_what_the_step_means() -> None:
    """Interpreted on CPU with every write as early as its inputs allow, against the plain step."""
    code, out = _run("--bucket", "mixed", "--bound", 1e-5, tool="graph_interpret")
    assert code == 0, out
    found = dict(re.findall(r"^(\S+) +(\d\S+)$", out, re.M))
    assert found["load"] == "0.0e+00"
    assert {name.split(".")[0] for name in found} == {"logits", "hidden", "load", "pools"}
    assert len([name for name in found if name.startswith("pools.")]) == 11
    # The comparison can fail: reads that do not come first see what was written.
    loose = re.search(r"not obeyed: (\S+)$", out, re.M)
    assert loose
    assert float(loose[1]) > 0.1
