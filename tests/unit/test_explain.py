"""What `dsv4 explain` says, as facts and as text."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4 import config_json, table
from dsv4.config import preset
from registry.explain import explain, names
from registry.explain_text import names_text, text
from registry.registry import Registry
from runtime.save import save

TINY = dataclasses.replace(
    preset("tiny"), vocab=64, dim=32, q_rank=16, o_rank=8, expert_dim=16, head_dim=32, index_dim=16
)


@pytest.fixture(scope="module")
def flash() -> dict[str, Any]:
    return explain("flash")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(table.init(TINY, torch.Generator().manual_seed(3)), TINY, tmp_path)
    return described(tmp_path)


def described(folder: Path, **changes: Any) -> Path:
    raw = config_json.write(TINY) | changes
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "tensors", "backbone"),
    [("flash", 69187, 284_332_240_471), ("pro", 145116, 1_572_997_201_763)],
)
def test_the_released_models_are_sized_without_weights(
    name: str, tensors: int, backbone: int
) -> None:
    facts = explain(name)
    p = facts["parameters"]
    assert (p["checkpoint_tensors"], p["backbone"]) == (tensors, backbone)
    assert sum(g["count"] for g in p["groups"].values()) == p["count"]
    assert sum(g["bytes"] for g in p["groups"].values()) == p["bytes"]
    spec = table.spec(preset(name))
    assert p["groups"]["mtp"]["count"] == table.count(spec.mtp)
    assert p["groups"]["experts"]["count"] == sum(
        leaf.count for layer in spec.layers for leaf in vars(layer.ffn).values() if leaf_is(leaf)
    )
    assert facts["weights"] is None
    assert facts["refuses"]["now"] == []


def test_a_backend_that_cannot_run_here_is_a_refusal() -> None:
    (told,) = explain("tiny", backend="torchair")["refuses"]["now"]
    assert told.startswith("backend torchair: ")
    assert "torch_npu" in told


def leaf_is(leaf: Any) -> bool:
    """A routed expert's tensor: stored as fp4."""
    return isinstance(leaf, table.Leaf) and leaf.stored == "fp4"


def test_the_cache_of_flash_is_that_of_the_specification(flash: dict[str, Any]) -> None:
    cache = flash["cache"]
    assert cache["bytes_per_token"] == {
        "compressed": 21 * 1024 / 4 + 20 * 1024 / 128,
        "index keys": 21 * 256 / 4,
        "window": 0.0,
        "open inputs": 0.0,
        "total": 6880.0,
    }
    million = cache["bytes_at"]["1048576"]
    assert million["compressed"] == 5_505_024 * 1024 + 163_840 * 1024
    assert million["index keys"] == 5_505_024 * 256
    assert million["window"] == 5_632 * 1024
    assert million["open inputs"] == pytest.approx(0.012e9, rel=0.02)
    assert million["total"] == pytest.approx(7.23e9, rel=5e-4)
    assert list(cache["bytes_at"]) == ["8192", "131072", "1048576"]
    assert explain("pro")["cache"]["bytes_per_token"]["total"] == 9848


