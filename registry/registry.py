"""The table from architecture names to builders: register, look up, digest.

There is one table per process that nobody has to pass around, `default_registry()`; the functions
`register`, `lookup` and `digest` act on it. Whoever wants another (a test, a worker that was handed
a snapshot) makes a `Registry` and passes it to `build` or `explain`: nothing else holds state.
"""

import dataclasses
import difflib
import functools
import hashlib
import importlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

from registry.names import ENTRIES, Entry

log = logging.getLogger(__name__)

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Override:
    """A registration that replaced another."""

    name: str
    winner: str
    loser: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A registry as a value: pickle it, hand it to a worker, and `Registry.restore` it there."""

    entries: tuple[Entry, ...]
    overrides: tuple[Override, ...]


class Registry:
    """A table of architecture names. Thread safe; builders are imported when first asked for."""

    def __init__(self, entries: Iterable[Entry] = ENTRIES) -> None:
        """Begin with `entries`; none of their modules is imported."""
        self._lock = threading.RLock()
        self._entries = {entry.name: entry for entry in entries}
        self._overrides: list[Override] = []

    @classmethod
    def restore(cls, snapshot: Snapshot) -> "Registry":
        """The registry that `snapshot` was taken of."""
        made = cls(snapshot.entries)
        made._overrides = list(snapshot.overrides)
        return made

    def snapshot(self) -> Snapshot:
        """This registry as it is now."""
        with self._lock:
            entries = tuple(self._entries[name] for name in sorted(self._entries))
            return Snapshot(entries=entries, overrides=tuple(self._overrides))

    def register(
        self, name: str, target: str, *, override: bool = False, version: str = "1"
    ) -> Entry:
        """Serve `name` by the builder at `target`, "module:attribute", imported on first use.

        The same registration again changes nothing. Raises ValueError if the name is taken by
        another builder (unless `override`, which is logged), is an alias, or `target` is no target.
        """
        _check(name, target)
        new = Entry(name=name, state="built", target=target, version=version)
        with self._lock:
            old = self._entries.get(name)
            if old == new:
                return new
            if old is not None and old.state == "alias":
                raise ValueError(f"{name} is an alias of {old.alias_of}; register that name")
            if old is not None and old.state == "built":
                if not override:
                    raise ValueError(
                        f"{name} is already served by {old.target} (version {old.version}); "
                        f"override=True would replace it by {target}"
                    )
                self._overrides.append(Override(name=name, winner=target, loser=old.target))
                log.info("%s: %s overrides %s", name, target, old.target)
            self._entries[name] = new
            return new

    def entry(self, name: str) -> Entry:
        """The row that decides about `name`, aliases followed. Raises ValueError if unknown."""
        with self._lock:
            found = self._entries.get(name)
            if found is not None and found.alias_of:
                found = self._entries.get(found.alias_of)
            if found is None:
                near = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.6)
                told = f"; nearest: {', '.join(near)}" if near else ""
                built = ", ".join(sorted(n for n, e in self._entries.items() if e.state == "built"))
                raise ValueError(f"architecture {name!r} is unknown; built: {built}{told}")
            return found

    def lookup(self, name: str) -> Entry:
        """The built row that serves `name`. Raises ValueError if it is planned or unknown."""
        found = self.entry(name)
        if found.state != "built":
            also = f" (alias of {found.name})" if found.name != name else ""
            raise ValueError(f"architecture {name!r}{also} is planned, not built: {found.needs}")
        return found

    def builder(self, name: str) -> Callable[..., Any]:
        """Import the builder that serves `name`. Raises ValueError if that fails."""
        found = self.lookup(name)
        module, _, attribute = found.target.partition(":")
        told = f"architecture {name!r} is served by {found.target!r}"
        try:
            made = getattr(importlib.import_module(module), attribute, None)
        except Exception as error:  # whatever the module does when it is imported
            raise ValueError(f"{told}, which cannot be imported here: {error}") from error
        if not callable(made):
            raise ValueError(f"{told}, which is not there or cannot be called")
        return made

    def overrides(self, name: str | None = None) -> tuple[Override, ...]:
        """Replacements so far, oldest first; of one name, or of all."""
        with self._lock:
            return tuple(o for o in self._overrides if name in (None, o.name))

    def digest(self) -> str:
        """Equal in two processes if and only if their tables are. 16 hex digits."""
        rows = [(e.name, e.state, e.target, e.alias_of, e.version) for e in self.snapshot().entries]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def require(self, digest: str) -> None:
        """Raise ValueError if this table is not the one with `digest`, saying what to do."""
        own = self.digest()
        if own != digest:
            raise ValueError(
                f"this process has registry {own}, the other one {digest}; a registration did not "
                f"travel: register at import of a module both load, or pass Registry.snapshot()"
            )


def _check(name: str, target: str) -> None:
    if not name.isidentifier():
        raise ValueError(f"architecture name is {name!r}; it must be an identifier")
    if not _TARGET.fullmatch(target):
        raise ValueError(f"target of {name} is {target!r}; it must be 'module:attribute'")
    if target.startswith("__main__:"):
        raise ValueError(
            f"target of {name} is {target!r}; no other process can import a script's __main__: "
            f"put the builder into a module"
        )


@functools.cache
def _default() -> Registry:
    return Registry()


def default_registry() -> Registry:
    """This process's table: made on first use, the same object ever after."""
    with _LOCK:
        return _default()


def register(name: str, target: str, *, override: bool = False, version: str = "1") -> Entry:
    """`Registry.register` on this process's table."""
    return default_registry().register(name, target, override=override, version=version)


def lookup(name: str) -> Entry:
    """`Registry.lookup` on this process's table."""
    return default_registry().lookup(name)


def digest() -> str:
    """`Registry.digest` of this process's table."""
    return default_registry().digest()
