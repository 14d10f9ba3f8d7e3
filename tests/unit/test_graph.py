"""Graphs against the list of converters: what any machine can prove. And the tool's own rules."""

import dataclasses

import pytest

from compiler import torchair_list
from compiler.torchair_ops import NPU
from dsv4.config import Config, preset
from dsv4.context import Ctx
from dsv4.ops import PLAIN
from tools import graph, graph_scene, graph_wheel
from tools.graph_prototypes import Prototype

BUCKETS = graph.BUCKETS


def _short(cfg: Config) -> Config:
    """Fewer Sinkhorn rounds: they are unrolled, and bring no operator of their own."""
    return dataclasses.replace(cfg, sinkhorn=2)


@pytest.mark.parametrize("bucket", ["decode", "mixed"])
@pytest.mark.parametrize("name", ["tiny", "flash"])
def test_every_operator_is_listed(name: str, bucket: str) -> None:
    cfg = preset("tiny") if name == "tiny" else graph_scene.cut(preset("flash"), 4)
    r = graph.report(Ctx(_short(cfg), ops=NPU), BUCKETS[bucket], None)
    assert r.missing == {}
    assert r.lowered is None
    counts = {op.name: op.count for op in r.operators}
    assert counts["dsv4.grouped_matmul.default"] == 3 * cfg.layers
    assert counts["npu.npu_moe_init_routing_v2.default"] == cfg.layers
    assert counts["npu.npu_clipped_swiglu.default"] == 2 * cfg.layers
    writes = counts["npu.npu_scatter_nd_update.default"] + counts["dsv4.write_after.default"]
    assert len(r.written) == writes
    assert {w.split(".")[0] for w in r.written} == {"pools"}
    # Rings and headers are read before they are written; nothing else is.
    waits = [w for w in r.written if w.endswith(("ring", "header"))]
    assert counts["dsv4.write_after.default"] == len(waits)


def test_every_pool_of_a_step_is_written() -> None:
    """Of tiny: all but the draft module's, which its own step writes."""
    cfg = _short(preset("tiny"))
    step = graph.report(Ctx(cfg, ops=NPU), BUCKETS["decode"], None).written
    draft = graph.report(Ctx(cfg, ops=NPU), BUCKETS["decode"], None, draft=True).written
    assert len(step) == 26
    assert draft == ("pools.mtp.window",)


def test_the_plain_write_is_missing() -> None:
    r = graph.report(Ctx(_short(preset("bench_100m")), ops=PLAIN), BUCKETS["decode"], None)
    assert set(r.missing) == {"aten.index_put.default"}
    assert r.written == ()


def test_the_exit_code_is_one_if_anything_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert graph.main(["bench_100m", "--static", "--plain"]) == 1
    out = capsys.readouterr().out
    assert "missing: aten.index_put.default" in out
    assert "1 missing" in out
    assert "evidence 2 converted: not tried: --static" in out
    assert "never run" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["flash", "--layers", "2"], "4 to 43"),
        (["tiny", "--torch-npu", "/"], "no unpacked torch_npu"),
        (["tiny", "--static", "--out", "x"], "no GE graph"),
        (["bench_100m", "--draft", "--static"], "no draft module"),
        (["tiny", "--seqs", "9", "--tokens", "3"], "9 sequences in 3 tokens"),
        (["tiny", "--context", "4"], "context is 4"),
        (["tiny", "--seqs", "3"], "as many tokens"),
        (["huge"], "no preset"),
    ],
)
def test_refusals(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        graph.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_cut_has_every_plan() -> None:
    flash = preset("flash")
    cut = graph_scene.cut(flash, 4)
    assert set(cut.plans) == set(flash.plans)
    assert (cut.layers, cut.mtp) == (4, 0)
    assert graph_scene.cut(flash, 6).layers == 6


def test_the_list_holds_converters_only() -> None:
    table = torchair_list.read()
    assert table.torch_npu.startswith("2.13.")
    assert set(table.status.values()) == {"OK", "PARTIAL"}
    assert len(table.status) > 500
    assert table.of("aten.mm.default") == "PARTIAL"
    assert table.of("aten.embedding.default") == "OK"
    assert table.of("dsv4.write_after.default") == "OURS"
    for absent in ("aten.index_put.default", "aten.amax.default", "aten.softplus.default"):
        assert table.of(absent) is None


def test_the_wheel_is_looked_for_where_the_command_puts_it() -> None:
    why = graph_wheel.why_not(None)
    assert why is not None
    assert f"--target {graph_wheel.beside()}" in why


def test_a_prototype_knows_its_names() -> None:
    p = Prototype(("x", "weight"), ("y",), ("K",), frozenset({"weight"}))
    assert p.strangers(["x", "weight0", "weight12"], ["k", "_own", "input_layout_info"]) == []
    assert p.strangers(["x1"], ["dim"]) == ["x1", "dim"]
