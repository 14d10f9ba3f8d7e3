"""The fields of one `config.json`: where each stands, what it may be, and what was decided by it.

The ground under `config_json.py`: facts that may stand in several places and must agree there,
values whose type is checked, and a record of which fields anybody asked for.
"""

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

_MOST = 2**53  # whole numbers above are not the same in every JSON reader
Place = tuple[str, Any]  # where a fact stands in the file, and its value there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice: its value, the config.json fields that decided it, and the rule in words."""

    name: str
    value: Any
    fields: tuple[str, ...]  # empty: the file is silent and a default holds
    rule: str


def shown(value: Any) -> str:
    """A value for a message: short, null for None."""
    told = "null" if value is None else repr(value)
    return told if len(told) <= 80 else f"{told[:77]}..."


def refuse(field: str, value: Any, allowed: str) -> NoReturn:
    """Raise ValueError: the field, its value, and what is allowed instead."""
    raise ValueError(f"config.json: {field} is {shown(value)}; {allowed}")


def whole(field: str, value: Any, least: int = 1) -> int:
    """A whole number of at least `least`; a bool, a text or 2.0 is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        refuse(field, value, f"it must be a whole number of at least {least}")
    return value


def number(field: str, value: Any, zero: bool = False) -> float:
    """A finite number above 0, or of at least 0 where `zero` is allowed."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)  # NaN fails below
    if not plain or not 0 <= value <= sys.float_info.max or (value == 0 and not zero):
        refuse(field, value, f"it must be a finite number {'of at least' if zero else 'above'} 0")
    return float(value)


def entries(field: str, value: Any) -> list[Any]:
    """A list."""
    if not isinstance(value, list | tuple):
        refuse(field, value, "it must be a list with one entry per layer")
    return list(value)


def table(field: str, value: Any) -> Mapping[str, Any]:
    """An object of named values."""
    if not isinstance(value, Mapping):
        refuse(field, value, "it must be an object of named values")
    return value


def same(places: Iterable[Place]) -> tuple[tuple[str, ...], Any] | None:
    """The one value of a fact that may stand in several places, and where. None if nowhere."""
    fields: list[str] = []
    value = None
    for field, other in places:
        if fields and other != value:
            told = f"{fields[0]} says {shown(value)}; they must agree, or one must be removed"
            refuse(field, other, told)
        fields.append(field)
        value = other
    return (tuple(dict.fromkeys(fields)), value) if fields else None


def merge(
    raw: Mapping[str, Any], may_differ: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields by name, and where each stands: `text_config` wins, outer fields fill what it lacks.

    Raises ValueError where both give a field and disagree, unless it `may_differ`.
    """
    values = {k: v for k, v in table("the file", raw).items() if k != "text_config"}
    paths = {k: k for k in values}
    nested = raw.get("text_config")
    for k, v in ({} if nested is None else table("text_config", nested)).items():
        path, outer = f"text_config.{k}", values.get(k)
        if v is None and outer is not None:
            continue
        if outer is not None and outer != v and k not in may_differ:
            refuse(path, v, f"the outer {k} says {shown(outer)}; they must agree, or one must go")
        values[k], paths[k] = v, path
    return values, paths


class Fields:
    """One config.json while it is read. Lives for one call of `config_json.read`."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        aliases: tuple[tuple[str, ...], ...],
        may_differ: tuple[str, ...],
    ) -> None:
        """Each row of `aliases` is one fact under its names, the leading one first."""
        self.values, self.paths = merge(raw, may_differ)
        self.aliases = aliases
        self.seen: set[str] = set()
        self.inner_unread: list[str] = []
        self.decisions: list[Decision] = []
        self.notes: list[str] = []

    def get(self, name: str) -> list[Place]:
        """Every place that gives `name`, under any of its names. Null counts as absent."""
        names = next((row for row in self.aliases if row[0] == name), (name,))
        self.seen.update(names)
        return [(self.paths[n], self.values[n]) for n in names if self.values.get(n) is not None]

    def is_null(self, name: str) -> bool:
        """Whether the file says null, which is not the same as saying nothing."""
        return name in self.values and not self.get(name)

    def decide(self, name: str, places: list[Place], default: Any, rule: str = "as given") -> Any:
        """Settle one field of `Config`: the value on which all places agree, else the default."""
        fields, value = same(places) or ((), default)
        rule = rule if fields else f"not in the file; the default is {default!r}"
        self.decisions.append(Decision(name=name, value=value, fields=fields, rule=rule))
        return value

    def unread(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """Fields that nobody asked for and that are not `known` to be without effect."""
        rest = (self.paths[k] for k in self.values if k not in self.seen and k not in known)
        return (*rest, *self.inner_unread)
