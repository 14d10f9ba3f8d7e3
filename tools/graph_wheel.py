"""torch_npu without importing it: where its files are, and the operators it declares.

`import torch_npu` needs CANN. Its torchair package, its operator schemas and its shape functions
are plain text in the wheel, and need none.
"""

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

SCHEMAS = "csrc/aten/npu_native_functions_by_codegen.yaml"
SHAPES = "op_plugin/meta/_meta_registrations.py"
TORCHAIR = "dynamo/torchair"


@dataclasses.dataclass(frozen=True)
class Wheel:
    """An unpacked torch_npu."""

    folder: Path  # holds dynamo/torchair
    version: str

    @property
    def torchair(self) -> Path:
        """Torchair's folder."""
        return self.folder / TORCHAIR

    def schemas(self) -> Iterator[str]:
        """Every operator schema of its yaml, as text; several can share a name."""
        text = (self.folder / SCHEMAS).read_text(encoding="utf-8")
        for found in re.finditer(r"^[\s-]*func: '?(\w+(?:\.\w+)?\(.*?\) -> .*?)'?\s*$", text, re.M):
            yield found[1]

    def shapes_of(self, op: str) -> str:
        """Source of an operator's shape function. Raises ValueError if the wheel has none."""
        text = (self.folder / SHAPES).read_text(encoding="utf-8")
        found = re.search(rf'^@impl\(m, "{op}"\)\n(def .*?)(?=^\S(?!ef ))', text, re.M | re.S)
        if not found:
            raise ValueError(f"{SHAPES} of torch_npu {self.version} has no shapes of {op!r}")
        return found[1]


def _at(folder: Path) -> Wheel | None:
    for inner in (folder / "torch_npu", folder):
        if (inner / TORCHAIR).is_dir():
            found = next(
                iter(metadata.distributions(name="torch_npu", path=[str(inner.parent)])), None
            )
            return Wheel(inner, found.version if found else "of unknown version")
    return None


def beside() -> Path:
    """Where the README's command puts torch_npu: in the environment, but not on its path."""
    return Path(sys.prefix) / "torch_npu"


def find(given: Path | None = None) -> Wheel | None:
    """The torch_npu at `given`, else beside this environment, else installed in it, else None.

    Raises ValueError if there is none at `given`.
    """
    if given is not None:
        wheel = _at(given)
        if wheel is None:
            raise ValueError(f"{given} holds no unpacked torch_npu (no {TORCHAIR} in it)")
        return wheel
    wheel = _at(beside())
    if wheel is None:
        spec = importlib.util.find_spec("torch_npu")
        places = spec.submodule_search_locations if spec else None
        wheel = _at(Path(places[0])) if places else None
    return wheel


def why_not(wheel: Wheel | None) -> str | None:
    """What keeps torchair's converters from running here; None if nothing does."""
    if wheel is None:
        return (
            f"no files of torch_npu in {beside()} or installed; get them with "
            f"pip install --no-deps --target {beside()} 'torch_npu==2.13.*'"
        )
    if importlib.util.find_spec("google") is None or not importlib.util.find_spec(
        "google.protobuf"
    ):
        return "torchair needs protobuf, which is not installed"
    return None
