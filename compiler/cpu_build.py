"""Builds the CPU kernels with torch's own extension loader: once per content, into a given folder.

The library's folder is named by a hash of everything it is made from (sources, flags, torch, the
compiler, the processor), so a changed one is another library and an old one is never loaded.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

NAMESPACE = "dsv4_cpu"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-Wno-ignored-attributes")
_HERE = Path(__file__).parent
_SOURCE = _HERE / "cpu_kernels.cpp"


def _compiler() -> str:
    from torch.utils import cpp_extension  # imports setuptools: only where something is built

    return cpp_extension.get_cxx_compiler()


def missing() -> str | None:
    """What stands in the way of building the kernels, in words; None if nothing does."""
    try:
        compiler = _compiler()
    except ImportError as error:
        return f"torch's extension loader needs a package that is not installed: {error.name}"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler: {compiler!r} is not on the PATH"
    if shutil.which("ninja") is None:
        return "there is no ninja on the PATH, which torch's extension loader builds with"
    return None


def _processor() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return flags[0] if flags else f"{platform.machine()} {platform.processor()}"


def fingerprint(compiler: str) -> str:
    """Hash of everything the library is made from."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    parts = [torch.__version__, *FLAGS, compiler, version.stdout, _processor()]
    sources = [_SOURCE, *sorted(_HERE.glob("cpu_*.h"))]
    parts += [f.name + f.read_text(encoding="utf-8") for f in sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def library(build_dir: Path) -> Path:
    """The kernels' library below `build_dir`, built if it is not there. Raises RuntimeError.

    It is built aside and renamed into place, so that no process meets half a library.
    """
    problem = missing()
    if problem is not None:
        raise RuntimeError(f"cannot build the CPU kernels: {problem}")
    folder = build_dir / f"cpu_kernels_{fingerprint(_compiler())}"
    file = folder / f"{NAMESPACE}.so"
    if file.exists():
        return file
    build_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build_dir) as aside:
        _compile(Path(aside))
        try:
            os.rename(aside, folder)
        except OSError:  # another process was first, with the same content
            if not file.exists():
                raise
        else:
            Path(aside).mkdir()  # for the end of `with`
    return file


def _compile(folder: Path) -> None:
    from torch.utils import cpp_extension

    # Loads it too: the operators exist from here on in this process.
    cpp_extension.load(
        NAMESPACE,
        [str(_SOURCE)],
        extra_cflags=list(FLAGS),
        build_directory=str(folder),
        is_python_module=False,
    )


def load(build_dir: Path) -> bool:
    """Make the operators known to torch; False if this process has them already."""
    if hasattr(torch.ops.dsv4_cpu, "linear"):
        return False
    file = library(build_dir)
    if not hasattr(torch.ops.dsv4_cpu, "linear"):
        torch.ops.load_library(str(file))
    return True
