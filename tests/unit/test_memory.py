"""Sizes as people write them, and what is free."""

import types
from pathlib import Path

import pytest
import torch

from runtime.memory import Memory, free_memory, read_memory


@pytest.mark.parametrize(
    ("spec", "num_bytes"),
    [
        (1, 1),
        (8 * 2**30, 8 * 2**30),
        ("8GiB", 8 * 2**30),
        (" 8 gib ", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("500MB", 500 * 10**6),
        ("0.3kB", 300),
        (".5KiB", 512),
        ("1.5TiB", 3 * 2**39),
        ("7B", 7),
        ("0.1TB", 10**11),  # exact: no float in between
    ],
)
def test_sizes(spec: str | int, num_bytes: int) -> None:
    found = read_memory(spec)
    assert found.num_bytes == num_bytes
    assert found.source.endswith("as given")


@pytest.mark.parametrize("spec", [0.5, "0.5", "50%", ".5"])
def test_fractions_are_of_what_is_free(spec: str | float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.memory.free_memory", lambda device: Memory(1001, "a test"))
    assert read_memory(spec) == Memory(500, f"{spec} of 1001 bytes free: a test")
    assert read_memory("100%").num_bytes == read_memory(1.0).num_bytes == 1001


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("8", "write 8B for bytes, 8GiB"),
        ("8G", "write GB or GiB"),
        ("8g", "write GB or GiB"),
        ("8X", "'X' is no unit"),
        ("1.5", "above 0 and at most 1; for a size add a unit"),
        ("150%", "above 0 and at most 1"),
        (1.5, "above 0 and at most 1"),
        ("0.0", "above 0"),
        ("0GiB", "less than one byte"),
        ("0.4B", "less than one byte"),
        ("", "allowed: a number with a unit"),
        ("GiB", "allowed"),
        ("-1GiB", "allowed"),
        ("8GiB free", "allowed"),
        ("1e9", "allowed"),
        ("9" * 30 + "B", "allowed"),
        ("\u0663GiB", "allowed"),  # a digit, but not one of ours
        (0, "allowed"),
        (-5, "allowed"),
        (True, "allowed"),
        (float("nan"), "allowed"),
        (float("inf"), "allowed"),
        (None, "allowed"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(spec: str, told: str) -> None:
    with pytest.raises(ValueError, match="memory is") as refused:
        read_memory(spec)
    assert told in str(refused.value)


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file system with these files of the kernel."""
    for name, content in ({"proc/meminfo": "MemAvailable:   4000 kB\n"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")
    return root


def cpu(root: Path) -> Memory:
    return free_memory(torch.device("cpu"), root)


def test_available_memory_where_nothing_limits_it(tmp_path: Path) -> None:
    found = cpu(machine(tmp_path, {}))
    assert found.num_bytes == 4000 * 1024
    assert found.source.startswith("MemAvailable of")


@pytest.mark.parametrize("group", ["sys/fs/cgroup", "sys/fs/cgroup/a", "sys/fs/cgroup/a/b"])
def test_the_limit_of_any_control_group_above_counts(tmp_path: Path, group: str) -> None:
    """v2. Pages of files that nobody used lately are given up before anybody runs out."""
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "77\n",
        f"{group}/memory.max": "1000\n",
        f"{group}/memory.current": "900\n",
        f"{group}/memory.stat": "anon 5\ninactive_file 50\nfile 3\n",
    }
    found = cpu(machine(tmp_path, files))
    assert found.num_bytes == 150
    assert found.source.endswith(group)


def test_control_groups_of_the_first_kind(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1200\n",
    }
    assert cpu(machine(tmp_path, files)).num_bytes == 0
    # No limit is written as a number near 2**63.
    files["sys/fs/cgroup/memory/x/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert cpu(machine(tmp_path, files)).num_bytes == 4000 * 1024


def test_nothing_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has no MemAvailable; give a size in bytes, as 8GiB"):
        cpu(tmp_path)
    monkeypatch.setattr("runtime.memory.free_memory", lambda device: Memory(0, "a full machine"))
    with pytest.raises(ValueError, match="less than one byte"):
        read_memory(0.5)


def test_this_machine_has_memory() -> None:
    assert free_memory().num_bytes > 2**20
    assert read_memory(0.5).num_bytes > 2**19


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_devices_are_asked_their_driver(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device here: a stand-in for torch.cuda, or for the torch.npu of torch_npu."""
    driver = types.SimpleNamespace(
        is_available=lambda: True, mem_get_info=lambda device: (600, 900)
    )
    monkeypatch.setattr(torch, kind, driver, raising=False)
    device = types.SimpleNamespace(type=kind)
    assert read_memory("0.5", device).num_bytes == 300  # pyright: ignore[reportArgumentType]
    driver.is_available = lambda: False
    with pytest.raises(ValueError, match="no such device; give a size in bytes"):
        read_memory("0.5", device)  # pyright: ignore[reportArgumentType]
    monkeypatch.delattr(torch, kind)
    with pytest.raises(ValueError, match="no such device"):
        read_memory("0.5", device)  # pyright: ignore[reportArgumentType]
