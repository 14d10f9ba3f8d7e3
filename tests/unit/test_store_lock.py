"""Locks between open files: shared, alone, removed while somebody waits."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from compiler.store_lock import holder, lock


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_only_sharing_goes_together(first: bool, second: bool, tmp_path: Path) -> None:
    one = lock(tmp_path / "x.lock", shared=first)
    assert one is not None
    two = lock(tmp_path / "x.lock", shared=second)
    assert (two is not None) == (first and second)
    one.release()
    if two is not None:
        two.release()
    three = lock(tmp_path / "x.lock", shared=False)
    assert three is not None
    assert three.waited_s == 0.0
    three.release()


def test_waiting_ends(tmp_path: Path) -> None:
    one = lock(tmp_path / "x.lock", shared=False)
    start_s = time.monotonic()
    assert lock(tmp_path / "x.lock", shared=True, wait_s=0.2) is None
    assert 0.2 <= time.monotonic() - start_s < 30
    assert one is not None
    one.release()


def test_a_removed_lock_locks_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our opening and our locking the file was removed, and made anew by another."""
    path, flock, others = tmp_path / "x.lock", fcntl.flock, []

    def late(file: int, kind: int) -> None:
        if not others:
            path.unlink()
            others.append(path.open("w"))
            flock(others[0], fcntl.LOCK_EX)
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    assert lock(path, shared=False) is None
    others[0].close()
    held = lock(path, shared=False)
    assert held is not None
    held.release()


def test_who_holds_it_alone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    assert holder(path) == "unknown"
    one = lock(path, shared=False)
    assert one is not None
    assert holder(path) == "unknown"
    path.write_text("1234567")
    one.mark()
    assert holder(path) != "1234567"
    assert int(holder(path)) > 0
    one.release()
    told = holder(path)
    two = lock(path, shared=True)
    assert two is not None
    two.mark()
    assert holder(path) == told
    two.release()


def test_marking_says_when(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    for shared in (True, False):
        held = lock(path, shared=shared)
        assert held is not None
        os.utime(path, (1, 1))
        assert path.stat().st_mtime == 1
        held.mark()
        assert abs(path.stat().st_mtime - time.time()) < 60
        held.release()
