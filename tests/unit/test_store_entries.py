"""The list of entries: what there is, what may go, and what is none of ours."""

import os
import time
from pathlib import Path

import pytest

from compiler import store_entries
from compiler.key import Key
from compiler.store import Store
from compiler.store_entries import folder_of, lock_of
from tests.kept import build, key, write

DAY_S = 86400
FILES_BYTES = 207


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def unused_for(store: Store, wanted: Key, seconds: float) -> None:
    then_s = time.time() - seconds
    os.utime(lock_of(store.root, wanted.digest), (then_s, then_s))


def three(store: Store) -> list[Key]:
    """Entries that were used 1, 2 and 3 days ago."""
    keys = [key(name) for name in "abc"]
    for days, each in enumerate(keys, 1):
        build(store, each)
        unused_for(store, each, days * DAY_S)
    return keys


def digests(store: Store) -> list[str]:
    return [entry.digest for entry in store.entries()]


def test_no_root_no_entries(store: Store) -> None:
    assert store.entries() == []
    assert store.verify() == []
    assert store.prune(everything=True).removed == ()
    assert not store.root.exists()


def test_entries_are_told_by_use(store: Store) -> None:
    start_s = time.time()
    keys = three(store)
    found = store.entries()
    assert [e.digest for e in found] == [k.digest for k in keys]
    assert [e.parts for e in found] == [k.parts for k in keys]
    for days, entry in enumerate(found, 1):
        assert entry.used_s == pytest.approx(time.time() - days * DAY_S, abs=60)
        assert start_s - 1 <= entry.made_s <= time.time()
        assert entry.num_bytes == sum(
            f.stat().st_size for f in folder_of(store.root, entry.digest).rglob("*") if f.is_file()
        )
        assert entry.num_bytes > FILES_BYTES
        assert entry.built_s is not None
        assert (entry.whole, entry.busy) == (True, False)
    with store.open(keys[2]):
        assert digests(store)[0] == keys[2].digest
    assert digests(store)[0] == keys[2].digest


def test_looking_is_no_use(store: Store) -> None:
    keys = three(store)
    before = [e.used_s for e in store.entries()]
    store.verify()
    store.prune(damaged=True, older_than_s=9 * DAY_S, max_bytes=10**9)
    store.prune(everything=True, dry_run=True)
    assert [e.used_s for e in store.entries()] == before
    assert digests(store) == [k.digest for k in keys]


def test_an_entry_without_metadata_is_still_told(store: Store) -> None:
    folder = build(store, key())
    for content in (b"", b"[1]", b'{"parts": 3, "built_s": "x"}', b"\xff"):
        (folder / "meta.json").write_bytes(content)
        (entry,) = store.entries()
        assert (entry.parts, entry.built_s, entry.whole) == ((), None, True)
        (verdict,) = store.verify(folder.name)
        assert len(verdict.faults) == 1


def test_an_entry_without_its_lock(store: Store) -> None:
    """As in a copied store."""
    folder = build(store, key())
    lock_of(store.root, folder.name).unlink()
    (entry,) = store.entries()
    assert entry.used_s == entry.made_s
    assert store.verify()[0].faults == ()
    assert not lock_of(store.root, folder.name).exists()
    with store.open(key()) as opened:
        assert opened.found


def test_an_entry_that_is_not_there_has_no_verdict(store: Store) -> None:
    with pytest.raises(ValueError, match="no entry 'ab'"):
        store.verify("ab")


# Pruning.


def test_the_old_go(store: Store) -> None:
    keys = three(store)
    sizes = {e.digest: e.num_bytes for e in store.entries()}
    pruned = store.prune(older_than_s=1.5 * DAY_S)
    gone = {k.digest for k in keys[1:]}
    assert {e.digest: why for e, why in pruned.removed} == dict.fromkeys(gone, "not used for long")
    assert pruned.freed_bytes == sum(sizes[d] for d in gone)
    assert digests(store) == [keys[0].digest]
    assert not any(folder_of(store.root, d).exists() for d in gone)
    assert not any(lock_of(store.root, d).exists() for d in gone)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_the_longest_unused_go_first(store: Store, kept: int) -> None:
    keys = three(store)
    sizes = [e.num_bytes for e in store.entries()]
    pruned = store.prune(max_bytes=sum(sizes[:kept]))
    assert digests(store) == [k.digest for k in keys[:kept]]
    assert [e.digest for e, _ in pruned.removed] == [k.digest for k in keys[kept:]][::-1]
    assert {why for _, why in pruned.removed} <= {"longest unused"}


