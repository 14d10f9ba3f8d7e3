"""Loading what is wrong: each refused with file and tensor, before anything is allocated.

Faults F1, F2, F3 and F6 of the reported cases. Bits that flip in the tensors' data are not here:
the format has no checksum, so that they cannot be seen.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4 import table, tree
from dsv4.config import hashed, kinds_of
from dsv4.params import Params
from runtime import headers
from runtime.headers import INDEX
from runtime.load import CheckpointError, inspect, load
from runtime.save import save
from tests.checkpoints import BASE

CFG = dataclasses.replace(
    BASE, dim=64, expert_dim=32, kinds=kinds_of("wc"), hash_layers=hashed(1, 2)
)
ONE = "model.safetensors"
WQ_A = "layers.1.attn.wq_a.weight"
W1 = "layers.1.ffn.experts.2.w1.weight"
IDS = "layers.0.ffn.gate.tid2eid"

Tensors = dict[str, Tensor]
Header = dict[str, Any]


def draw() -> Params:
    params = table.init(CFG, torch.Generator().manual_seed(0))
    return tree.tmap(lambda t: t + 1 if t.is_floating_point() else t, params)


def scale_of(weight: str) -> str:
    return weight.removesuffix("weight") + "scale"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once: `plain`, `released` (fp8 and fp4), `sharded`."""
    folder = tmp_path_factory.mktemp("kept")
    save(draw(), CFG, folder / "plain")
    save(draw(), CFG, folder / "released", quantise=True)
    save(draw(), CFG, folder / "sharded", shard_bytes=200_000)
    return folder


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda form: Path(shutil.copytree(kept / form, tmp_path / form))


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Change the tensors of a one-file checkpoint."""
    file = folder / ONE
    save_file({k: v.clone() for k, v in change(load_file(file)).items()}, file)
    return folder


def split(data: bytes) -> tuple[Header, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: Header | bytes, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def surgery(folder: Path, change: Callable[[Header], Header | bytes]) -> Path:
    """Change the header of a one-file checkpoint, and leave the data alone."""
    file = folder / ONE
    header, data = split(file.read_bytes())
    file.write_bytes(join(change(header), data))
    return folder


def entry(name: str, **fields: Any) -> Callable[[Header], Header]:
    return lambda header: header | {name: header[name] | fields}


def refused(folder: Path, *told: str, strict: bool = True) -> str:
    """The message, which must hold every part; nothing may be allocated before it."""
    with pytest.MonkeyPatch.context() as patch:

        def allocate(*_: object, **__: object) -> None:
            raise AssertionError("allocated")

        patch.setattr(torch, "empty", allocate)
        with pytest.raises(CheckpointError) as caught:
            load(folder, CFG, torch.float32, strict=strict)
    message = str(caught.value)
    for part in told:
        assert part in message, message
    return message


def loads(folder: Path, *, strict: bool = True) -> Params:
    return load(folder, CFG, torch.float32, strict=strict)[0]


def same(a: Params, b: Params) -> bool:
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


# Directories.


def test_a_path_without_a_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "does not exist")
    refused(tmp_path, str(tmp_path), "no *.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pickles only (pytorch_model.bin)", "convert them to safetensors")
    refused(tmp_path / "pytorch_model.bin", "is a file; name the directory")


def test_inspect_raises_only_without_anything_to_look_at(
    tmp_path: Path, copy: Callable[[str], Path]
) -> None:
    with pytest.raises(CheckpointError):
        inspect(tmp_path, CFG)
    folder = copy("plain")
    (folder / ONE).write_bytes(b"")
    report = inspect(folder, CFG)
    assert [fault.file for fault in report.broken] == [ONE]
    assert "truncated" in report.summary()


# Files.


@pytest.mark.parametrize("kept_bytes", [0, 5, 8, 100, 3000, -1, -50_000])
def test_a_truncated_file(copy: Callable[[str], Path], kept_bytes: int) -> None:
    folder = copy("plain")
    data = (folder / ONE).read_bytes()
    (folder / ONE).write_bytes(data[:kept_bytes])
    message = refused(folder, ONE, "truncated")
    if kept_bytes < 0:  # the header is whole: the tensor that was cut is named
        header, _ = split(data)
        last = max(header, key=lambda n: header[n].get("data_offsets", [0, 0])[1])
        assert kept_bytes != -1 or last in message
    refused(folder, ONE, strict=False)


@pytest.mark.parametrize("length", [0, 1, 100, 2**40, 2**63, 2**64 - 1])
def test_a_header_length_that_lies(copy: Callable[[str], Path], length: int) -> None:
    folder = copy("plain")
    header, data = split((folder / ONE).read_bytes())
    (folder / ONE).write_bytes(join(header, data, length))
    refused(folder, ONE)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "JSON is damaged"),
        (b"[]", "not an object"),
        (b"{", "JSON is damaged"),
        (b"\xff\xfe{}", "JSON is damaged"),
        (b"[" * 200_000, "JSON is damaged"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON is damaged"),
        (b'{"a": 1, "a": 2}', "named twice"),
        (b'{"a": 1}', "a: its entry must hold"),
        (b"{}", "holds no tensor"),
        (b'{"\\ud800": 1}', "ud800: its entry"),
    ],
)
def test_a_header_that_is_no_header(copy: Callable[[str], Path], text: bytes, told: str) -> None:
    message = refused(surgery(copy("plain"), lambda _: text), ONE, told)
    message.encode("ascii")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"dtype": 3}, "dtype is not a string"),
        ({"shape": None}, "shape is not a list"),
        ({"shape": [32, -64]}, "shape is not a list"),
        ({"shape": [32, 64.0]}, "shape is not a list"),
        ({"shape": [True, 2048]}, "shape is not a list"),
        ({"shape": [32, 65]}, "needs 8320 bytes"),
        ({"data_offsets": [0]}, "data_offsets are not"),
        ({"data_offsets": [0, "8192"]}, "data_offsets are not"),
        ({"data_offsets": [8192, 0]}, "needs 8192 bytes, not -8192"),
        ({"data_offsets": [0, 8192]}, "starts at byte"),
        ({"data_offsets": [2**62, 2**62 + 8192]}, "starts at byte"),
        ({"extra": 1}, "its entry must hold"),
    ],
)
def test_an_entry_that_contradicts_itself(
    copy: Callable[[str], Path], fields: Header, told: str
) -> None:
    # A tensor out of place is reported under the first name that does not follow the one before.
    message = refused(surgery(copy("plain"), entry(WQ_A, **fields)), ONE, told)
    assert WQ_A in message or told == "starts at byte"


def test_bytes_that_no_tensor_owns(copy: Callable[[str], Path]) -> None:
    folder = copy("plain")
    with (folder / ONE).open("ab") as f:
        f.write(b"12")
    refused(folder, ONE, "2 bytes follow this last tensor")


def test_files_that_are_none(copy: Callable[[str], Path]) -> None:
    folder = copy("plain")
    (folder / ONE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(folder, ONE, "Git LFS pointer")
    (folder / ONE).unlink()
    (folder / ONE).symlink_to(folder / "gone")
    refused(folder, ONE, "is not a file")


def test_a_file_that_cannot_be_read(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    folder = copy("plain")
    monkeypatch.setattr(Path, "open", deny)
    refused(folder, ONE, "cannot be read", "Permission denied")


def test_a_file_that_shrinks_after_its_header_was_read(copy: Callable[[str], Path]) -> None:
    folder = copy("plain")
    data = (folder / ONE).read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        empty = torch.empty

        def shrink(*args: Any, **rest: Any) -> Tensor:
            (folder / ONE).write_bytes(data[:4000])
            return empty(*args, **rest)

        patch.setattr(torch, "empty", shrink)
        with pytest.raises(CheckpointError, match="cannot be mapped"):
            load(folder, CFG, torch.float32)


# Shards and the index.


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def reindex(folder: Path, change: Callable[[dict[str, str]], object]) -> Path:
    index = json.loads((folder / INDEX).read_text())
    made = change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": made}))
    return folder


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard(copy: Callable[[str], Path], indexed: bool) -> None:
    folder = copy("sharded")
    gone = shards(folder)[1]
    first = next(iter(load_file(gone)))
    gone.unlink()
    if not indexed:
        (folder / INDEX).unlink()
    message = refused(folder, gone.name, "is missing")
    if indexed:
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        assert index[first] == gone.name
        assert any(n in message for n, f in index.items() if f == gone.name)


def test_an_index_that_names_what_is_not_there(copy: Callable[[str], Path]) -> None:
    folder = reindex(copy("sharded"), lambda m: m | {"ghost.weight": "model-9.safetensors"})
    refused(folder, "model-9.safetensors", "ghost.weight", "not there")
    name = shards(folder)[0].name
    folder = reindex(folder, lambda m: {k: v for k, v in m.items() if k != "ghost.weight"})
    loads(folder)
    reindex(folder, lambda m: m | {"ghost.weight": name})
    refused(folder, name, "ghost.weight", "does not hold it")


def test_an_index_that_leaves_a_tensor_out(copy: Callable[[str], Path]) -> None:
    folder = reindex(copy("sharded"), lambda m: {k: v for k, v in m.items() if k != WQ_A})
    refused(folder, WQ_A, "does not name it")
    assert same(loads(folder, strict=False), draw())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"{", "JSON is damaged"),
        (b"\xff", "JSON is damaged"),
        (b"[]", "not an object"),
        (b"{}", "weight_map must map"),
        (b'{"weight_map": []}', "weight_map must map"),
        (b'{"weight_map": {"a": 1}}', "weight_map must map"),
        (b'{"weight_map": {"a": "../a.safetensors"}}', "a: ../a.safetensors is not a file name"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "is not a file name"),
        (b'{"weight_map": {"a": "b\\\\c"}}', "is not a file name"),
        (b'{"weight_map": {"a": ""}}', "is not a file name"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "named twice"),
    ],
)
def test_an_index_that_is_no_index(copy: Callable[[str], Path], text: bytes, told: str) -> None:
    folder = copy("plain")
    (folder / INDEX).write_bytes(text)
    refused(folder, INDEX, told)


def test_a_tensor_in_two_files(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    (folder / INDEX).unlink()
    first, second = shards(folder)[:2]
    name, values = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: values}, second)
    refused(folder, f"{second.name}: {name}", f"also stands in {first.name}", strict=False)


def test_a_tensor_under_two_names(copy: Callable[[str], Path]) -> None:
    for alias in (f"model.{WQ_A}", "layers.1.self_attn.q_a_proj.weight"):
        folder = edit(copy("plain"), lambda t, alias=alias: t | {alias: t[WQ_A]})
        refused(folder, "also stands in", WQ_A, alias)
        shutil.rmtree(folder)


def test_an_expert_that_stands_twice(copy: Callable[[str], Path]) -> None:
    """Once in its own tensor, once in the fused one."""
    fused = torch.zeros(CFG.experts, CFG.dim, CFG.expert_dim)
    name = "layers.1.mlp.experts.down_proj"
    refused(edit(copy("plain"), lambda t: t | {name: fused}), name, "layers.1.ffn.experts")


# Tensors.


def test_a_missing_tensor(copy: Callable[[str], Path]) -> None:
    folder = edit(copy("plain"), lambda t: {k: v for k, v in t.items() if k != WQ_A})
    for strict in (True, False):
        refused(folder, "missing (1)", WQ_A, "q_a_proj", strict=strict)


def test_a_missing_expert_is_named(copy: Callable[[str], Path]) -> None:
    folder = edit(copy("plain"), lambda t: {k: v for k, v in t.items() if k != W1})
    refused(folder, W1, "expert 2 of 3 of layers.1.ffn.w1")


@pytest.mark.parametrize("number", ["3", "02", "-1", "x", "+1"])
def test_an_expert_too_many_is_named(copy: Callable[[str], Path], number: str) -> None:
    name = W1.replace(".2.", f".{number}.")
    folder = edit(copy("plain"), lambda t: t | {name: t[W1]})
    refused(folder, "unexpected (1)", ONE, name, "strict=False ignores them")
    assert same(loads(folder, strict=False), draw())


def test_an_expert_named_twice_in_one_header(copy: Callable[[str], Path]) -> None:
    def twice(header: Header) -> bytes:
        text = json.dumps(header)
        return text.replace("experts.1.w1.weight", "experts.2.w1.weight", 1).encode()

    refused(surgery(copy("plain"), twice), "experts.2.w1.weight is named twice")


@pytest.mark.parametrize(
    "name", ["layers.2.attn_norm.weight", "vision.patch.weight", "layers.1.ffn.gate.tid2eid", "x"]
)
def test_an_unexpected_tensor(copy: Callable[[str], Path], name: str) -> None:
    folder = edit(copy("plain"), lambda t: t | {name: torch.zeros(3)})
    refused(folder, "unexpected (1)", f"{ONE}: {name}: no parameter has this name")
    assert same(loads(folder, strict=False), draw())


def test_only_the_first_names_of_many_are_told(copy: Callable[[str], Path]) -> None:
    folder = edit(copy("plain"), lambda t: t | {f"x{i:02}": torch.zeros(1) for i in range(30)})
    message = refused(folder, "unexpected (30)", "x19", "and 10 more")
    assert "x20" not in message


def test_a_wrong_shape(copy: Callable[[str], Path]) -> None:
    for name, told in ((WQ_A, "[64, 32], not [32, 64]"), (W1, "[64, 32], not [32, 64]")):
        folder = edit(copy("plain"), lambda t, name=name: t | {name: t[name].T.contiguous()})
        refused(folder, "wrong shape (1)", f"{ONE}: {name}: is {told}", strict=False)
        shutil.rmtree(folder)


def test_grouped_weights_are_not_taken_apart(copy: Callable[[str], Path]) -> None:
    name = "layers.1.attn.wo_a.weight"
    refused(edit(copy("plain"), lambda t: t | {name: t[name].unflatten(0, (2, 16))}), name)


@pytest.mark.parametrize(
    ("name", "dtype", "told"),
    [
        (WQ_A, torch.int32, "is I32"),
        (WQ_A, torch.bool, "is BOOL"),
        (WQ_A, torch.int8, "one int8 a value (W8A8)"),
        (WQ_A, torch.float8_e5m2, "is F8_E5M2"),
        (WQ_A, torch.complex64, "is C64"),
        ("norm.weight", torch.float8_e4m3fn, "is F8_E4M3"),
        ("norm.weight", torch.int8, "is I8"),
        (IDS, torch.float32, "is F32"),
        (IDS, torch.bool, "is BOOL"),
    ],
)
def test_a_wrong_dtype(
    copy: Callable[[str], Path], name: str, dtype: torch.dtype, told: str
) -> None:
    folder = edit(copy("plain"), lambda t: t | {name: t[name].to(dtype)})
    refused(folder, "wrong dtype (1)", f"{ONE}: {name}", told, "allowed: BF16", strict=False)


def test_an_unknown_dtype(copy: Callable[[str], Path]) -> None:
    for dtype in ("F31", "f32", "F128", "\ud800"):
        folder = surgery(copy("plain"), entry(WQ_A, dtype=dtype))
        refused(folder, ONE, WQ_A, f"is {headers.shown(dtype)}").encode("ascii")
        shutil.rmtree(folder)


# Scales.


def test_the_released_format_loads(copy: Callable[[str], Path]) -> None:
    loads(copy("released"))


@pytest.mark.parametrize("weight", [WQ_A, W1, "layers.1.attn.indexer.wq_b.weight"])
def test_a_missing_scale(copy: Callable[[str], Path], weight: str) -> None:
    """F2 (the indexer's), F3: the scale is named before anything is loaded."""
    scale = scale_of(weight)
    folder = edit(copy("released"), lambda t: {k: v for k, v in t.items() if k != scale})
    refused(folder, "missing (1)", f"{ONE}: {scale}: the scale of a tensor", strict=False)


@pytest.mark.parametrize("weight", [WQ_A, W1])
def test_a_scale_whose_weight_is_plain(copy: Callable[[str], Path], weight: str) -> None:
    """F3: a scale that would silently not be applied."""
    plain = load_file(copy("plain") / ONE)[weight]
    folder = edit(copy("released"), lambda t: t | {weight: plain})
    refused(folder, scale_of(weight), "a scale, but its weight is plain F32", strict=False)


def test_a_scale_without_a_weight(copy: Callable[[str], Path]) -> None:
    """F2, F3."""
    folder = edit(copy("released"), lambda t: {k: v for k, v in t.items() if k != WQ_A})
    refused(folder, scale_of(WQ_A), "a scale without its weight", f"{WQ_A}: layers.1.attn.wq_a")
    shutil.rmtree(folder)
    for name in ("layers.1.attn.compressor.wkv.weight_scale", "layers.1.attn.wkv.weight_offset"):
        folder = edit(copy("plain"), lambda t, name=name: t | {name: torch.ones(64, 1)})
        refused(folder, name, "ModelSlim W8A8")  # F2, F6
        shutil.rmtree(folder)
    folder = edit(copy("plain"), lambda t: t | {"layers.9.attn.wkv.scale": torch.ones(1, 1)})
    refused(folder, "layers.9.attn.wkv.scale", "a scale without its weight")


@pytest.mark.parametrize(
    ("weight", "shape", "told"),
    [
        (WQ_A, (1, 3), "not [1, 1] or [1, 2]"),
        (WQ_A, (2, 1), "not [1, 1] or [1, 2]"),
        (WQ_A, (1,), "not [1, 1] or [1, 2]"),
        (W1, (32, 1), "not [32, 2]"),
        (W1, (1, 2), "not [32, 2]"),
    ],
)
def test_a_scale_of_wrong_shape(
    copy: Callable[[str], Path], weight: str, shape: tuple[int, ...], told: str
) -> None:
    folder = edit(copy("released"), lambda t: t | {scale_of(weight): torch.ones(shape)})
    message = refused(folder, "wrong shape (1)", f"{ONE}: {scale_of(weight)}", strict=False)
    assert told in message


def test_a_scale_of_wrong_dtype(copy: Callable[[str], Path]) -> None:
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    folder = edit(copy("released"), lambda t: t | {scale_of(WQ_A): ones})
    refused(folder, scale_of(WQ_A), "a scale of BF16", strict=False)


def test_two_scales(copy: Callable[[str], Path]) -> None:
    other = WQ_A + "_scale_inv"
    folder = edit(copy("released"), lambda t: t | {other: t[scale_of(WQ_A)]})
    refused(folder, other, scale_of(WQ_A), "also stands in")


@pytest.mark.parametrize("weight", [WQ_A, W1])
@pytest.mark.parametrize("value", ["e8m0 255", "nan", "inf", "-inf"])
def test_a_scale_that_is_not_a_number(copy: Callable[[str], Path], weight: str, value: str) -> None:
    """Seen when it is read: the headers cannot tell."""
    name = scale_of(weight)

    def damage(tensors: Tensors) -> Tensors:
        scale = tensors[name].clone()
        if value == "e8m0 255":
            scale.view(torch.uint8)[-1, -1] = 255
        else:
            scale = scale.float()
            scale[-1, -1] = float(value)
        return tensors | {name: scale}

    folder = edit(copy("released"), damage)
    at = [31, 1] if weight == W1 else [0, 0]
    with pytest.raises(CheckpointError) as caught:
        load(folder, CFG, torch.float32)
    for part in (ONE, name, "1 scales are NaN or infinite", str(at)):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [-1, CFG.experts, 2**31, 2**62])
