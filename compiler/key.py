"""What a compiled graph was made from: named parts, and one digest of them all.

Two graphs are the same artifact if and only if their keys have the same digest. No part is ever
compared on its own, so anything that can change what a compiler writes must be a part: what belongs
to the process is in `key_parts.py`, what belongs to the graph (config, layer plan, bucket, dtype,
mesh, step) is the caller's.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Key:
    """Named parts, in the order in which people read them. The order is not in the digest."""

    parts: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        """Raise ValueError for a part that is no text or has no name, and for a name twice."""
        seen: set[str] = set()
        for name, value in self.parts:
            if not isinstance(name, str) or not name or not isinstance(value, str):
                raise ValueError(
                    f"key part {name!r} is {value!r}; names and values are strings: give "
                    "digest_of(value) for a record"
                )
            if name in seen:
                raise ValueError(f"key part {name!r} is given twice; every part has its own name")
            seen.add(name)

    @classmethod
    def of(cls, *named: Mapping[str, str]) -> "Key":
        """The key of all these parts. Raises ValueError as `Key`: none may shadow another."""
        return cls(tuple(part for mapping in named for part in mapping.items()))

    @property
    def digest(self) -> str:
        """sha256 of the parts as canonical JSON, 64 hex digits."""
        return hashlib.sha256(canonical(dict(self.parts)).encode("ascii")).hexdigest()

    def __getitem__(self, name: str) -> str:
        """The value of one part. Raises KeyError for a name that is not there."""
        return dict(self.parts)[name]


def canonical(value: Any) -> str:
    """The one JSON text of a value: names sorted, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(record: Any) -> str:
    """sha256 hex of a value: a dataclass such as `dsv4.config.Config`, or a tuple of them.

    Covers the names of classes and fields, and the type of every value: 1, 1.0, True and "1" all
    differ. Raises ValueError for a value with no stable text, such as a set or a function.
    """
    return hashlib.sha256(canonical(_plain(record)).encode("ascii")).hexdigest()


def _plain(value: Any) -> Any:
    """JSON that two different values never share."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [[f.name, _plain(getattr(value, f.name))] for f in dataclasses.fields(value)]
        return [type(value).__name__, *fields]
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.name]
    if isinstance(value, tuple | list):
        return ["tuple", *(_plain(v) for v in value)]
    if isinstance(value, float):
        return ["float", value.hex()]
    if value is None or isinstance(value, bool | int | str):
        return value
    raise ValueError(
        f"{value!r} has no stable text; a key holds dataclasses, enums, tuples, numbers, text, None"
    )