def test_one_byte_too_few(store: Store) -> None:
    three(store)
    total = sum(e.num_bytes for e in store.entries())
    assert len(store.prune(max_bytes=total - 1).removed) == 1


def test_damage_goes(store: Store) -> None:
    keys = three(store)
    (folder_of(store.root, keys[1].digest) / "files" / "a.so").unlink()
    (folder_of(store.root, keys[2].digest) / "manifest.sha256").unlink()
    pruned = store.prune(damaged=True)
    assert {e.digest: why.split(":")[0] for e, why in pruned.removed} == {
        keys[1].digest: "missing",
        keys[2].digest: "unfinished",
    }
    assert digests(store) == [keys[0].digest]


def test_rules_add_up(store: Store) -> None:
    """What goes for one reason makes room: what is left is kept if it fits."""
    keys = three(store)
    (folder_of(store.root, keys[0].digest) / "files" / "a.so").unlink()
    size = max(e.num_bytes for e in store.entries())
    pruned = store.prune(damaged=True, older_than_s=2.5 * DAY_S, max_bytes=size)
    assert [e.digest for e, _ in pruned.removed] == [keys[2].digest, keys[0].digest]
    assert digests(store) == [keys[1].digest]


@pytest.mark.parametrize(
    "rules", [{"everything": True}, {"older_than_s": 1.5 * DAY_S}, {"max_bytes": 1500}]
)
def test_a_dry_run_says_the_same_and_removes_nothing(store: Store, rules: dict) -> None:
    three(store)
    before = sorted(store.root.rglob("*"))
    told = store.prune(**rules, dry_run=True)
    assert len(told.removed) >= 2
    assert sorted(store.root.rglob("*")) == before
    assert store.prune(**rules) == told
    assert store.prune(**rules).removed == ()


def test_what_is_in_use_stays(store: Store) -> None:
    keys = three(store)
    with store.open(keys[2]):
        pruned = Store(store.root).prune(everything=True)
    assert [e.digest for e in pruned.in_use] == [keys[2].digest]
    assert digests(store) == [keys[2].digest]
    with store.open(keys[2]):
        assert Store(store.root).prune(max_bytes=0).freed_bytes == 0
        assert Store(store.root).prune(damaged=True).in_use == ()  # nor would it have gone


def test_what_was_used_meanwhile_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking and locking."""
    keys, lock = three(store), store_entries.lock

    def late(path: Path, *, shared: bool) -> object:
        if not shared:
            unused_for(store, keys[2], 0)
        return lock(path, shared=shared)

    monkeypatch.setattr(store_entries, "lock", late)
    assert store.prune(older_than_s=2.5 * DAY_S).removed == ()


def test_what_is_none_of_ours_stays(store: Store) -> None:
    """The root may be any folder that the user named."""
    digest = key().digest
    build(store, key())
    others = [
        store.root / "notes.txt",
        store.root / "ab" / "cd" / "notes.txt",
        store.root / digest[:2] / "notes.txt",
        store.root / digest / "notes.txt",  # not in a group
        store.root / "xy" / digest / "notes.txt",  # not in its group
        store.root / digest[:2] / digest.upper() / "notes.txt",
        store.root / digest[:2] / f"{digest}0" / "notes.txt",
        store.root.parent / "outside" / ("e" * 64) / "notes.txt",
    ]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("mine")
    (store.root / "ee").symlink_to(store.root.parent / "outside")
    link = "f" * 64
    (store.root / "ff").mkdir()
    (store.root / "ff" / link).symlink_to(store.root.parent / "outside")
    assert sorted(digests(store)) == sorted([digest, link])
    store.prune(everything=True)
    assert store.entries() == []
    assert [o.read_text() for o in others] == ["mine"] * len(others)


def test_who_removes_an_entry_may_be_killed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is half removed is unfinished, whatever went first."""
    build(store, key())

    def stop(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            store.prune(everything=True)
    assert store.entries()[0].whole is False


def test_what_is_whole_is_not_removed_as_unfinished(store: Store) -> None:
    """Another process may have completed what we could not."""
    folder = build(store, key())
    assert not store_entries.remove(store.root, folder.name, only_unfinished=True)
    assert store.verify()[0].faults == ()
    (folder / "manifest.sha256").unlink()
    assert store_entries.remove(store.root, folder.name, only_unfinished=True)
    assert list(folder.parent.iterdir()) == []


def test_a_pruned_entry_is_built_again(store: Store) -> None:
    build(store, key())
    store.prune(everything=True)
    with store.open(key()) as entry:
        assert (entry.found, entry.note) == (False, None)
        write(entry)
    assert store.off is None
