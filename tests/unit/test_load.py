"""Loading what is right: names, formats, options. Spec section 14; faults F3 and F8.

Files are written by the safetensors library, an implementation that ours shares nothing with.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4 import table, tree
from dsv4.config import Config, hashed, kinds_of
from dsv4.params import Params
from runtime import load as loading
from runtime.load import inspect, load
from runtime.save import save
from tests.checkpoints import BASE

# 160 is a tile of 128 and a part of one, and puts w3 into the middle of a fused tile.
CFG = BASE
SMALL = dataclasses.replace(CFG, dim=32, expert_dim=32)
F32 = torch.float32


def draw(cfg: Config, dtype: torch.dtype = F32, seed: int = 0) -> Params:
    """Params in which no two tensors agree: also norms, biases and sinks are random."""
    g = torch.Generator().manual_seed(seed)

    def one(leaf: table.Leaf) -> Tensor:
        if leaf.role == "int32":
            return torch.randint(cfg.experts, leaf.shape, generator=g, dtype=torch.int32)
        values = torch.randn(leaf.shape, generator=g, dtype=torch.float64)
        return values.to(leaf.dtype(dtype))

    return tree.tmap(one, table.spec(cfg))


def same(a: Params, b: Params) -> bool:
    """Bit for bit, dtypes included."""
    left, right = tree.paths(a), tree.paths(b)
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and torch.equal(left[k], right[k]) for k in left
    )


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Pass a directory's one file through `edit`, a map of its tensors."""
    file = folder / "model.safetensors"
    save_file({k: v.clone() for k, v in edit(load_file(file)).items()}, file)
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Path:
    save(draw(SMALL), SMALL, tmp_path)
    return tmp_path


# The round trip.


