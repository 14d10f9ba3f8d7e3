"""One store and many processes: starts at the same time, and processes that are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compiler import store_entries
from compiler.store import Store
from compiler.store_entries import folder_of
from tests.kept import CONTENT, key, read, write

ROOT = Path(__file__).resolve().parents[2]

# Says what it does line by line; builds until it reads a line.
STARTS = """
import logging, sys
from compiler.store import Store
from tests.kept import CONTENT, key, read, write
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
store = Store(sys.argv[1])
with store.open(key()) as entry:
    print("found" if entry.found else "builds", entry.note, flush=True)
    if not entry.found:
        (entry.files / "half").write_bytes(b"x")
        if sys.stdin.readline() == "die":
            raise SystemExit(3)
        (entry.files / "half").unlink()
        write(entry)
    assert read(entry) == CONTENT
print(store.counts)
"""


def start(root: Path) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", STARTS, str(root)],
        cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True,
    )  # fmt: skip


def says(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def hears(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    return process.stderr.readline().strip()


def tell(processes: "list[subprocess.Popen[str]]") -> None:
    """Let whoever of them builds go on."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_two_starts_build_once(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        assert says(first) == "builds None"
        with start(tmp_path) as second:
            # It waits, and says for whom.
            waits = f"waiting for graph {key().digest[:12]}, which process {first.pid} holds"
            assert hears(second) == waits
            assert second.poll() is None
            assert first.communicate("go\n", timeout=60) == ("1 graphs, 0 hits\n", "")
            out, err = second.communicate(timeout=60)
    assert out == "found None\n1 graphs, 1 hits\n"
    assert err.startswith(f"graph {key().digest[:12]}: waited ")
    assert err.endswith(" s for another process\n")


def test_many_starts_build_once(tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(5)]
    tell(processes)
    outs = [p.communicate(timeout=60)[0].splitlines()[0] for p in processes]
    assert sorted(outs) == ["builds None", *["found None"] * 4]
    assert [p.returncode for p in processes] == [0] * 5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_the_middle(how: signal.Signals, tmp_path: Path) -> None:
    with start(tmp_path) as first:
        assert says(first) == "builds None"
        with start(tmp_path) as second:
            assert hears(second).startswith("waiting")
            first.send_signal(how)
            assert first.wait(60) == -how
            told = "unfinished: no manifest.sha256, as if who built it was killed"
            assert says(second) == f"builds {told}"  # and what the first one left is gone
            second.communicate("go\n", timeout=60)
            assert second.returncode == 0
    with Store(tmp_path).open(key()) as entry:
        assert (entry.found, read(entry)) == (True, CONTENT)


def test_a_holder_that_fails_hands_over(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        assert says(first) == "builds None"
        with start(tmp_path) as second:
            assert hears(second).startswith("waiting")
            first.communicate("die", timeout=60)
            assert first.returncode == 3
            assert says(second) == "builds None"
            second.communicate("go\n", timeout=60)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A compiler's workers outlive the build."""
    store = Store(tmp_path)
    with store.open(key()) as entry:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        write(entry)
    try:
        with Store(tmp_path, patience_s=0).open(key()) as entry:
            assert (entry.found, entry.kept) == (True, True)
        assert store_entries.remove(tmp_path, key().digest)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_child_does_not_remove_what_its_parent_uses(tmp_path: Path) -> None:
    script = (
        "import os, sys; from compiler.store import Store; from tests.kept import key\n"
        "with Store('/proc/dsv4').open(key()) as entry: pass\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(entry.files, entry.files.is_dir())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    folder, there = done.stdout.split()
    assert there == "True"
    assert not Path(folder).exists()


def test_pruning_leaves_what_is_being_built(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        assert says(first) == "builds None"
        (entry,) = store_entries.entries(tmp_path)
        assert (entry.busy, entry.whole) == (True, False)
        (verdict,) = store_entries.verify(tmp_path)
        assert (verdict.busy, verdict.faults) == (True, ())
        pruned = store_entries.prune(tmp_path, everything=True, damaged=True, max_bytes=0)
        assert [e.digest for e in pruned.in_use] == [key().digest]
        assert pruned.removed == ()
        assert first.communicate("go\n", timeout=60)[0] == "1 graphs, 0 hits\n"
    assert folder_of(tmp_path, key().digest).is_dir()


def test_who_waits_for_a_removed_lock_takes_the_new_one(tmp_path: Path) -> None:
    """A lock file that was removed locks nobody out: two would build side by side."""
    with start(tmp_path) as first:
        assert says(first) == "builds None"
        with start(tmp_path) as second, start(tmp_path) as third:
            for waiting in (second, third):
                assert hears(waiting).startswith("waiting")
            first.communicate("die", timeout=60)  # removes the lock file that both wait for
            tell([second, third])
            outs = [p.communicate(timeout=60)[0].split()[0] for p in (second, third)]
    assert sorted(outs) == ["builds", "found"]
