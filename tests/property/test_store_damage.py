"""Whatever happens to the files of an entry, a hit has what was written, or there is no hit."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.store import Store
from tests.kept import CONTENT, build, key, read, write

pytestmark = pytest.mark.filterwarnings("error")

# Drawn without a look at the file: metadata holds times, and its length is not always the same.
PLACES = st.integers(0, 2**20)


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def pick(data: st.DataObject, folder: Path) -> Path | None:
    found = files(folder)
    return data.draw(st.sampled_from(found)) if found else None


def flip(data: st.DataObject, folder: Path) -> None:
    file, at, bits = pick(data, folder), data.draw(PLACES), data.draw(st.integers(1, 255))
    if file is not None and file.stat().st_size:
        content = bytearray(file.read_bytes())
        content[at % len(content)] ^= bits
        file.write_bytes(content)


def resize(data: st.DataObject, folder: Path) -> None:
    file, at = pick(data, folder), data.draw(PLACES)
    if file is not None:
        os.truncate(file, at % (2 * file.stat().st_size + 2))


def delete(data: st.DataObject, folder: Path) -> None:
    file = pick(data, folder)
    if file is not None:
        file.unlink()


def empty(data: st.DataObject, folder: Path) -> None:
    """A whole folder goes."""
    inner = [p for p in sorted(folder.rglob("*")) if p.is_dir()]
    if inner:
        shutil.rmtree(data.draw(st.sampled_from(inner)))


def add(data: st.DataObject, folder: Path) -> None:
    inner = data.draw(st.sampled_from([p for p in [folder, *folder.rglob("*")] if p.is_dir()]))
    name = data.draw(st.sampled_from(("new.so", "new.lock", "a.so", ".hidden", "meta.json")))
    if not (inner / name).exists():
        (inner / name).write_bytes(data.draw(st.binary(max_size=9)))


def swap(data: st.DataObject, folder: Path) -> None:
    one, two = pick(data, folder), pick(data, folder)
    if one is not None and two is not None:
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)


def rename(data: st.DataObject, folder: Path) -> None:
    file = pick(data, folder)
    if file is not None:
        file.rename(file.with_name(file.name + data.draw(st.sampled_from(("x", ".part", ".so")))))


def link(data: st.DataObject, folder: Path) -> None:
    """The same content, by a link."""
    file = pick(data, folder)
    if file is not None:
        file.rename(folder.parent / "moved")
        file.symlink_to(folder.parent / "moved")


HARM = (flip, resize, delete, empty, add, swap, rename, link)


@given(st.data(), st.lists(st.sampled_from(HARM), min_size=1, max_size=3))
def test_damage_is_found_or_harmless(data: st.DataObject, harms: list) -> None:
    with tempfile.TemporaryDirectory() as root:
        store = Store(root)
        folder = build(store, key())
        for harm in harms:
            harm(data, folder)
        (verdict,) = store.verify()
        with store.open(key()) as entry:
            assert entry.kept
            assert entry.found == (verdict.faults == ())
            assert (entry.note is None) == entry.found
            assert read(entry) == (CONTENT if entry.found else {})
            if not entry.found:
                write(entry)
        with store.open(key()) as entry:
            assert (entry.found, read(entry)) == (True, CONTENT)
        assert store.off is None
