"""The peak of a load: the parameters and not much more, in a process of its own."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4 import table
from dsv4.config import preset
from runtime.save import save

# 85 MB, most of it experts.
CFG = dataclasses.replace(preset("bench_100m"), experts=96)

PROGRAM = """
import dataclasses, resource, sys, torch
from dsv4.config import preset
from runtime.load import load
cfg = dataclasses.replace(preset("bench_100m"), experts=96)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
params, report = load(sys.argv[1], cfg, torch.bfloat16, threads=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss counts KiB on Linux")
@pytest.mark.parametrize("family", ["official", "transformers"])
def test_peak_memory_is_the_parameters(tmp_path: Path, family: str) -> None:
    params = table.init(CFG, torch.Generator().manual_seed(0), torch.bfloat16)
    save(params, CFG, tmp_path, family=family)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    grown = int(done.stdout) * 1024
    need = table.size_bytes(table.spec(CFG), torch.bfloat16)
    assert need > 80e6
    assert grown < 1.1 * need, f"{grown / need:.3f} of the parameters"
