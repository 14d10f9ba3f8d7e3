"""Builds the CPU kernels with torch's own extension loader: once per content, into a given folder.

The library's folder is named by a hash of everything it is made from (sources, flags, torch, the
compiler, the processor), so a changed one is another library and an old one is never loaded.
"""

import atexit
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from compiler.store import distrust

log = logging.getLogger(__name__)

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
    told = subprocess.run([compiler, "--version"], capture_output=True)
    if told.returncode:
        return f"the C++ compiler does not work: {compiler} --version exits with {told.returncode}"
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
    """The kernels' library below `build_dir`, built if it is not there whole. Raises RuntimeError.

    Where nothing can be kept, or others may write, it is built for this process alone, and the log
    says so.
    """
    problem = missing()
    if problem is not None:
        raise RuntimeError(f"cannot build the CPU kernels: {problem}")
    name = f"cpu_kernels_{fingerprint(_compiler())}"
    try:
        build_dir.mkdir(parents=True, exist_ok=True)
        why = distrust(build_dir)
        if why is None:
            return _kept(build_dir / name)
    except OSError as error:
        why = str(error)
    log.warning("CPU kernels are not kept in %s, but built for this process: %s", build_dir, why)
    own = Path(tempfile.mkdtemp(prefix="dsv4-kernels-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return _kept(own / name)


def _kept(folder: Path) -> Path:
    """The library in `folder`: built aside and renamed, so that no process meets half of one."""
    file = folder / f"{NAMESPACE}.so"
    if _is_whole(file):
        return file
    if folder.exists():
        log.warning("%s is damaged: it is built again", file)
        # Unless another process is first.
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside, suppress(FileNotFoundError):
            os.rename(folder, Path(aside) / "damaged")
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        _compile(Path(aside))
        built = Path(aside) / file.name
        _sum_of(built).write_text(_digest(built), encoding="ascii")
        try:
            os.rename(aside, folder)
        except OSError:  # another process was first, with the same content
            if not _is_whole(file):
                raise
        else:
            Path(aside).mkdir()  # for the end of `with`
    return file


def _sum_of(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _is_whole(file: Path) -> bool:
    """Whether every byte is as it was built: a library that is not kills the process."""
    try:
        return _sum_of(file).read_text(encoding="ascii") == _digest(file)
    except (OSError, UnicodeDecodeError):
        return False


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
