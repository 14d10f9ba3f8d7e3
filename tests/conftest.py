"""One thread, fixed seeds, hypothesis settings, and no dynamo state carried between modules."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from compiler.cpu_build import missing
from compiler.cpu_ops import cpu_ops
from dsv4.ops import Ops

torch.set_num_threads(1)

settings.register_profile("dsv4", deadline=None, max_examples=25)
settings.register_profile(
    "dsv4-ci", deadline=None, max_examples=25, derandomize=True, database=None, print_blob=True
)
settings.load_profile("dsv4-ci" if os.environ.get("CI") else "dsv4")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Once per test function, not per hypothesis example: properties draw their own seed."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Ops:
    """The operators as CPU kernels, built once for all tests."""
    assert missing() is None, missing()
    return cpu_ops(tmp_path_factory.mktemp("cpu"))


@pytest.fixture(autouse=True, scope="module")
def _reset_dynamo() -> Iterator[None]:
    """Forget compiled code after each module that used dynamo; never import it for that."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
