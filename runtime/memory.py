"""How many bytes there are: a size as people write it, and what a device has free right now."""

import dataclasses
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

CPU = torch.device("cpu")

# One size, as columns print it and people write it. Names are read without regard to case.
UNITS = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_FORMS = f"a number with a unit ({', '.join(UNITS)}), as 8GiB, or a fraction of free memory, as 0.5"
_SIZE = re.compile(r"\s*([0-9]{1,24}(?:\.[0-9]{1,24})?|\.[0-9]{1,24})\s*([A-Za-z]{0,8}|%)\s*")


@dataclasses.dataclass(frozen=True)
class Memory:
    """An amount of memory, and where the number comes from."""

    num_bytes: int
    source: str  # for reports: "8GiB as given", "0.5 of ..."


def read_memory(spec: str | int | float, device: torch.device = CPU) -> Memory:
    """The memory that `spec` names: whole bytes, "8GiB", "500MB", or a fraction of what is free.

    A fraction (0.5, "0.5", "50%") is of `device`'s free memory at this moment. Raises ValueError
    for anything that could be read in two ways, and for nothing at all.
    """
    number, unit = _parts(spec)
    if unit in UNITS:
        told = f"{spec} bytes" if isinstance(spec, int) else str(spec).strip()
        found = Memory(int(number * UNITS[unit]), f"{told} as given")
    else:
        fraction = number / 100 if unit == "%" else number
        if not 0 < fraction <= 1:
            raise ValueError(
                f"memory is {spec!r}; a fraction of free memory is above 0 and at most 1; for a "
                f"size add a unit: {', '.join(UNITS)}"
            )
        free = free_memory(device)
        told = f"{spec} of {free.num_bytes} bytes free: {free.source}"
        found = Memory(int(fraction * free.num_bytes), told)
    if found.num_bytes < 1:
        raise ValueError(f"memory is {spec!r}, less than one byte; allowed: {_FORMS}")
    return found


def _parts(spec: str | int | float) -> tuple[Fraction, str]:
    """The number, and its unit: one of `UNITS`, "%", or "" for a fraction of free memory."""
    refused = ValueError(f"memory is {spec!r}; allowed: {_FORMS}")
    if isinstance(spec, bool) or not isinstance(spec, str | int | float):
        raise refused
    if isinstance(spec, int):
        if spec < 1:
            raise refused
        return Fraction(spec), "B"
    match = _SIZE.fullmatch(spec) if isinstance(spec, str) else _SIZE.fullmatch(f"{spec:f}")
    if match is None:
        raise refused
    number, unit = Fraction(match[1]), match[2]
    if isinstance(spec, float):  # digits, not the printed ones
        number = Fraction(spec)
    named = {name.lower(): name for name in UNITS}
    if unit.lower() in named:
        return number, named[unit.lower()]
    if unit and unit != "%":
        twins = [n for n in UNITS if n[0].lower() == unit[0].lower() and n != "B"]
        advice = f"write {' or '.join(twins)}" if twins else f"allowed: {_FORMS}"
        raise ValueError(f"memory is {spec!r}; {unit!r} is no unit; {advice}")
    if not unit and isinstance(spec, str) and "." not in spec:
        raise ValueError(
            f"memory is {spec!r}, a whole number without a unit; write {spec.strip()}B for bytes, "
            f"{spec.strip()}GiB, or a fraction of free memory, as 0.5 or 1.0"
        )
    return number, unit


def free_memory(device: torch.device = CPU, root: Path = Path("/")) -> Memory:
    """Bytes that `device` has free now, and what told so.

    CPU: what the kernel calls available, or what is left below a memory limit of this process'
    control groups, whichever is less. Others, as cuda and npu: what the driver calls free. `root`
    is the file system that is asked. Raises ValueError for a device whose free memory cannot be
    told.
    """
    if device.type == "cpu":
        return min(_cpu(root), key=lambda found: found.num_bytes)
    module: Any = getattr(torch, device.type, None)  # torch.npu is there once torch_npu is imported
    if not hasattr(module, "mem_get_info") or not module.is_available():
        raise ValueError(
            f"free memory of {device} cannot be told: this process has no such device; give a size "
            f"in bytes, as 8GiB"
        )
    free, total = module.mem_get_info(device)
    return Memory(free, f"torch.{device.type}.mem_get_info of {device}, {total} bytes in all")


def _cpu(root: Path) -> Iterator[Memory]:
    """Every bound on this process' memory."""
    file = root / "proc/meminfo"
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(file), re.MULTILINE)
    if match is None:
        raise ValueError(f"{file} has no MemAvailable; give a size in bytes, as 8GiB")
    yield Memory(int(match[1]) * 1024, f"MemAvailable of {file}")
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(mounted, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits(mounted / "memory", path, *names)


def _limits(mounted: Path, path: str, limit: str, used: str, cached: str) -> Iterator[Memory]:
    """What is left below the limit of a control group and of each above it.

    Files in the page cache that nobody used lately count as used there; they are given up first.
    """
    folder = mounted / path.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(mounted):
            return
        most, now = _text(group / limit).strip(), _text(group / used).strip()
        if most.isdigit() and now.isdigit():  # "max" is no limit; a root group has no such file
            stat = re.search(rf"^{cached} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            left = int(most) - int(now) + (int(stat[1]) if stat else 0)
            yield Memory(max(left, 0), f"{limit} - {used} + {cached} of {group}")


def _text(file: Path) -> str:
    """What a file of the kernel says; nothing if it is not there or not ours to read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