def test_an_expert_id_out_of_range(copy: Callable[[str], Path], value: int) -> None:
    def damage(tensors: Tensors) -> Tensors:
        tensors[IDS][-1, -1] = value
        return tensors

    folder = edit(copy("plain"), damage)
    with pytest.raises(CheckpointError, match=r"tid2eid: holds expert ids .*0 to 2 exist"):
        load(folder, CFG, torch.float32)


def test_a_huge_unsigned_id_is_out_of_range(copy: Callable[[str], Path]) -> None:
    def damage(tensors: Tensors) -> Tensors:
        ids = tensors[IDS]
        ids[0, 0] = -1
        return tensors | {IDS: ids.view(torch.uint64)}

    with pytest.raises(CheckpointError, match="tid2eid: holds expert ids"):
        loads(edit(copy("plain"), damage))


def test_the_correction_bias_of_a_hash_layer_is_no_error(copy: Callable[[str], Path]) -> None:
    """F1, and its contrary: on a layer that picks by score, its absence is an error."""
    name = "layers.0.ffn.gate.bias"
    folder = edit(copy("plain"), lambda t: t | {name: torch.zeros(CFG.experts)})
    assert [fault.tensor for fault in inspect(folder, CFG).skipped] == [name]
    assert same(loads(folder), draw())
    name = "layers.1.ffn.gate.bias"
    edit(folder, lambda t: {k: v for k, v in t.items() if k != name})
    refused(folder, "missing (1)", name)