@settings(max_examples=40)
@given(
    pattern=st.text("wch", min_size=1, max_size=4),
    hashes=st.integers(0, 4),
    mtp=st.integers(0, 1),
    experts=st.integers(2, 4),
    family=st.sampled_from(["official", "transformers"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, F32, torch.float64]),
    shard_bytes=st.sampled_from([1, 40_000, 10**9]),
    indexed=st.booleans(),
    prefix=st.booleans(),
    seed=st.integers(0, 99),
)
def test_saved_params_load_as_they_were(
    pattern: str,
    hashes: int,
    mtp: int,
    experts: int,
    family: str,
    dtype: torch.dtype,
    shard_bytes: int,
    indexed: bool,
    prefix: bool,
    seed: int,
) -> None:
    cfg = dataclasses.replace(
        SMALL,
        kinds=kinds_of(pattern),
        hash_layers=hashed(hashes, len(pattern)),
        mtp=mtp,
        experts=experts,
    )
    params = draw(cfg, dtype, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = save(params, cfg, folder, family=family, shard_bytes=shard_bytes)
        index = folder / "model.safetensors.index.json"
        assert index.exists() == (len(files) > 1)
        if prefix and len(files) == 1:
            bare = "model." if family == "official" else ""
            rewrite(folder, lambda t: {bare + k.removeprefix("model."): v for k, v in t.items()})
        if not indexed:
            index.unlink(missing_ok=True)
        one, report = load(folder, cfg, dtype, threads=1)
        many, _ = load(folder, cfg, dtype, threads=5)
        assert report == inspect(folder, cfg)
    assert same(one, params)
    assert same(many, params)
    assert report.faults() == {}
    assert report.skipped == ()


def test_a_wide_tensor_stays_wide_in_a_narrow_model(tmp_path: Path) -> None:
    params = draw(SMALL)
    save(params, SMALL, tmp_path)
    narrow, _ = load(tmp_path, SMALL, torch.bfloat16)
    for path, leaf in tree.paths(table.spec(SMALL)).items():
        ours = tree.paths(params)[path]
        assert torch.equal(tree.paths(narrow)[path], ours.to(leaf.dtype(torch.bfloat16))), path


# Formats, each against its formula in float64.


def fp4_value(code: int) -> float:
    """Spec 14.3: bit 3 the sign, bits 0 to 2 the magnitude."""
    return (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * (-1.0 if code & 8 else 1.0)


def fp8_value(byte: int) -> float:
    """Spec 14.2: sign, 4 exponent bits of bias 7, 3 mantissa bits; 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def grid(shape: tuple[int, ...], rows: int, cols: int) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))


def spread(scale: np.ndarray, shape: tuple[int, ...], rows: int, cols: int) -> np.ndarray:
    """scale[i // rows, j // cols] at every i, j."""
    i, j = np.arange(shape[-2]) // rows, np.arange(shape[-1]) // cols
    return scale[..., i[:, None], j[None, :]]


def random_scale(shape: tuple[int, ...], kind: str, rng: np.random.Generator):
    """A scale tensor of a kind, and its values in float64."""
    if kind == "F32":
        values = rng.uniform(0.01, 4, shape).astype(np.float32)
        return torch.from_numpy(values), values.astype(np.float64)
    exponents = rng.integers(100, 140, shape).astype(np.uint8)
    stored = torch.from_numpy(exponents)
    stored = stored if kind == "U8" else stored.view(torch.float8_e8m0fnu)
    return stored, 2.0 ** (exponents.astype(np.float64) - 127)


def random_fp8(shape: tuple[int, ...], tile: int, kind: str, rng: np.random.Generator):
    """Stored weight, stored scale, and the values in float64."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 127) == 127] = 0
    stored, scale = random_scale(grid(shape, tile, tile), kind, rng)
    values = np.vectorize(fp8_value, otypes=[float])(codes) * spread(scale, shape, tile, tile)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), stored, values


def random_fp4(shape: tuple[int, ...], kind: str, rng: np.random.Generator):
    """Stored weight, stored scale, and the values in float64. Column 2k is the low nibble."""
    packed = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
    stored, scale = random_scale(grid(shape, 1, 32), kind, rng)
    values = np.empty(shape)
    values[..., 0::2] = np.vectorize(fp4_value, otypes=[float])(packed & 15)
    values[..., 1::2] = np.vectorize(fp4_value, otypes=[float])(packed >> 4)
    return torch.from_numpy(packed), stored, values * spread(scale, shape, 1, 32)


def quantised(
    tensors: dict[str, Tensor], form: str, scales: str, tile: int, dots: dict[str, str]
) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Replace every quantisable matrix; the tensors, and what each must decode to."""
    rng, expected = np.random.default_rng(0), {}
    slots = {s.removeprefix("model.") for s in dots}
    made = dict(tensors)
    for name, values in tensors.items():
        if name.removeprefix("model.") not in slots:
            continue
        shape = tuple(values.shape)
        if "experts" in name and "shared" not in name and form != "fp8":
            stored, scale, expected[name] = random_fp4(shape, scales, rng)
            made[name] = stored.view(torch.int8) if form == "fp4" else stored
        else:
            made[name], scale, expected[name] = random_fp8(shape, tile, scales, rng)
        made[dots[name.removeprefix("model.")]] = scale
    return made, expected


def scale_names(cfg: Config, family: str, old: bool) -> dict[str, str]:
    """Stored weight -> stored scale, both without `model.`."""
    dots = {}
    for leaf in tree.leaves(table.spec(cfg)):
        if leaf.stored not in ("fp8", "fp4"):
            continue
        theirs = family == "transformers" and leaf.hf
        for x in range(leaf.shape[0]) if leaf.stacked and not theirs else (0,):
            name = (leaf.hf.removeprefix("model.") if theirs else leaf.official).replace(
                "{x}", str(x)
            )
            base = name.removesuffix("weight")
            new = base + "scale" if base != name else name + "_scale_inv"
            dots[name] = base + "weight_scale_inv" if old and base != name else new
    return dots


@pytest.mark.parametrize(
    ("family", "form", "scales", "tile", "old"),
    [
        ("official", "fp4", "F8_E8M0", 128, False),  # released
        ("official", "fp8", "F32", 128, False),  # Base: fp8 experts, float32 scales (F3)
        ("official", "fp4", "U8", 32, True),  # older names, e8m0 as bytes, V4.1's tiles
        ("official", "fp4 as u8", "F32", 32, False),
        ("transformers", "fp4", "F8_E8M0", 128, True),
        ("transformers", "fp8", "F32", 128, True),  # fused: w3 begins inside a tile
        ("transformers", "fp8", "F8_E8M0", 32, False),
    ],
)
def test_quantised_tensors_decode_to_their_formula(
    tmp_path: Path, family: str, form: str, scales: str, tile: int, old: bool
) -> None:
    params = draw(CFG, torch.bfloat16)
    save(params, CFG, tmp_path, family=family)
    expected: dict[str, np.ndarray] = {}

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made, values = quantised(tensors, form, scales, tile, scale_names(CFG, family, old))
        expected.update(values)
        return made

    rewrite(tmp_path, edit)
    got = tree.paths(load(tmp_path, CFG, F32)[0])
    # One rounding: of a float32 product, exact where the scale is a power of two.
    expected = {k.removeprefix("model."): v.astype(np.float32) for k, v in expected.items()}
    seen = 0
    for path, leaf in tree.paths(table.spec(CFG)).items():
        theirs = leaf.hf if family == "transformers" and leaf.hf else leaf.official
        for x in range(leaf.shape[0]) if leaf.stacked else (None,):
            want = expected.get(theirs.removeprefix("model.").replace("{x}", str(x)))
            if want is None:
                assert leaf.stored not in ("fp8", "fp4"), path
                continue
            if leaf.stacked and want.ndim == 3:
                want = want[x]
                want = want[slice(*leaf.hf_rows)] if leaf.hf_rows else want
            ours = got[path] if x is None else got[path][x]
            assert torch.equal(ours.reshape(want.shape), torch.from_numpy(want)), path
            seen += 1
    assert seen == sum(
        leaf.shape[0] if leaf.stacked else 1
        for leaf in tree.leaves(table.spec(CFG))
        if leaf.stored in ("fp8", "fp4")
    )


def test_every_code_decodes(written: Path) -> None:
    """All 256 bytes, as fp8 and as two fp4 values; the fp8 NaN codes stay NaN."""
    codes = np.arange(256, dtype=np.uint8)
    raw = torch.from_numpy(codes)
    ones = torch.full((32, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    more = {
        "layers.1.attn.wkv.weight": raw.repeat(4).view(32, 32).view(torch.float8_e4m3fn),
        "layers.1.attn.wkv.scale": ones[:1].clone(),
        "layers.1.ffn.experts.2.w1.weight": raw.repeat(2).view(32, 16).view(torch.int8),
        "layers.1.ffn.experts.2.w1.scale": ones,
    }
    layer = load(rewrite(written, lambda t: t | more), SMALL, F32)[0].layers[1]
    eights = [fp8_value(int(b)) if b & 127 != 127 else np.nan for b in codes] * 4
    np.testing.assert_array_equal(layer.attn.wkv.flatten().numpy(), eights)
    fours = [fp4_value(int(c)) for b in codes for c in (b & 15, b >> 4)] * 2
    np.testing.assert_array_equal(layer.ffn.w1[2].flatten().numpy(), fours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32, torch.float64])
def test_any_plain_dtype_is_read(written: Path, dtype: torch.dtype) -> None:
    before = load_file(written / "model.safetensors")["layers.0.attn.wq_a.weight"]
    rewrite(
        written, lambda t: {k: v.to(dtype) if v.is_floating_point() else v for k, v in t.items()}
    )
    got, report = load(written, SMALL, F32)
    assert torch.equal(got.layers[0].attn.wq_a, before.to(dtype).float())
    names = {torch.bfloat16: "bf16", torch.float16: "f16", F32: "f32", torch.float64: "f64"}
    assert {use.stored for use in report.used} == {names[dtype], "int"}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    ],
)
def test_any_integer_table_is_read(written: Path, dtype: torch.dtype) -> None:
    name = "layers.0.ffn.gate.tid2eid"
    rewrite(written, lambda t: t | {name: t[name].to(dtype)})
    assert same(load(written, SMALL, F32)[0], draw(SMALL))


def test_tensors_need_not_be_aligned(written: Path) -> None:
    file = written / "model.safetensors"
    tensors = load_file(file)
    header, data = {}, b"\0"
    header["rotary.odd"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    codes = {torch.float32: "F32", torch.int64: "I64"}
    for name, t in tensors.items():
        raw = t.contiguous().view(torch.uint8).numpy().tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": codes[t.dtype], "shape": list(t.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert same(load(written, SMALL, F32)[0], draw(SMALL))


# Names.


def test_older_names_are_read(written: Path) -> None:
    old = "e_score_correction_bias"
    rewrite(
        written, lambda t: {k.replace("ffn.gate.bias", f"ffn.gate.{old}"): v for k, v in t.items()}
    )
    assert any(old in use.tensor for use in inspect(written, SMALL).used)
    assert same(load(written, SMALL, F32)[0], draw(SMALL))


def test_a_file_may_mix_the_families(tmp_path: Path) -> None:
    save(draw(SMALL), SMALL, tmp_path / "a")
    save(draw(SMALL), SMALL, tmp_path / "b", family="transformers")
    theirs = load_file(tmp_path / "b" / "model.safetensors")

    def edit(t: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {k: v for k, v in t.items() if not k.startswith(("layers.1.", "embed"))}
        return kept | {k: v for k, v in theirs.items() if "layers.1." in k or "embed" in k}

    got, report = load(rewrite(tmp_path / "a", edit), SMALL, F32)
    assert same(got, draw(SMALL))
    assert report.family == "mixed"


def test_the_family_is_told(tmp_path: Path) -> None:
    for family in ("official", "transformers"):
        save(draw(SMALL), SMALL, tmp_path / family, family=family)
        no_drafts = inspect(tmp_path / family, SMALL, drafts=False)
        assert no_drafts.family == family


# What is left aside, with the reason.

_DRAFT = "mtp.0.attn.wq_a.weight"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layers.0.ffn.gate.bias", "hash-routed"),  # F1
        ("model.layers.0.mlp.gate.e_score_correction_bias", "hash-routed"),  # F1
        ("layers.0.ffn.gate.e_score_correction_bias", "hash-routed"),  # F1
        ("mtp.1.attn.wq_a.weight", "stage 1"),
        ("mtp.2.markov_head.markov_w1.weight", "stage 2"),
        ("mtp.0.emb.tok_emb.weight", "a copy"),
        ("mtp.0.embed.weight", "a copy"),
        ("mtp.0.head.weight", "a copy"),
        ("model.rotary_emb.inv_freq", "rotary"),
        ("model.layers.1.self_attn.rotary_emb.main_inv_freq", "rotary"),
        ("layers.0.attn.rotary.cos", "rotary"),
        ("layers.0.attn.freqs_cis", "rotary"),
    ],
)
def test_harmless_tensors_are_skipped_with_a_reason(written: Path, name: str, reason: str) -> None:
    rewrite(written, lambda t: t | {name: torch.zeros(SMALL.experts)})
    got, report = load(written, SMALL, F32)
    assert same(got, draw(SMALL))
    [skipped] = report.skipped
    assert (skipped.file, skipped.tensor) == ("model.safetensors", name)
    assert reason in skipped.detail
    assert reason in report.summary()


def test_drafts_can_be_left_out(written: Path) -> None:
    whole = draw(SMALL)
    without = dataclasses.replace(SMALL, mtp=0)
    for got, report in (
        load(written, SMALL, F32, drafts=False),
        load(written, without, F32),
    ):
        assert got.mtp is None
        assert same(got, dataclasses.replace(whole, mtp=None))
        assert len(report.skipped) == sum(
            leaf.shape[0] if leaf.stacked else 1 for leaf in tree.leaves(table.spec(SMALL).mtp)
        )
        assert {fault.detail for fault in report.skipped} == {"drafts are off"}


def test_a_backbone_alone_says_how_to_load_it(tmp_path: Path) -> None:
    without = dataclasses.replace(SMALL, mtp=0)
    save(draw(without), without, tmp_path)
    with pytest.raises(loading.CheckpointError, match="drafts=False loads the rest"):
        load(tmp_path, SMALL, F32)
    assert same(load(tmp_path, SMALL, F32, drafts=False)[0], draw(without))


def test_dspark_stages_say_what_they_are(tmp_path: Path) -> None:
    without = dataclasses.replace(SMALL, mtp=0)
    save(draw(without), without, tmp_path)
    rewrite(tmp_path, lambda t: t | {"mtp.0.main_norm.weight": torch.ones(SMALL.dim)})
    with pytest.raises(loading.CheckpointError, match="DSpark"):
        load(tmp_path, SMALL, F32)
    load(tmp_path, SMALL, F32, drafts=False)


# The rest of the interface.


def test_progress_is_told_from_one_thread_and_ends_at_the_total(written: Path) -> None:
    told: list[tuple[int, int, str]] = []
    _, report = load(written, SMALL, F32, progress=lambda *now: told.append(now))
    done = [d for d, _, _ in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][1] == report.num_bytes
    assert {name for _, _, name in told} == {use.tensor for use in report.used}


def test_a_failing_progress_stops_the_load(written: Path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(written, SMALL, F32, progress=stop)


def test_torch_keeps_its_threads(written: Path) -> None:
    torch.set_num_threads(2)
    try:
        load(written, SMALL, F32)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_report_is_json(written: Path) -> None:
    report = inspect(written, SMALL)
    made = json.loads(json.dumps(report.as_dict()))
    assert len(made["used"]) == len(load_file(written / "model.safetensors"))
    assert made["bytes"] == sum(use["num_bytes"] for use in made["used"])
    assert f"used: {len(made['used'])} tensors" in report.summary()


def test_the_number_of_tensors_is_that_of_the_table(tmp_path: Path) -> None:
    save(draw(CFG), CFG, tmp_path, quantise=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) == table.official_tensors(table.spec(CFG))
    assert len(inspect(tmp_path, CFG).used) == sum("scale" not in n or "hc" in n for n in stored)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8_e4m3fn"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_options_out_of_range_are_refused(written: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(written, SMALL, options.pop("dtype", F32), **options)


def test_the_level_of_the_config_does_not_matter(written: Path) -> None:
    """F8: a nested `text_config` is `dsv4.config_json`'s concern; the loader sees one `Config`."""
    assert inspect(written, dataclasses.replace(SMALL)) == inspect(written, SMALL)