def test_every_layer_is_told_with_field_and_rule(flash: dict[str, Any]) -> None:
    assert len(flash["layers"]) == 44
    for layer in flash["layers"]:
        for choice in ("kind", "rate", "router", "rope"):
            assert layer[choice]["fields"], layer
            assert layer[choice]["rule"], layer
    two = flash["layers"][2]
    assert (two["kind"]["value"], two["rate"]["value"], two["router"]["value"]) == (
        "csa",
        4,
        "hash",
    )
    assert two["rope"]["value"] == {
        "theta": 160000.0,
        "yarn": {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original": 65536},
    }
    assert two["kind"]["fields"] == ["compress_ratios[2]"]


def test_the_facts_are_json_and_stable(flash: dict[str, Any]) -> None:
    assert json.loads(json.dumps(flash, allow_nan=False)) == flash
    assert json.dumps(explain("flash")) == json.dumps(flash)
    assert list(flash) == [
        "source", "architecture", "config", "layers", "parameters", "cache", "weights", "backend",
        "refuses",
    ]  # fmt: skip


def test_the_text_tells_the_same(flash: dict[str, Any]) -> None:
    told = text(flash)
    for part in (
        "preset flash",
        "DeepseekV4ForCausalLM -> registry.deepseek_v4:build",
        flash["architecture"]["digest"],
        "4 is csa, rate of csa by default (compress_ratios[2])",
        "in the first 3: hash (num_hash_layers)",
        "284,332,240,471",
        "69,187 tensors",
        "7.232 GB",
        "compiler.segments.experts_by_segment",
        "none here",
        "nothing",
    ):
        assert part in told
    assert len([line for line in told.splitlines() if line.startswith("  layers.")]) == 43


def test_weights_are_judged_by_their_headers(folder: Path) -> None:
    facts = explain(str(folder))
    weights = facts["weights"]
    spec = table.spec(TINY)
    stacked = sum(leaf.shape[0] if leaf.stacked else 1 for leaf in table.paths(spec).values())
    assert (weights["files"], weights["used"], weights["drafts"]) == (1, stacked, True)
    assert (weights["family"], weights["faults"]) == ("official", {})
    assert f"used {stacked:,} tensors" in text(facts)


def test_weights_that_do_not_fit_are_told_not_raised(folder: Path) -> None:
    facts = explain(str(described(folder, hidden_size=64)))
    assert facts["weights"]["faults"]["wrong_shape"]["count"] > 0
    assert any("wrong shape" in line for line in facts["refuses"]["now"])
    assert "wrong shape" in text(facts)
    (folder / "model.safetensors").write_bytes(b"\x00" * 4)
    facts = explain(str(folder))
    assert facts["refuses"]["now"]
    assert "broken" in text(facts)


def test_weights_without_drafts_fit(tmp_path: Path) -> None:
    params = table.init(TINY, torch.Generator().manual_seed(3))
    save(dataclasses.replace(params, mtp=None), TINY, tmp_path)
    facts = explain(str(described(tmp_path)))
    assert facts["refuses"]["now"] == []
    assert facts["weights"]["drafts"] is False
    assert "no draft module" in text(facts)


def test_d7_j8_what_has_no_effect_is_listed(folder: Path) -> None:
    """Nothing in config.json is overridden: a field is followed, without effect, or unread."""
    described(folder, use_cache=False, index_topk_freq=4, torch_dtype="float16", eos_token_id=[1])
    facts = explain(str(folder))
    config = facts["config"]
    assert config["unread"] == ["index_topk_freq"]
    assert {"use_cache", "torch_dtype"} <= config["ignored"].keys()
    raw = json.loads((folder / "config.json").read_text())
    followed = {f for made in config["decisions"].values() for f in made["fields"]}
    fixed = {name for name, _, _ in config_json.FIXED}
    assert raw.keys() == followed | fixed & raw.keys() | config["ignored"].keys() | {
        "index_topk_freq"
    }
    assert "index_topk_freq" in text(facts)


def test_notes_and_defaults_are_told(folder: Path) -> None:
    described(folder, dspark_block_size=5, sliding_window=None)
    with pytest.raises(ValueError, match="sliding_window is null"):
        explain(str(folder))
    raw = config_json.write(TINY) | {"dspark_block_size": 5}
    del raw["sliding_window"]
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    told = text(explain(str(folder)))
    assert "DSpark drafts are planned; backbone only" in told
    assert "window" in next(line for line in told.splitlines() if "by default  " in line)
    assert "drafts: config.json has no draft stage" in told


def test_j1_who_won_and_who_lost_is_told(folder: Path) -> None:
    registry = Registry()
    registry.register("DeepseekV4ForCausalLM", "mine:build", override=True)
    facts = explain(str(folder), registry=registry)
    assert facts["architecture"]["target"] == "mine:build"
    assert facts["architecture"]["losers"] == ["registry.deepseek_v4:build"]
    assert facts["architecture"]["digest"] == registry.digest() != Registry().digest()
    assert "registry.deepseek_v4:build" in text(facts)


def test_j3_the_table_of_a_process_can_be_dumped() -> None:
    registry = Registry()
    registry.register("DeepseekV4ForCausalLM", "mine:build", override=True)
    facts = names(registry)
    assert facts["digest"] == registry.digest()
    assert len(facts["names"]) == 28
    told = names_text(facts)
    assert "DeepseekV4ForCausalLM: mine:build overrides registry.deepseek_v4:build" in told
    assert "see KimiLinearForCausalLM" in told


def test_the_backend_tells_its_fallbacks(flash: dict[str, Any]) -> None:
    backend = flash["backend"]
    assert backend["name"] == "eager"
    assert backend["operators"]["pick"] == {"lowering": "dsv4.ops.pick", "fallback": True}
    assert not backend["operators"]["experts"]["fallback"]
    assert not backend["compiles"]
    assert backend["missing"]["eager"] is None
    assert "torch_npu" in backend["missing"]["torchair"]
    npu = explain("flash", backend="torchair")["backend"]
    assert npu["operators"]["rms"] == {"lowering": "compiler.torchair_ops.rms", "fallback": False}
    with pytest.raises(ValueError, match="'fast' is unknown"):
        explain("flash", backend="fast")


def test_what_cannot_be_explained_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such model directory: nowhere; no preset 'nowhere'"):
        explain("nowhere")
    described(folder, architectures=["DeepseekV41ForCausalLM"])
    with pytest.raises(ValueError, match="planned, not built"):
        explain(str(folder))


def test_other_dtypes_are_sized(flash: dict[str, Any]) -> None:
    wide = explain("flash", dtype=torch.float32)
    assert wide["cache"]["bytes_per_token"]["total"] == 2 * 6880
    assert wide["parameters"]["bytes"] > 1.9 * flash["parameters"]["bytes"]
