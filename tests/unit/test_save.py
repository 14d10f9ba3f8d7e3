"""Writing checkpoints: what stands in the files, and what happens to the directory."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dsv4 import quant, table, tree
from dsv4.config import Config
from dsv4.params import Params
from runtime.load import load
from runtime.quantise import to_fp4, to_fp8
from runtime.save import save
from tests.checkpoints import BASE

CFG = BASE
ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BF16, F32 = torch.bfloat16, torch.float32


def draw(cfg: Config = CFG, dtype: torch.dtype = F32) -> Params:
    """Params in which no two tensors agree."""
    g = torch.Generator().manual_seed(0)

    def one(leaf: table.Leaf) -> Tensor:
        if leaf.role == "int32":
            return torch.randint(cfg.experts, leaf.shape, generator=g, dtype=torch.int32)
        return torch.randn(leaf.shape, generator=g, dtype=torch.float64).to(leaf.dtype(dtype))

    return tree.tmap(one, table.spec(cfg))


def same(a: Params, b: Params) -> bool:
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


# What stands in the files.


def test_official_files_hold_the_official_names_and_shapes(tmp_path: Path) -> None:
    params = draw()
    [file] = save(params, CFG, tmp_path)
    assert file == tmp_path / ONE
    stored, given = load_file(file), tree.paths(params)
    for path, leaf in tree.paths(table.spec(CFG)).items():
        for x in range(leaf.shape[0]) if leaf.stacked else (None,):
            t = stored.pop(leaf.official.replace("{x}", str(x)))
            ours = given[path] if x is None else given[path][x]
            assert torch.equal(t.reshape(ours.shape), ours), path
    assert stored == {}
    wo_a = load_file(file)["layers.1.attn.wo_a.weight"]
    assert wo_a.shape == (CFG.o_groups * CFG.o_rank, CFG.heads * CFG.head_dim // CFG.o_groups)


def test_transformers_files_hold_its_names_and_shapes(tmp_path: Path) -> None:
    params = draw()
    [file] = save(params, CFG, tmp_path, family="transformers")
    stored = load_file(file)
    ffn = params.layers[2].ffn
    fused = stored["model.layers.2.mlp.experts.gate_up_proj"]
    assert torch.equal(fused, torch.cat((ffn.w1, ffn.w3), dim=1))
    assert torch.equal(stored["model.layers.2.mlp.experts.down_proj"], ffn.w2)
    assert torch.equal(stored["lm_head.weight"], params.head)
    drafts = {name for name in stored if "mtp" in name}
    assert drafts, "the draft module keeps its official names, which transformers ignores"
    assert all(name.startswith("mtp.0.") for name in drafts)
    leaves = tree.leaves(table.spec(CFG))
    assert set(stored) - drafts == {leaf.hf for leaf in leaves if leaf.hf}
    with safe_open(file, "pt") as f:
        assert f.metadata() == {"format": "pt"}, "transformers refuses files without it"


def test_tensors_keep_their_dtype_unless_another_is_asked_for(tmp_path: Path) -> None:
    spec = table.spec(CFG)
    for dtype in (None, BF16, F32):
        save(draw(dtype=BF16), CFG, tmp_path / str(dtype), dtype=dtype)
        stored = load_file(tmp_path / str(dtype) / ONE)
        for leaf in tree.leaves(spec):
            t = stored[leaf.official.replace("{x}", "1")]
            own = torch.int64 if leaf.role == "int32" else leaf.dtype(BF16)
            kept = leaf.stored == "f32" or leaf.role == "int32"  # the released float32 tensors
            assert t.dtype == (own if kept or dtype is None else dtype), leaf.official


def test_bfloat16_originals_survive_the_narrow_form(tmp_path: Path) -> None:
    """Wide tensors that were widened from bfloat16 lose nothing when stored as such."""

    def narrow(t: Tensor, leaf: table.Leaf) -> Tensor:
        return t if leaf.stored in ("f32", "i64") else t.bfloat16().to(t.dtype)

    params = tree.tmap(narrow, draw(dtype=BF16), table.spec(CFG))
    save(params, CFG, tmp_path, dtype=BF16)
    assert same(load(tmp_path, CFG, BF16)[0], params)


def test_params_without_drafts_are_a_checkpoint_without_drafts(tmp_path: Path) -> None:
    save(dataclasses.replace(draw(), mtp=None), CFG, tmp_path)
    assert not any(name.startswith("mtp.") for name in load_file(tmp_path / ONE))


def test_gradients_do_not_matter(tmp_path: Path) -> None:
    params = tree.tmap(lambda t: t.requires_grad_() if t.is_floating_point() else t, draw())
    save(params, CFG, tmp_path)
    assert same(load(tmp_path, CFG, F32)[0], params)


# Shards.


def test_shards_are_indexed_and_bounded(tmp_path: Path) -> None:
    limit = 300_000
    *files, index = save(draw(), CFG, tmp_path, shard_bytes=limit)
    assert index == tmp_path / INDEX
    count = len(files)
    assert count > 3
    assert [f.name for f in files] == [
        f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)
    ]
    held = {f.name: load_file(f) for f in files}
    made = json.loads(index.read_text())
    assert made["weight_map"] == {n: f for f, tensors in held.items() for n in tensors}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in held.values()]
    assert made["metadata"]["total_size"] == sum(sizes)
    for size, tensors in zip(sizes, held.values(), strict=True):
        assert size <= limit or len(tensors) == 1


def test_a_scale_stands_beside_its_weight(tmp_path: Path) -> None:
    *files, _ = save(draw(), CFG, tmp_path, quantise=True, shard_bytes=1)
    for file in files:
        names = set(load_file(file))
        weight = next(n for n in names if not n.endswith(".scale"))
        assert names - {weight} <= {weight.removesuffix("weight") + "scale"}
    assert load(tmp_path, CFG, F32)[1].faults() == {}


# The released format.


def test_quantised_files_have_the_released_dtypes(tmp_path: Path) -> None:
    save(draw(), CFG, tmp_path, quantise=True)
    stored = load_file(tmp_path / ONE)
    dtypes = {"bf16": BF16, "f32": F32, "i64": torch.int64, "fp4": torch.int8}
    dtypes["fp8"] = torch.float8_e4m3fn
    for leaf in tree.leaves(table.spec(CFG)):
        name = leaf.official.replace("{x}", "2")
        t = stored[name]
        assert t.dtype == dtypes[leaf.stored], name
        if leaf.stored in ("fp8", "fp4"):
            scale = stored[name.removesuffix("weight") + "scale"]
            assert scale.dtype == torch.float8_e8m0fnu
            rows = t.shape[0]
            grid = (-(-rows // 128), -(-t.shape[1] // 128))
            assert scale.shape == (grid if leaf.stored == "fp8" else (rows, t.shape[1] // 16))


def test_quantising_twice_changes_nothing(tmp_path: Path) -> None:
    save(draw(), CFG, tmp_path / "a", quantise=True)
    once, _ = load(tmp_path / "a", CFG, F32)
    save(once, CFG, tmp_path / "b", quantise=True)
    assert same(load(tmp_path / "b", CFG, F32)[0], once)


def test_what_was_quantised_fits_bfloat16(tmp_path: Path) -> None:
    save(draw(), CFG, tmp_path, quantise=True)
    wide, _ = load(tmp_path, CFG, F32)
    narrow, _ = load(tmp_path, CFG, BF16)
    assert same(tree.tmap(lambda t: t.to(F32) if t.is_floating_point() else t, narrow), wide)


@pytest.mark.parametrize("shape", [(32, 32), (1, 128), (128, 128), (160, 160), (300, 64)])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1.0, 1e30])
def test_quantisers_are_within_half_a_step(shape: tuple[int, int], size: float) -> None:
    """Each value within half a step of its block, and the scale the smallest that holds all."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * size
    values, stored = to_fp8(w)
    back = quant.dequantise_fp8(values, quant.e8m0(stored))
    tile = quant.e8m0(stored).repeat_interleave(128, 0)[: shape[0]]
    tile = tile.repeat_interleave(128, 1)[:, : shape[1]]
    # e4m3: 3 bits behind the leading one, 2^-9 at the least.
    assert ((back - w).abs() <= torch.maximum(w.abs() / 16, tile * 2.0**-10)).all()
    packed, stored = to_fp4(w)
    scale = quant.e8m0(stored)
    back = quant.dequantise_fp4(packed, scale)
    block = scale.repeat_interleave(32, 1)
    assert ((back - w).abs() <= torch.maximum(w.abs() / 4, block / 4)).all()
    if size >= 1e-30:
        biggest = w.unflatten(1, (-1, 32)).abs().amax(-1)
        assert ((biggest <= 6 * scale) & (biggest > 3 * scale)).all()


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(128, 128)
    for (values, scale), back in (
        (to_fp8(zeros), quant.dequantise_fp8),
        (to_fp4(zeros), quant.dequantise_fp4),
    ):
        assert torch.equal(back(values, quant.e8m0(scale)), zeros)


