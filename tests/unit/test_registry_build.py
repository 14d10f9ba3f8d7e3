"""From a directory or a Config to a model; a refusal names the cause before anything is loaded."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4 import config_json, model, mtp, table
from dsv4.config import Config, preset
from dsv4.context import Ctx
from dsv4.mesh import Mesh
from dsv4.params import Params
from dsv4.tree import leaves
from registry.build import build
from registry.model import CompiledModel, Order
from registry.registry import Registry
from runtime.save import save

TINY = dataclasses.replace(
    preset("tiny"), vocab=64, dim=32, q_rank=16, o_rank=8, expert_dim=16, head_dim=32, index_dim=16
)


@pytest.fixture(scope="module")
def params() -> Params:
    return table.init(TINY, torch.Generator().manual_seed(3), torch.float32)


@pytest.fixture(scope="module")
def folder(params: Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(params, tmp_path_factory.mktemp("tiny"))


def written(params: Params, directory: Path, **changes: Any) -> Path:
    save(params, TINY, directory)
    raw = config_json.write(TINY) | changes
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return directory


def logits(made: CompiledModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    with torch.no_grad():
        batch, pools = model.fresh(made.params, tokens, made.ctx)
        out, pools = made.step(made.params, pools, batch)
        if made.draft is None:
            return out.logits, None
        drafted, _ = made.draft(made.params, pools, out.hidden.roll(1, 0), batch)
        return out.logits, drafted.logits


def test_a_directory_becomes_a_model_that_steps(folder: Path, params: Params) -> None:
    made = build(folder, dtype=torch.float32)
    assert (made.cfg, made.source, made.backend.name) == (TINY, folder, "eager")
    assert made.architecture == "DeepseekV4ForCausalLM"
    assert made.report is not None
    assert made.why == (
        "architectures in config.json is ['DeepseekV4ForCausalLM']",
        "DeepseekV4ForCausalLM is served by registry.deepseek_v4:build",
        "backend eager",
    )
    for a, b in zip(leaves(made.params), leaves(params), strict=True):
        assert torch.equal(a, b)
    tokens = torch.randint(0, TINY.vocab, (1, 9))
    want, drafted = mtp.forward(params, tokens, Ctx(TINY))
    got, ours = logits(made, tokens)
    torch.testing.assert_close(got, want[0], atol=1e-5, rtol=1e-5)
    assert ours is not None
    torch.testing.assert_close(ours[1:], drafted[0, 1:], atol=1e-5, rtol=1e-5)


def test_a_config_becomes_a_model_with_random_parameters() -> None:
    one, same, other = (build(TINY, seed=s, dtype=torch.float32) for s in (1, 1, 2))
    assert one.report is None
    assert one.source is None
    assert "random parameters from seed 1" in one.why
    assert torch.equal(one.params.embed, same.params.embed)
    assert not torch.equal(one.params.embed, other.params.embed)
    assert build(TINY, seed=1).params.embed.dtype is torch.bfloat16
    with pytest.raises(ValueError, match="pass seed"):
        build(TINY)


def test_a_checkpoint_without_drafts_loads_as_the_backbone(
    params: Params, tmp_path: Path, folder: Path
) -> None:
    bare = written(dataclasses.replace(params, mtp=None), tmp_path)
    made = build(bare, dtype=torch.float32)
    assert (made.cfg.mtp, made.draft, made.params.mtp) == (0, None, None)
    assert any("no draft module" in why for why in made.why)
    with pytest.raises(ValueError, match=r"needs mtp"):
        build(bare, architecture="DeepSeekV4MTPModel")
    made = build(folder, drafts=False)
    assert (made.cfg.mtp, made.draft) == (0, None)
    made = build(folder, architecture="DeepSeekV4MTPModel")
    assert made.draft is not None
    assert made.architecture == "DeepSeekV4MTPModel"
    with pytest.raises(ValueError, match="model with drafts"):
        build(folder, architecture="DeepSeekV4MTPModel", drafts=False)


def test_a_builder_of_ones_own_wins_by_override(folder: Path) -> None:
    table = Registry()
    table.register("DeepseekV4ForCausalLM", f"{__name__}:echo", override=True)
    made: Any = build(folder, registry=table)
    assert isinstance(made, Order)
    assert isinstance(made.cfg, Config)
    assert f"DeepseekV4ForCausalLM is served by {__name__}:echo" in made.why


def echo(order: Order) -> Order:
    return order


def test_wrong_paths_are_refused_in_one_line(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "file"
    file.write_text("{}")
    bad = tmp_path / "bad"
    bad.mkdir()
    cases = [
        (tmp_path / "absent", "no such model directory"),
        (file, "is not a directory"),
        (bad, "holds no config.json"),
    ]
    for path, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            build(path)
        assert str(path) in str(caught.value)
    for content in ("{", "[1]", "\xff", '"x"', "[" * 100000):
        (bad / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=r"cannot be read as JSON|must hold an object") as c:
            build(bad)
        assert "\n" not in str(c.value)
    (bad / "config.json").write_text(json.dumps(config_json.write(TINY)))
    with pytest.raises(ValueError, match=r"no \*.safetensors"):
        build(bad)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is unknown"),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "planned, not built: V4.1 layers"),
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, "planned, not built: GLM-5"),
        ({"vision_n_layers": 24}, "planned, not built: the vision encoder"),
        ({"model_type": "deepseek_v41"}, "V4.1 is planned"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"hidden_size": 64}, "shape"),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    for file in folder.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    raw = config_json.write(TINY) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        build(tmp_path)


def test_what_is_not_built_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="mesh axis 'tp' has size 2"):
        build(folder, mesh=Mesh(sizes=(1, 2, 1, 1)))
    with pytest.raises(ValueError, match="torchair cannot run here: torch_npu"):
        build(folder, backend="torchair")
    with pytest.raises(ValueError, match="'fast' is unknown"):
        build(folder, backend="fast")
    with pytest.raises(ValueError, match="not from a seed"):
        build(folder, seed=1)
    with pytest.raises(ValueError, match=r"must be one of torch\.bfloat16"):
        build(folder, dtype=torch.int8)


def test_a_fact_that_stands_twice_is_refused(tmp_path: Path) -> None:
    from registry.build import read_config

    (tmp_path / "config.json").write_text(
        '{"sliding_window": 8, "a": {"b": 1}, "sliding_window": 9}'
    )
    with pytest.raises(ValueError, match="sliding_window stands in it twice"):
        read_config(tmp_path)


@pytest.mark.parametrize("what", [{"seed": 1.5}, {"seed": -1}, {"dtype": "float32"}])
def test_bad_arguments_are_named(what: dict) -> None:
    from dsv4.config import preset
    from registry.build import build

    with pytest.raises(ValueError, match=next(iter(what))):
        build(preset("tiny"), **({"seed": 0} | what))


def test_a_builder_that_raises_at_import_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from registry.registry import Registry

    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry()
    registry.register("Mine", "raises_at_import:build")
    with pytest.raises(ValueError, match=r"'Mine' is served by .* no such device"):
        registry.builder("Mine")
