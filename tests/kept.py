"""A store with plain files in place of what a compiler writes."""

from pathlib import Path

from compiler.key import Key
from compiler.store import Entry, Store
from compiler.store_entries import folder_of

CONTENT = {"a.so": b"\x00\x01" * 100, "deep/er/b.cpp": b"int b;\n", "empty": b""}


def key(name: str = "x", **more: str) -> Key:
    return Key.of({"name": name, **more})


def write(entry: Entry, content: dict[str, bytes] | None = None) -> None:
    """Build."""
    for name, data in (CONTENT if content is None else content).items():
        file = entry.files / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def read(entry: Entry) -> dict[str, bytes]:
    """All files of an entry but locks."""
    files = (f for f in entry.files.rglob("*") if f.is_file() and f.suffix != ".lock")
    return {f.relative_to(entry.files).as_posix(): f.read_bytes() for f in files}


def build(store: Store, wanted: Key) -> Path:
    """A whole entry; its folder."""
    with store.open(wanted) as entry:
        assert not entry.found
        write(entry)
    return folder_of(store.root, wanted.digest)
