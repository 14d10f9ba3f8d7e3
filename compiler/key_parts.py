"""The parts of a `Key` that belong to the process: versions, our sources, the CPU, the compiler.

A kernel is compiled for the CPU at hand (-march=native) and for a number of threads, by code that
may be ours, torch's or the C++ compiler's. Each of them is a part, so that nothing stale is found.
"""

import hashlib
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

PACKAGES = ("dsv4", "compiler", "runtime", "registry")
_SOURCES = (".py", ".cpp", ".h")
_CPUINFO = Path("/proc/cpuinfo")
# What -march=native and -mtune=native look at, as x86 and as ARM kernels name it.
_CPU_FIELDS = (
    "vendor_id", "cpu family", "model", "model name", "flags",
    "Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part",
)  # fmt: skip


def process_parts(backend: str, version: str, *, cxx: str = "g++") -> dict[str, str]:
    """What all graphs of this process share: the parts of a key, by name.

    `version` is everything about the backend that its name leaves open; `cxx` is the C++ compiler
    that the backend calls. torch's number of threads is the one of this moment: set it before.
    Raises ValueError if a package of ours is not found.
    """
    return {
        "backend": backend,
        "backend version": version,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{sys.implementation.cache_tag} {platform.python_version()}",
        "platform": " ".join((platform.system(), platform.machine(), *platform.libc_ver())),
        "sources": source_digest(package_folders()),
        "cpu": cpu(),
        "compiler": compiler_version(cxx),
        "threads": str(torch.get_num_threads()),
    }


def package_folders(names: Iterable[str] = PACKAGES) -> dict[str, Path]:
    """Where the packages are, without importing them. Raises ValueError for one that is missing."""
    folders = {}
    for name in names:
        found = importlib.util.find_spec(name)
        places = list(found.submodule_search_locations or ()) if found else []
        if found is None or found.origin is None or len(places) != 1:
            raise ValueError(
                f"package {name!r} is not found; graphs are keyed by the sources of "
                f"{', '.join(PACKAGES)}: install dsv4 whole"
            )
        folders[name] = Path(places[0])
    return folders


def source_digest(folders: Mapping[str, Path]) -> str:
    """sha256 hex over the name and content of every source file in `folders`."""
    whole = hashlib.sha256()
    for package, folder in sorted(folders.items()):
        files = sorted(f for f in folder.rglob("*") if f.suffix in _SOURCES and f.is_file())
        if not files:
            raise ValueError(f"{folder} holds no source of package {package!r}; install dsv4 whole")
        for file in files:
            content = file.read_bytes()
            # The length ends the name and the content: no two trees share one stream of bytes.
            name = f"{package}/{file.relative_to(folder).as_posix()}"
            whole.update(f"{len(name)} {name} {len(content)} ".encode())
            whole.update(content)
    return whole.hexdigest()


def cpu(info: Path = _CPUINFO) -> str:
    """What code for this CPU may use: torch's own name for it, the model, a digest of the flags."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return f"{capability} {platform.processor()}"
    told = [[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]
    # A set: cores of one kind say the same, and a machine may have two kinds.
    facts = sorted({(name, value) for name, value in told if name in _CPU_FIELDS})
    model = ", ".join(value for name, value in facts if name == "model name")
    flags = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return f"{capability} {model or platform.processor()} {flags}"


def compiler_version(cxx: str) -> str:
    """The first line of `cxx --version`, or that there is no such compiler."""
    try:
        done = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{cxx}: none ({type(error).__name__})"
    return f"{cxx}: {(done.stdout.splitlines() or [''])[0].strip()}"
