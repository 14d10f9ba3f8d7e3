"""The NPU backend says what it lacks, and does not start without it."""

import importlib
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import pytest

from compiler import torchair


def _machine(monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any] | None) -> None:
    """A machine where torch_npu is not installed, or `load` is what importing it does."""
    found = types.SimpleNamespace() if load else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(importlib, "import_module", lambda name: load() if load else None)


def _no_cann() -> Any:
    raise ImportError("libhccl.so: cannot open shared object file")


def _no_device() -> Any:
    return types.SimpleNamespace(npu=types.SimpleNamespace(is_available=lambda: False))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (None, "torch_npu is not installed"),
        (_no_cann, "libhccl.so.*needs CANN"),
        (_no_device, "sees no NPU"),
    ],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any] | None, message: str
) -> None:
    _machine(monkeypatch, load)
    with pytest.raises(RuntimeError, match=message):
        torchair.compile_step(lambda x: x)


def test_a_whole_machine_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = types.SimpleNamespace(npu=types.SimpleNamespace(is_available=lambda: True))
    _machine(monkeypatch, lambda: whole)
    assert torchair.missing() is None
