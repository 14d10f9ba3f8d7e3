"""GE's operator prototypes as torchair's generated source quotes them: REG_OP(...) texts.

The texts are older than the newest CANN; an operator that is not among them may still exist there.
"""

import dataclasses
import re
from pathlib import Path

_FILES = ("auto_generated_ge_raw_ops.py", "dynamic_output_ops.py")
_OP = re.compile(r'"""REG_OP\((\w+)\)(.*?)"""', re.S)
_PART = re.compile(
    r"\.(INPUT|OPTIONAL_INPUT|DYNAMIC_INPUT|OUTPUT|DYNAMIC_OUTPUT|ATTR|REQUIRED_ATTR)\((\w+)"
)

# Written by hand in torchair, without a quoted prototype; and newer than the quoted text.
UNQUOTED = frozenset({"Cast", "Const", "Data", "NetOutput"})
NEWER = frozenset({"TopKV2.sort_policy"})


@dataclasses.dataclass(frozen=True)
class Prototype:
    """Names of a GE operator's inputs, outputs and attributes. Dynamic ones carry a number each."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: tuple[str, ...]
    dynamic: frozenset[str]

    def strangers(self, inputs: list[str], attrs: list[str]) -> list[str]:
        """Inputs and attributes of an emitted operator that the prototype does not name."""
        bad = [n for n in inputs if n not in self.inputs and not self._numbered(n)]
        named = {a.lower() for a in self.attrs}
        # Torchair's own bookkeeping starts with an underscore or names a layout.
        own = (a for a in attrs if not a.startswith("_") and not a.endswith("layout_info"))
        return bad + [a for a in own if a.lower() not in named]

    def _numbered(self, name: str) -> bool:
        return name.rstrip("0123456789") in self.dynamic


def read(torchair: Path) -> dict[str, Prototype]:
    """Prototypes by operator type."""
    table = {}
    for name in _FILES:
        source = (torchair / "_ge_concrete_graph" / name).read_text(encoding="utf-8")
        for op, text in _OP.findall(source):
            parts = _PART.findall(text)
            table[op] = Prototype(
                inputs=tuple(n for kind, n in parts if "INPUT" in kind),
                outputs=tuple(n for kind, n in parts if "OUTPUT" in kind),
                attrs=tuple(n for kind, n in parts if "ATTR" in kind),
                dynamic=frozenset(n for kind, n in parts if kind.startswith("DYNAMIC")),
            )
    return table
