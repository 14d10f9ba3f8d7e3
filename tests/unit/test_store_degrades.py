"""A store that cannot keep anything: one warning, and the program works."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiler import store_seal
from compiler.store import Entry, Store, distrust
from compiler.store_entries import folder_of
from tests.kept import CONTENT, build, key, read, write

ROOT = Path(__file__).resolve().parents[2]
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def works_without(store: Store, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Three graphs are built apart; one warning says why."""
    folders = []
    for i in (1, 2, 2):
        with store.open(key(str(i))) as entry:
            assert (entry.found, entry.kept, read(entry)) == (False, False, {})
            write(entry)
            assert read(entry) == CONTENT
            folders.append(entry.files)
    assert len(set(folders)) == 3
    assert all(f.is_dir() for f in folders)
    assert store.off is not None
    assert why in store.off
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert why in warning
    assert str(store.root) in warning
    assert store.counts.not_kept == store.counts.graphs >= 3


def test_a_root_below_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("mine")
    works_without(Store(tmp_path / "file" / "cache"), caplog, "Not a directory")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_root_that_is_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("mine")
    works_without(Store(tmp_path / "file"), caplog, "Not a directory")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_root_where_nothing_can_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """Not even by the superuser."""
    works_without(Store("/proc/dsv4/cache"), caplog, "/proc/dsv4")


def test_a_root_that_everybody_may_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    works_without(Store(tmp_path / "cache"), caplog, "every user may write to it")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_root_that_everybody_may_replace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    works_without(Store(tmp_path / "open" / "cache"), caplog, "lacks the sticky bit")
    (tmp_path / "open").chmod(0o1777)  # as /tmp
    assert distrust(tmp_path / "open" / "cache") is None
    (tmp_path / "link").symlink_to(tmp_path / "open" / "cache")
    (tmp_path / "open").chmod(0o777)
    assert "lacks the sticky bit" in str(distrust(tmp_path / "link"))


def test_a_root_of_another_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    told = f"it belongs to user {user}, and this is user {user + 1}"
    works_without(Store(tmp_path), caplog, told)


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOLCK])
def test_no_locks(
    code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only disk, or one without locks."""

    def fail(file: int, kind: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", fail)
    works_without(Store(tmp_path / "cache"), caplog, os.strerror(code))


# The disk is full.


@pytest.mark.parametrize("name", ["meta.json", "manifest.json", "manifest.sha256"])
def test_full_while_an_entry_is_completed(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, whole = Store(tmp_path / "cache"), store_seal.write_whole

    def full(file: Path, content: bytes) -> None:
        if file.name == name:
            whole(file.with_name(f".{name}.part"), content[:3])  # what a full disk leaves
            raise FULL
        whole(file, content)

    with monkeypatch.context() as disk:
        disk.setattr(store_seal, "write_whole", full)
        with store.open(key()) as entry:
            write(entry)
        assert (entry.kept, read(entry)) == (True, CONTENT)  # what was compiled is still there
        assert not store_seal.sealed(folder_of(store.root, key().digest))
        works_without(store, caplog, "No space left on device")
    later = Store(store.root)
    with later.open(key()) as entry:
        assert (entry.found, read(entry)) == (False, {})
        assert "unfinished" in str(entry.note)


def test_full_while_an_entry_grows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "cache")
    build(store, key())

    def full(file: Path, content: bytes) -> None:
        raise FULL

    with monkeypatch.context() as disk:
        disk.setattr(store_seal, "write_whole", full)
        with store.open(key()) as entry:
            write(entry, {"probe.so": b"1"})
    assert store.off == str(FULL)
    with Store(store.root).open(key()) as entry:
        assert not entry.found


class CompileError(Exception):
    """A compiler's own."""


def fail_on_disk(how: str) -> None:
    if how == "itself":
        raise FULL
    if how == "words":
        raise CompileError("as: a.o: No space left on device")
    try:
        raise FULL
    except OSError as error:
        if how == "cause":
            raise CompileError("no") from error
        raise CompileError("no") from None


@pytest.mark.parametrize("how", ["itself", "cause", "context", "words"])
def test_full_while_building(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "cache")

    def make(entry: Entry) -> str:
        write(entry)
        if entry.kept:
            fail_on_disk(how)
        return "program"

    assert store.use(key(), make) == "program"
    assert str(store.counts) == "1 graphs, 0 hits, 1 not kept"
    assert [p for p in store.root.rglob("*") if p.is_file()] == []  # it made room
    works_without(store, caplog, "No space left on device")


def test_a_disk_that_fails_twice_is_raised(tmp_path: Path) -> None:
    store, calls = Store(tmp_path / "cache"), []

    def make(entry: Entry) -> None:
        calls.append(entry.kept)
        raise FULL

    with pytest.raises(OSError, match="No space left"):
        store.use(key(), make)
    assert calls == [True, False]


def test_hits_need_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "cache")
    build(store, key())

    def full(*_: object) -> None:
        raise FULL

    for name in ("os.pwrite", "os.mkdir", "compiler.store_seal.write_whole"):
        monkeypatch.setattr(name, full)
    with store.open(key()) as entry:
        assert (entry.found, read(entry)) == (True, CONTENT)


def test_a_hit_that_vanishes_is_still_a_hit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program has loaded what it needs."""
    store = Store(tmp_path / "cache")
    build(store, key())

    def fail(folder: Path) -> tuple[str, ...]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk, store.open(key()) as entry:
        assert entry.found
        disk.setattr(store_seal, "added", fail)
    assert str(store.counts) == "2 graphs, 1 hits"
    assert "Input/output error" in str(store.off)


LIMITED = """
import logging, resource, sys
from compiler.store import Store
from tests.kept import key
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
store = Store(sys.argv[1])

def make(entry):
    print(entry.kept, entry.files, flush=True)
    (entry.files / "a.so").write_bytes(b"x" * (int(sys.argv[3]) if entry.kept else 50))

store.use(key(), make)
print(store.counts)
"""


@pytest.mark.parametrize(
    ("limit", "size", "tries"),
    [
        (1000, 5000, ["True", "False"]),  # the compiler's file is too large: built again, apart
        (200, 50, ["True"]),  # the manifest is
    ],
)
def test_a_real_limit_on_files(limit: int, size: int, tries: list[str], tmp_path: Path) -> None:
    arguments = [str(tmp_path / "cache"), str(limit), str(size)]
    command = [sys.executable, "-c", LIMITED, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    *lines, counts = done.stdout.splitlines()
    assert (done.returncode, counts) == (0, "1 graphs, 0 hits, 1 not kept")
    assert [line.split()[0] for line in lines] == tries
    (told,) = done.stderr.splitlines()
    assert "compiled graphs are not kept in" in told
    assert "File too large" in told
    # When the process has ended nothing is left, neither in the store nor elsewhere.
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []
    assert not any(Path(line.split()[1]).exists() for line in lines)
