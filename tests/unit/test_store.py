"""The store of compiled graphs in one process: hits, damage, what is no entry."""

import contextlib
import json
import logging
import os
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from compiler import store_lock
from compiler.store import Store
from compiler.store_entries import folder_of, lock_of
from tests.kept import CONTENT, build, key, read, write


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache" / "dsv4")


def test_cold_then_warm(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    keys = [key("x", bucket=str(i)) for i in range(12)]
    with caplog.at_level(logging.INFO):
        for each in keys:
            build(store, each)
        assert str(store.counts) == "12 graphs, 0 hits"
        again = Store(store.root)
        for each in keys:
            with again.open(each) as entry:
                assert (entry.found, entry.kept, entry.note) == (True, True, None)
                assert (entry.waited_s, read(entry)) == (0.0, CONTENT)
        assert str(again.counts) == "12 graphs, 12 hits"
    assert caplog.text == ""
    assert again.off is None


def test_it_is_built_where_it_is_found(store: Store) -> None:
    """A compiler may write absolute paths into what it makes."""
    with store.open(key()) as entry:
        assert list(entry.files.iterdir()) == []
        built = entry.files
        (entry.files / "path").write_text(str(entry.files / "path"))
    with store.open(key()) as entry:
        assert entry.files == built
        assert Path((entry.files / "path").read_text()).samefile(entry.files / "path")
        assert entry.files.is_absolute()


def test_another_part_is_another_entry(store: Store) -> None:
    build(store, key(dtype="bfloat16", sources="1"))
    for other in (key(dtype="float32", sources="1"), key(dtype="bfloat16", sources="2")):
        with store.open(other) as entry:
            assert (entry.found, entry.note) == (False, None)
    with store.open(key(dtype="bfloat16", sources="1")) as entry:
        assert entry.found


def test_the_files_say_what_they_are(store: Store) -> None:
    """Readable by people, and by programs that are not ours."""
    before_s = time.time()
    folder = build(store, key("tiny", bucket="8"))
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["parts"] == {"name": "tiny", "bucket": "8"}
    assert meta["bytes"] == 207
    assert before_s <= meta["made_s"] <= time.time()
    assert 0 <= meta["built_s"] < 60
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["key"] == key("tiny", bucket="8").digest
    names = [name for name, _, _ in manifest["files"]]
    assert names == ["files/a.so", "files/deep/er/b.cpp", "files/empty", "meta.json"]
    sums = "".join(f"{sha256}  {name}\n" for name, _, sha256 in manifest["files"])
    sums += (folder / "manifest.sha256").read_text()
    command = ["sha256sum", "--check", "--strict"]
    done = subprocess.run(command, cwd=folder, input=sums, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count(": OK")) == (0, 5)


def test_only_the_user_may_enter(store: Store) -> None:
    before = os.umask(0)
    try:
        folder = build(store, key())
    finally:
        os.umask(before)
    for made in (store.root, folder.parent, folder, folder / "files"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert stat.S_IMODE(lock_of(store.root, folder.name).stat().st_mode) == 0o600


def test_a_build_that_fails_leaves_nothing(store: Store) -> None:
    def fail(error: BaseException) -> None:
        with store.open(key()) as entry:
            write(entry)
            raise error

    for error in (ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
        assert list(folder_of(store.root, key().digest).parent.iterdir()) == []
    assert store.off is None
    assert store.counts.graphs == 0
    with store.open(key()) as entry:
        assert (entry.found, entry.note, read(entry)) == (False, None, {})


def test_a_hit_that_fails_stays(store: Store) -> None:
    build(store, key())
    with contextlib.suppress(ValueError), store.open(key()):
        raise ValueError("no")
    with store.open(key()) as entry:
        assert entry.found


# Damage.


def so(folder: Path) -> Path:
    return folder / "files" / "a.so"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "truncated: files/a.so has 10 of 200 bytes": lambda f: os.truncate(so(f), 10),
    "grown: files/a.so has 300 of 200 bytes": lambda f: os.truncate(so(f), 300),
    "changed: files/a.so has other content than was written": lambda f: flip(so(f)),
    "missing: files/a.so": lambda f: so(f).unlink(),
    "foreign: files/deep/new.so is not in the manifest": lambda f: (
        f / "files" / "deep" / "new.so"
    ).write_bytes(b""),
    "foreign: top is not in the manifest": lambda f: (f / "top").write_bytes(b""),
    "foreign: files/link is no plain file": lambda f: (f / "files" / "link").symlink_to("a.so"),
    "foreign: files/pipe is no plain file": lambda f: os.mkfifo(f / "files" / "pipe"),
    "changed: meta.json has other content than was written": lambda f: flip(f / "meta.json"),
    "changed: manifest.json or manifest.sha256, they do not agree": lambda f: os.truncate(
        f / "manifest.json", 50
    ),
    "missing: manifest.json": lambda f: (f / "manifest.json").unlink(),
    "unfinished: no manifest.sha256, as if who built it was killed": lambda f: (
        f / "manifest.sha256"
    ).unlink(),
    "foreign: files/\\udcff is not in the manifest": lambda f: Path(
        os.fsdecode(bytes(f / "files") + b"/\xff")
    ).write_bytes(b""),
}


@pytest.mark.parametrize("told", DAMAGE)
def test_damage_is_named_and_built_again(
    store: Store, caplog: pytest.LogCaptureFixture, told: str
) -> None:
    folder = build(store, key())
    DAMAGE[told](folder)
    (verdict,) = store.verify()
    assert verdict.faults == (told,)
    with store.open(key()) as entry:
        assert (entry.found, entry.kept, entry.note) == (False, True, told)
        assert read(entry) == {}
        write(entry)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert told in record.getMessage()
    with store.open(key()) as entry:
        assert (entry.found, read(entry)) == (True, CONTENT)


def test_a_copy_under_another_key_is_foreign(store: Store) -> None:
    folder = build(store, key("x"))
    other = folder_of(store.root, key("y").digest)
    other.parent.mkdir()
    subprocess.run(["cp", "-r", str(folder), str(other)], check=True)
    with store.open(key("y")) as entry:
        assert not entry.found
        told = f"foreign: made for {folder.name[:12]}, not for {other.name[:12]}"
        assert entry.note == told


def test_another_format_is_foreign(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("compiler.store_seal._FORMAT", 9)
        build(store, key())
    with store.open(key()) as entry:
        assert (entry.found, entry.note) == (False, "foreign: format 9, this is format 1")


def test_a_file_of_another_user_is_foreign(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    build(store, key())
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    (verdict,) = store.verify()
    assert f"foreign: files/a.so belongs to user {user}" in verdict.faults


def test_a_file_in_place_of_an_entry(store: Store) -> None:
    folder = folder_of(store.root, key().digest)
    for make in (lambda: folder.write_bytes(b"x"), lambda: folder.symlink_to("nowhere")):
        folder.parent.mkdir(parents=True, exist_ok=True)
        make()
        with contextlib.suppress(ValueError), store.open(key()) as entry:
            assert not entry.found
            assert "unfinished" in str(entry.note)
            raise ValueError


def test_many_faults_are_one_line(store: Store) -> None:
    with store.open(key()) as entry:
        write(entry, {f"{i}.so": b"x" for i in range(9)})
    for file in (folder_of(store.root, key().digest) / "files").iterdir():
        file.unlink()
    with store.open(key()) as entry:
        assert entry.note is not None
        assert entry.note.endswith("missing: files/4.so; and 4 more")


def test_what_compilers_add_later_is_no_damage(store: Store) -> None:
    """Locks are never loaded; Python's own cache would be, unchecked, so it goes before use."""
    with store.open(key()) as entry:
        write(entry)
        write(entry, {"locks/a.lock": b"", "__pycache__/a.pyc": b"1"})
    with store.open(key()) as entry:
        assert entry.found
        assert not (entry.files / "__pycache__").exists()
        write(entry, {"locks/b.lock": b"", "deep/__pycache__/b.pyc": b"2"})
    (verdict,) = store.verify()
    assert verdict.faults == ()
    assert (entry.files / "deep" / "__pycache__").exists()  # to verify changes nothing
    with store.open(key()) as entry:
        assert (entry.found, read(entry)) == (True, CONTENT)


def test_what_a_compiler_adds_to_a_hit_is_kept(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """As a probe of the CPU that an earlier graph of the same process paid for."""
    folder = build(store, key("x", bucket="8"))
    before = json.loads((folder / "meta.json").read_text())
    with caplog.at_level(logging.INFO), store.open(key("x", bucket="8")) as entry:
        write(entry, {"probe.so": b"1"})
    assert f"graph {folder.name[:12]}: 1 files were added to it" in caplog.text
    assert str(store.counts) == "2 graphs, 1 hits (1 added to)"
    with store.open(key("x", bucket="8")) as entry:
        assert (entry.found, read(entry)) == (True, {**CONTENT, "probe.so": b"1"})
    assert str(store.counts) == "3 graphs, 2 hits (1 added to)"
    after = json.loads((folder / "meta.json").read_text())
    assert after == {**before, "bytes": before["bytes"] + 1}
    flip(folder / "files" / "probe.so")
    assert len(store.verify()[0].faults) == 1


def test_who_leaves_last_seals_what_was_added(store: Store) -> None:
    build(store, key())
    with store.open(key()) as one:
        with Store(store.root).open(key()) as two:
            write(two, {"probe.so": b"1"})
        assert store.verify()[0].faults != ()
        assert one.found
    assert store.verify()[0].faults == ()


def test_growing_does_not_hide_damage(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    folder = build(store, key())
    with store.open(key()) as entry:
        write(entry, {"probe.so": b"1"})
        flip(entry.files / "a.so")
    assert len(store.verify()[0].faults) == 2
    with store.open(key()) as entry:
        assert not entry.found
        write(entry)
    with store.open(key()) as entry:
        write(entry, {"probe.so": b"1"})
        (entry.files / "link").symlink_to("a.so")
    assert len(store.verify()[0].faults) == 2
    assert store.off is None
    assert folder.is_dir()


def test_a_hit_that_fails_does_not_grow(store: Store) -> None:
    build(store, key())
    with contextlib.suppress(ValueError), store.open(key()) as entry:
        write(entry, {"half.so": b"1"})
        raise ValueError
    with store.open(key()) as entry:
        assert entry.note == "foreign: files/half.so is not in the manifest"


def test_an_entry_of_nothing(store: Store) -> None:
    for _ in range(2):
        with store.open(key()) as entry:
            assert list(entry.files.iterdir()) == []
    assert entry.found
    entry.files.rmdir()
    with store.open(key()) as entry:
        assert (entry.found, entry.note) == (False, "missing: files")


def test_what_cannot_be_kept_is_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with store.open(key()) as entry:
        (entry.files / "link").symlink_to("/")
    assert "is not kept: foreign: files/link is no plain file" in caplog.text
    assert str(store.counts) == "1 graphs, 0 hits, 1 not kept"
    assert entry.files.exists()  # until the process ends: what was compiled may want them
    assert store.off is None


# One process, many threads.


def test_threads_build_once(store: Store) -> None:
    built = []

    def start() -> None:
        def make(entry) -> None:
            if not entry.found:
                time.sleep(0.1)
                write(entry)
                built.append(1)
            assert read(entry) == CONTENT

        store.use(key(), make)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert str(store.counts) == "6 graphs, 5 hits"


def test_what_was_built_between_two_locks_is_found(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes look, see nothing and both want to build: the second finds what is built."""
    ours, asked = store_lock.lock, []

    def late(path: Path, *, shared: bool, wait_s: float) -> store_lock.Lock | None:
        if not shared and not asked:
            asked.append(path)
            build(Store(store.root), key())
        return ours(path, shared=shared, wait_s=wait_s)

    monkeypatch.setattr("compiler.store.lock", late)
    with store.open(key()) as entry:
        assert (entry.found, entry.note, read(entry)) == (True, None, CONTENT)
    assert len(asked) == 1


def test_readers_do_not_wait_for_each_other(store: Store) -> None:
    build(store, key())
    with store.open(key()) as one, Store(store.root).open(key()) as two:
        assert one.found
        assert (two.found, two.waited_s) == (True, 0.0)


def test_waiting_has_an_end(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    impatient = Store(store.root, patience_s=0.2)
    with caplog.at_level(logging.INFO), store.open(key()) as first:
        with impatient.open(key()) as entry:
            assert (entry.found, entry.kept) == (False, False)
            assert 0.2 <= entry.waited_s < 30
            assert store.root not in entry.files.parents
            write(entry)
        write(first)
    assert f"which process {os.getpid()} holds" in caplog.text
    assert "still holds it after 0.2 s" in caplog.text
    assert impatient.off is None
    with impatient.open(key()) as entry:
        assert entry.found


# `use`.


def test_use_builds_again_what_was_found_and_fails(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    build(store, key())
    found = []

    def make(entry) -> str:
        found.append(entry.found)
        if entry.found:
            raise ImportError("a.so: wrong ELF class")
        write(entry)
        return "program"

    assert store.use(key(), make) == "program"
    assert found == [True, False]
    assert "found whole and failed: a.so: wrong ELF class; it is removed" in caplog.text


def test_use_raises_what_a_build_raises(store: Store) -> None:
    calls = []

    def make(entry) -> None:
        calls.append(entry.found)
        raise ValueError("not compilable")

    with pytest.raises(ValueError, match="not compilable"):
        store.use(key(), make)
    assert calls == [False]


def test_use_leaves_an_entry_that_others_use(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    build(store, key())

    def fail(entry) -> None:
        raise ImportError("no")

    with store.open(key()) as entry:
        with pytest.raises(ImportError):
            Store(store.root).use(key(), fail)
        assert read(entry) == CONTENT
    assert "in use by another process and stays" in caplog.text


def test_the_default_root_is_absolute_and_the_users() -> None:
    root = Store.default_root()
    assert root.is_absolute()
    assert "dsv4" in root.parts


def test_a_relative_root_does_not_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("cache")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    build(store, key())
    assert (tmp_path / "cache").is_dir()
