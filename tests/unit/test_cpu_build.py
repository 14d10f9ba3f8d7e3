"""The library of CPU kernels: built once, checked before it is loaded, and never from others."""

import logging
from pathlib import Path

import pytest

from compiler import cpu_build, inductor


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that something was compiled in; the compiler writes a few bytes."""
    folders = []

    def compile_(folder: Path) -> None:
        folders.append(folder)
        (folder / "dsv4_cpu.so").write_bytes(b"machine code")

    monkeypatch.setattr(cpu_build, "_compile", compile_)
    monkeypatch.setattr(cpu_build, "missing", lambda: None)
    monkeypatch.setattr(cpu_build, "fingerprint", lambda compiler: "f00")
    return folders


def test_built_once(tmp_path: Path, built: list[Path]) -> None:
    first = cpu_build.library(tmp_path / "kernels")
    assert first.read_bytes() == b"machine code"
    assert cpu_build.library(tmp_path / "kernels") == first
    assert len(built) == 1
    assert [f.name for f in (tmp_path / "kernels").iterdir()] == ["cpu_kernels_f00"]


@pytest.mark.parametrize("damage", ["truncated", "changed", "no sum", "gone", "empty sum"])
def test_a_damaged_library_is_named_and_built_again(
    damage: str, tmp_path: Path, built: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A library that is cut short kills the process that loads it."""
    file = cpu_build.library(tmp_path)
    {
        "truncated": lambda: file.write_bytes(b"machine"),
        "changed": lambda: file.write_bytes(b"machine c0de"),
        "no sum": file.with_suffix(".sha256").unlink,
        "gone": file.unlink,
        "empty sum": lambda: file.with_suffix(".sha256").write_bytes(b""),
    }[damage]()
    with caplog.at_level(logging.WARNING):
        assert cpu_build.library(tmp_path) == file
    assert f"{file} is damaged: it is built again" in caplog.text
    assert file.read_bytes() == b"machine code"
    assert len(built) == 2
    assert [f.name for f in tmp_path.iterdir()] == ["cpu_kernels_f00"]


def test_nothing_is_loaded_from_a_folder_that_others_write(
    tmp_path: Path, built: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    cpu_build.library(tmp_path)
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        file = cpu_build.library(tmp_path)
    assert tmp_path not in file.parents
    assert len(built) == 2
    assert "built for this process: every user may write to it" in caplog.text


def test_where_nothing_can_be_kept_it_is_built_for_this_process(
    tmp_path: Path, built: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        file = cpu_build.library(tmp_path / "file" / "kernels")
    assert file.read_bytes() == b"machine code"
    assert f"CPU kernels are not kept in {tmp_path}/file/kernels" in caplog.text
    assert len(built) == 1


def test_a_compiler_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "_compiler", lambda: "false")
    assert cpu_build.missing() == "the C++ compiler does not work: false --version exits with 1"


def test_the_version_of_inductor_is_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are found whatever the working directory and the number of cores."""
    from torch._inductor import config

    here = inductor.version()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "compile_threads", 7)
    monkeypatch.setattr(config.xpu, "cutlass_dir", str(tmp_path))
    assert inductor.version() == here
    monkeypatch.setattr(config.cpp, "simdlen", 8)
    assert inductor.version() != here
