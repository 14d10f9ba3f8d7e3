"""What this machine can do at most: reads per second and matrix products per second.

Each is the best of several ways and tries, so that a share of it is never flattered by a bad probe.
"""

import dataclasses
import os
import platform
import time
from pathlib import Path

import torch

from tests.bench.contestant import timed

READ_BYTES = 2**30  # far beyond any cache here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Rates of this machine at a number of threads."""

    read: float  # bytes/s
    gemm: float  # FLOP/s, both sides in the model's dtype

    def best(self, other: "Limits") -> "Limits":
        """The higher of two measurements: a limit can only be underestimated."""
        return Limits(read=max(self.read, other.read), gemm=max(self.gemm, other.gemm))


def measure(dtype: torch.dtype, tries: int = 3) -> Limits:
    """Measure both limits at the present number of threads."""
    flat = torch.ones(READ_BYTES // 4)
    matrix = flat.view(dtype).view(-1, 4096)
    vector = torch.ones(4096, dtype=dtype)
    wide = flat.view(-1, 4096)
    wide_vector = torch.ones(4096)
    reads = (flat.sum, flat.amax, lambda: matrix @ vector, lambda: wide @ wide_vector)
    read_s = min(timed(fn) for fn in reads for _ in range(tries))
    gemm = 0.0
    for n in (1024, 2048, 4096):
        a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
        timed(lambda a=a, b=b: a @ b.t())
        gemm = max(gemm, *(2 * n**3 / timed(lambda a=a, b=b: a @ b.t()) for _ in range(tries)))
    return Limits(read=READ_BYTES / read_s, gemm=gemm)


def describe() -> str:
    """Processor, cores and memory in one line."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    known = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags]
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {len(models) or '?'} cores, {' '.join(known) or 'no known vector units'}"


def busy_s() -> float:
    """Processor seconds that all processes of this machine have used so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_quiet(limit_s: float, allowed: float = 0.2, look_s: float = 0.5) -> bool:
    """Wait until others use fewer than `allowed` cores; whether that came within `limit_s`."""
    end = time.perf_counter() + limit_s
    while time.perf_counter() < end:
        before = busy_s()
        time.sleep(look_s)
        if (busy_s() - before) / look_s < allowed:
            return True
    return limit_s == 0