def test_every_fault_is_told_at_once(copy: Callable[[str], Path]) -> None:
    def damage(tensors: Tensors) -> Tensors:
        del tensors["norm.weight"]
        tensors[WQ_A] = tensors[WQ_A][:3]
        tensors[IDS] = tensors[IDS].float()
        return tensors | {"x": torch.zeros(1)}

    folder = edit(copy("plain"), damage)
    refused(folder, "norm.weight", WQ_A, IDS, f"{ONE}: x")
    report = inspect(folder, CFG)
    kinds = ("missing", "wrong_shape", "wrong_dtype", "unexpected")
    assert [len(getattr(report, kind)) for kind in kinds] == [1, 1, 1, 1]


# Damage at random.


def outcome(folder: Path) -> str:
    """Refused, or loaded as if nothing had happened; anything else is a failure."""
    try:
        got, _ = load(folder, CFG, torch.float32, threads=1)
    except CheckpointError as error:
        str(error).encode("ascii")
        return "refused"
    assert same(got, draw()), "loaded, but other parameters"
    return "loaded"


@pytest.fixture(scope="module")
def plain_bytes(kept: Path) -> bytes:
    return (kept / "plain" / ONE).read_bytes()


@settings(max_examples=200)
@given(data=st.data())
def test_flipped_bytes_in_the_header_never_go_unnoticed(
    plain_bytes: bytes, data: st.DataObject
) -> None:
    """What still loads must be the same parameters: a flip in white space or in the metadata."""
    end = 8 + int.from_bytes(plain_bytes[:8], "little")
    damaged = bytearray(plain_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1) | st.integers(0, 300))
        damaged[at] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / ONE).write_bytes(damaged)
        outcome(Path(name))


@settings(max_examples=50)
@given(data=st.data())
def test_a_file_cut_or_spliced_anywhere_is_refused(plain_bytes: bytes, data: st.DataObject) -> None:
    a = data.draw(st.integers(0, len(plain_bytes) - 1))
    b = data.draw(st.integers(a + 1, len(plain_bytes)))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / ONE).write_bytes(plain_bytes[:a] + plain_bytes[b:])
        assert outcome(Path(name)) == "refused"


@settings(max_examples=50)
@given(data=st.data())
def test_flipped_bytes_in_the_index_never_go_unnoticed(kept: Path, data: st.DataObject) -> None:
    good = (kept / "sharded" / INDEX).read_bytes()
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as name:
        for file in shards(kept / "sharded"):
            (Path(name) / file.name).symlink_to(file)
        (Path(name) / INDEX).write_bytes(damaged)
        outcome(Path(name))
