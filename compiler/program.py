"""Sealed programs: one function at one static shape, compiled once, found again at later starts.

The pools given to a program are its own: rows are written in place and the pools returned are the
same tensors at the same addresses. An argument that the program was not made for is an error that
names what differs.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from compiler.backend import Backend
from compiler.key import Key
from compiler.store import Entry, Store
from dsv4 import tree


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function, and how it came about."""

    label: str
    run: Callable[..., Any]
    found: bool  # in the store; else it was compiled
    ready_s: float  # seconds it took, waiting for other processes included
    note: str | None  # why what the store had was not used

    def __call__(self, *args: Any) -> Any:
        """Run it. Raises ValueError for arguments other than it was made for."""
        try:
            return self.run(*args)
        except RuntimeError as error:
            if "GuardManager check failed" in str(error):
                raise ValueError(
                    f"program {self.label} was made for other arguments; it is not compiled "
                    f"again: {error}"
                ) from error
            raise


def seal(
    fn: Callable[..., Any], args: tuple[Any, ...], backend: Backend, key: Key, store: Store
) -> Program:
    """The program of `fn` for arguments like `args`: loaded from `store`, or compiled and kept.

    `args` are used for their shapes and never run. Raises what the backend raises for a function
    that cannot be captured whole.
    """
    make = backend.compile
    assert make is not None, f"backend {backend.name} does not compile"

    def use(entry: Entry) -> Program:
        start_s = time.perf_counter()
        with torch.no_grad():
            run = make.load(fn, entry.files) if entry.found else make.build(fn, args, entry.files)
        took_s = time.perf_counter() - start_s + entry.waited_s
        return Program(f"{key['step']} {key['bucket']}", run, entry.found, took_s, entry.note)

    return store.use(key, use)


def any_rows(pools: Any) -> Any:
    """The same pools, marked for `seal`: their number of rows may be another when it runs."""
    for leaf in tree.leaves(pools):
        torch._dynamo.mark_dynamic(leaf, 0)
    return pools
