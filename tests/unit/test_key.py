"""A key: everything that can change what a compiler writes changes its digest."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiler import key_parts
from compiler.key import Key, digest_of
from compiler.key_parts import package_folders, process_parts, source_digest
from dsv4.config import Kind, preset

ROOT = Path(__file__).resolve().parents[2]


def test_the_digest_is_sha256_of_the_sorted_parts() -> None:
    """By another program: the digest is what the file name says, on every machine."""
    key = Key.of({"dtype": "bfloat16"}, {"bucket": "8"})
    text = json.dumps({"bucket": "8", "dtype": "bfloat16"}, separators=(",", ":"))
    done = subprocess.run(["sha256sum"], input=text, capture_output=True, text=True, check=True)
    assert key.digest == done.stdout.split()[0]
    assert Key.of({"bucket": "8", "dtype": "bfloat16"}).digest == key.digest
    assert key.parts == (("dtype", "bfloat16"), ("bucket", "8"))
    assert key["bucket"] == "8"


def test_every_part_counts() -> None:
    parts = {**process_parts("inductor", "1"), "dtype": "bfloat16", "bucket": "8", "mesh": "1"}
    digests = {Key.of(parts).digest}
    digests |= {Key.of({**parts, name: parts[name] + "x"}).digest for name in parts}
    digests |= {Key.of({n: v for n, v in parts.items() if n != name}).digest for name in parts}
    digests |= {Key.of({**parts, "bucket": "mesh", "mesh": "8"}).digest}
    assert len(digests) == 2 * len(parts) + 2


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ((("a", "1"), ("a", "1")), "'a' is given twice"),
        ((("a", 1),), "'a' is 1; names and values are strings"),
        ((("", "1"),), "'' is '1'"),
    ],
)
def test_what_is_no_key(parts: tuple[tuple[str, str], ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Key(parts)
    with pytest.raises(ValueError, match="given twice"):
        Key.of({"a": "1"}, {"a": "2"})


def test_a_config_has_a_digest_of_all_its_fields() -> None:
    cfg = preset("tiny")
    changed = [
        cfg,
        preset("flash"),
        dataclasses.replace(cfg, mtp=0),
        dataclasses.replace(cfg, norm_eps=cfg.norm_eps * (1 + 2**-52)),
        dataclasses.replace(cfg, bos=None),
        dataclasses.replace(cfg, kinds=(Kind.WINDOW,) * cfg.layers),
    ]
    assert len({digest_of(c) for c in changed}) == len(changed)
    assert digest_of(dataclasses.replace(cfg)) == digest_of(cfg)
    assert digest_of(cfg.plans) != digest_of(cfg.plans[::-1])


def test_a_config_digest_is_the_same_in_every_process() -> None:
    script = (
        "from compiler.key import digest_of; from dsv4.config import preset;"
        "print(digest_of(preset('tiny')))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest_of(preset("tiny"))


def test_values_of_other_types_are_other_values() -> None:
    values = [
        1,
        1.0,
        True,
        "1",
        (1,),
        ((1,),),
        None,
        "null",
        (),
        "tuple",
        ("tuple",),
        Kind.CSA,
        math.inf,
    ]
    assert len({digest_of(v) for v in values}) == len(values)


def test_records_of_other_classes_are_other_records() -> None:
    one = dataclasses.make_dataclass("One", [("x", int)])
    two = dataclasses.make_dataclass("Two", [("x", int)])
    renamed = dataclasses.make_dataclass("One", [("y", int)])
    assert len({digest_of(made(1)) for made in (one, two, renamed)}) == 3
    assert digest_of(dataclasses.make_dataclass("One", [("x", int)])(1)) == digest_of(one(1))


@pytest.mark.parametrize("value", [{1}, object(), len, (1, {2})])
def test_a_value_without_stable_text_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="no stable text"):
        digest_of(value)


# The process.


def test_process_parts_are_named_text() -> None:
    parts = process_parts("inductor", "7")
    assert list(parts) == [
        "backend", "backend version", "torch", "python", "platform", "sources", "cpu",
        "compiler", "threads",
    ]  # fmt: skip
    assert parts["torch"].startswith(f"{torch.__version__} ")
    assert parts["threads"] == str(torch.get_num_threads())
    assert process_parts("inductor", "7") == parts
    Key.of(parts)


def test_threads_are_those_of_now() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert process_parts("inductor", "7")["threads"] == str(before + 1)
    finally:
        torch.set_num_threads(before)


def test_the_four_packages_are_these() -> None:
    folders = package_folders()
    assert folders == {p: ROOT / p for p in ("dsv4", "compiler", "runtime", "registry")}
    with pytest.raises(ValueError, match="'dsv4_absent' is not found"):
        package_folders(("dsv4", "dsv4_absent"))
    with pytest.raises(ValueError, match="'tests' is not found"):  # a folder that is no package
        package_folders(("tests",))
    with pytest.raises(ValueError, match="'keyword' is not found"):  # a module
        package_folders(("keyword",))


def tree(root: Path) -> dict[str, Path]:
    for name in ("a", "b"):
        (root / name / "deep").mkdir(parents=True)
        (root / name / "x.py").write_text("1\n")
        (root / name / "deep" / "y.cpp").write_text("2\n")
        (root / name / "notes.md").write_text("3\n")
    return {"a": root / "a", "b": root / "b"}


def test_a_changed_source_is_another_digest(tmp_path: Path) -> None:
    folders = tree(tmp_path)
    first = source_digest(folders)
    seen = {first}
    (tmp_path / "a" / "x.py").write_text("2\n")
    seen.add(source_digest(folders))
    (tmp_path / "a" / "x.py").write_text("1\n")
    assert source_digest(folders) == first
    (tmp_path / "b" / "deep" / "y.cpp").write_text("")
    seen.add(source_digest(folders))
    (tmp_path / "b" / "deep" / "y.cpp").unlink()
    seen.add(source_digest(folders))
    (tmp_path / "a" / "x.py").rename(tmp_path / "a" / "z.py")
    seen.add(source_digest(folders))
    assert len(seen) == 5


def test_what_is_no_source_is_not_read(tmp_path: Path) -> None:
    folders = tree(tmp_path)
    first = source_digest(folders)
    (tmp_path / "a" / "notes.md").write_text("other")
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"4")
    assert source_digest(folders) == first
    elsewhere = tree(tmp_path / "elsewhere")  # where it is installed does not matter
    assert source_digest(elsewhere) == first


def test_a_package_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no source of package 'a'"):
        source_digest({"a": tmp_path})


CPUINFO = """processor\t: {core}
model name\t: EPYC
cpu MHz\t\t: {mhz}
flags\t\t: sse {flag}