def test_a_sign_survives() -> None:
    w = torch.tensor([[-0.5, 0.5, -6.0, 6.0] * 8])
    packed, scale = to_fp4(w)
    assert packed.view(torch.uint8)[0, :2].tolist() == [0x19, 0x7F]  # low nibble first
    assert torch.equal(quant.dequantise_fp4(packed, quant.e8m0(scale)), w)


# The directory.


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(old: Path, new: Path) -> None:
        calls.append(new)
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(draw(), CFG, tmp_path, shard_bytes=300_000)
    assert len(calls) == 1, "nothing is renamed before everything is written"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_files_of_the_last(tmp_path: Path) -> None:
    save(draw(), CFG, tmp_path)
    before = (tmp_path / ONE).read_bytes()
    lost = dataclasses.replace(draw(), norm=torch.zeros(CFG.dim, device="meta"))
    with pytest.raises(NotImplementedError):
        save(lost, CFG, tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == [ONE]
    assert (tmp_path / ONE).read_bytes() == before


def test_a_checkpoint_of_the_same_files_is_replaced(tmp_path: Path) -> None:
    other = tree.tmap(lambda t: t + 1 if t.is_floating_point() else t, draw())
    for params in (draw(), other):
        save(params, CFG, tmp_path)
        assert same(load(tmp_path, CFG, F32)[0], params)


def test_files_of_another_checkpoint_are_not_mixed_with(tmp_path: Path) -> None:
    save(draw(), CFG, tmp_path, shard_bytes=300_000)
    before = sorted(f.name for f in tmp_path.iterdir())
    with pytest.raises(ValueError, match="part of another checkpoint"):
        save(draw(), CFG, tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == before


def test_a_publication_that_breaks_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    replace, calls = os.replace, []

    def breaks(a: Path, b: Path) -> None:
        calls.append(b)
        if len(calls) == 2:
            raise OSError("gone")
        replace(a, b)

    monkeypatch.setattr(os, "replace", breaks)
    with pytest.raises(OSError, match="gone"):
        save(draw(), CFG, tmp_path, shard_bytes=300_000)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save(draw(), CFG, tmp_path, shard_bytes=300_000)
    with pytest.raises(ValueError, match="part of another checkpoint"):
        save(draw(), CFG, tmp_path, shard_bytes=300_000)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["layers.0.ffn.w1", "layers.0.attn.wq_a"])
def test_released_formats_refuse_what_they_cannot_store(
    tmp_path: Path, name: str, value: float
) -> None:
    tensor = tree.paths(draw())[name].clone()
    tensor.view(-1)[5] = value
    broken = tree.replaced(draw(), {name: tensor})
    where = r"layers\.0\.(ffn\.experts\.0\.w1|attn\.wq_a)\.weight: it holds NaN or infinity"
    with pytest.raises(ValueError, match=where):
        save(broken, CFG, tmp_path, quantise=True)
    assert list(tmp_path.iterdir()) == []


# Arguments.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "hf"}, "family is 'hf'"),
        ({"dtype": torch.int32}, "dtype is torch.int32"),
        ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8_e4m3fn"),
        ({"shard_bytes": 0}, "shard_bytes is 0"),
        ({"quantise": True, "dtype": BF16}, "released format"),
        ({"quantise": True, "family": "transformers"}, "released format"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save(draw(), CFG, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_params_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="embed has shape"):
        save(draw(), dataclasses.replace(CFG, vocab=49), tmp_path)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    cfg = dataclasses.replace(CFG, expert_dim=48)
    with pytest.raises(ValueError, match="rows of 48 values cannot be stored as fp4"):
        save(draw(cfg), cfg, tmp_path / "new", quantise=True)
    assert not list((tmp_path / "new").glob("*"))
