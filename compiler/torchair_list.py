"""Which operators torchair converts, as a list shipped with the package: needs no torch_npu.

A registration is not a converter: three quarters of torchair's only raise, and are not listed.
"""

import dataclasses
import re
from importlib import resources
from types import MappingProxyType

from compiler.torchair_own import CONVERTED

_FILE = "torchair_converters.txt"

# Without a converter of their own: picking one of several results, and sizes.
ACCEPTED = frozenset({"_operator.getitem"})


@dataclasses.dataclass(frozen=True)
class Converters:
    """Status by overload, OK or PARTIAL, and the torch_npu version it was read from."""

    torch_npu: str
    status: MappingProxyType[str, str]

    def of(self, op: str) -> str | None:
        """How an operator of a captured graph converts; None if it does not."""
        if op in CONVERTED:
            return "OURS"
        return "OK" if op in ACCEPTED else self.status.get(op)


def read() -> Converters:
    """The list as shipped."""
    text = resources.files("compiler").joinpath(_FILE).read_text(encoding="ascii")
    version = re.search(r"torch_npu (\S+)", text)
    assert version, f"{_FILE} names no version"
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return Converters(version[1], MappingProxyType({name: status for name, status in rows}))