"""


def test_a_cpu_is_its_model_and_flags_and_not_its_clock(tmp_path: Path) -> None:
    def told(*cores: str) -> str:
        (tmp_path / "cpuinfo").write_text("".join(cores))
        return key_parts.cpu(tmp_path / "cpuinfo")

    one = told(CPUINFO.format(core=0, mhz=1, flag="avx2"))
    assert one.startswith(f"{torch.backends.cpu.get_cpu_capability()} EPYC ")
    assert told(*(CPUINFO.format(core=c, mhz=c, flag="avx2") for c in range(4))) == one
    assert told(CPUINFO.format(core=0, mhz=1, flag="avx512f")) != one
    assert told(*(CPUINFO.format(core=0, mhz=1, flag=f) for f in ("avx2", "amx"))) != one
    assert key_parts.cpu(tmp_path / "absent").startswith(torch.backends.cpu.get_cpu_capability())


def test_a_compiler_says_its_version(tmp_path: Path) -> None:
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho fake 1.2\necho more\n")
    fake.chmod(0o700)
    assert key_parts.compiler_version(str(fake)) == f"{fake}: fake 1.2"
    fake.write_text("#!/bin/sh\nexit 3\n")
    assert key_parts.compiler_version(str(fake)) == f"{fake}: none (CalledProcessError)"
    absent = tmp_path / "absent"
    assert key_parts.compiler_version(str(absent)) == f"{absent}: none (FileNotFoundError)"
