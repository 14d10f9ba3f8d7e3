"""From a directory or a `Config` to a model that runs, every choice on record."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from compiler.backend import backend as find_backend
from compiler.store import Store
from dsv4 import config_json
from dsv4.config import Config
from dsv4.config_json import Reading
from dsv4.mesh import ONE, Mesh
from registry.architecture import Choice, choose
from registry.model import CompiledModel, Order
from registry.registry import Registry, default_registry
from runtime.load import Progress


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"{', '.join(twice[:5])} stands in it twice")
    return made


def read_config(directory: str | Path) -> dict[str, Any]:
    """The parsed config.json of a model directory. Raises ValueError if there is none to read."""
    folder = Path(directory)
    file = folder / "config.json"
    if not str(directory):  # Path("") would be the working directory
        raise ValueError("no such model directory: '' (the path is empty)")
    if not folder.exists():
        raise ValueError(f"no such model directory: {directory}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a directory; name the one that holds config.json")
    if not file.is_file():
        raise ValueError(f"{folder} holds no config.json; it is not a model directory")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}; it must hold an object")
    return raw


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """A model directory, read and found in the registry; nothing is loaded."""

    raw: dict[str, Any]
    choice: Choice
    reading: Reading


def resolve(raw: dict[str, Any], architecture: str | None, registry: Registry) -> Resolved:
    """Choose the architecture, then read the config. Raises ValueError for what is not built."""
    choice = choose(raw, architecture)
    registry.lookup(choice.name)
    return Resolved(raw=raw, choice=choice, reading=config_json.read(raw))


def build(
    source: str | Path | Config,
    *,
    architecture: str | None = None,
    backend: str = "eager",
    dtype: torch.dtype = torch.bfloat16,
    mesh: Mesh = ONE,
    seed: int | None = None,
    drafts: bool = True,
    progress: Progress | None = None,
    registry: Registry | None = None,
    cache_dir: Path | None = None,
) -> CompiledModel:
    """Build a model from its directory, or from a `Config` with random parameters of `seed`.

    A backend with kernels builds them in `cache_dir`, by default the user's cache folder, unless
    they are there. One that compiles steps does so in `registry.programs.compile_model`.

    Raises ValueError, before anything is allocated, for a path without a model, an architecture
    that is not built, a config or checkpoint that does not fit, a mesh or backend that is not
    built, a `Config` without `seed`, or a `seed` with a path.
    """
    registry = registry or default_registry()
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(map(str, DTYPES))}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise ValueError(f"seed is {seed!r}; it must be a whole number of at least 0")
    mesh.check()
    record = find_backend(backend)
    if isinstance(source, Config):
        if seed is None:
            raise ValueError("a Config has no parameters: pass seed for random ones, or a path")
        name = architecture or "DeepseekV4ForCausalLM"
        cfg, folder, why = source, None, ("built from a Config",)
    else:
        if seed is not None:
            raise ValueError(f"seed is {seed}; parameters come from {source}, not from a seed")
        found = resolve(read_config(source), architecture, registry)
        name, cfg, folder = found.choice.name, found.reading.cfg, Path(source)
        why = (*found.choice.why, *found.reading.notes)
    entry = registry.lookup(name)
    make = registry.builder(name)
    order = Order(
        architecture=entry.name,
        cfg=cfg,
        source=folder,
        seed=seed,
        backend=record,
        cache_dir=cache_dir or Store.default_root(),
        dtype=dtype,
        mesh=mesh,
        drafts=drafts,
        progress=progress,
        why=(*why, f"{entry.name} is served by {entry.target}", f"backend {record.name}"),
    )
    return make(order)
