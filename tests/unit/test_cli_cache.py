"""`dsv4 cache`: what there is, whether it is whole, and how it goes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compiler.store import Store
from compiler.store_entries import folder_of, lock_of
from registry import cli
from registry.cli_cache import age, read_age, read_bytes
from tests.kept import build, key

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "cache")
    for bucket, days in (("8", 0), ("64", 40)):
        each = key(model="tiny", bucket=bucket, dtype="bfloat16", backend="inductor", step="step")
        folder = build(store, each)
        then_s = time.time() - 86400 * days
        os.utime(lock_of(store.root, folder.name), (then_s, then_s))
    return store


def cache(capsys: pytest.CaptureFixture[str], store: Store, *words: str) -> tuple[int, list[str]]:
    """The exit code and the lines."""
    code = cli.main(["cache", *words, "--cache-dir", str(store.root)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out.splitlines()


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["cache", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("dsv4: error: ")
    return line


def test_ls(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    recent, old = store.entries()
    code, lines = cache(capsys, store, "ls")
    assert code == 0
    total = (recent.num_bytes + old.num_bytes) / 1000
    assert lines[0] == f"{store.root}: 2 entries, {total:.3f} kB"
    assert [line.split() for line in lines[1:]] == [
        ["entry", "model", "step", "bucket", "dtype", "backend", "size", "age", "used", "state"],
        [
            recent.digest[:12], "tiny", "step", "8", "bfloat16", "inductor",
            *size_of(recent.num_bytes), "0s", "0s",
        ],
        [
            old.digest[:12], "tiny", "step", "64", "bfloat16", "inductor",
            *size_of(old.num_bytes), "0s", "5w",
        ],
    ]  # fmt: skip


def size_of(num_bytes: int) -> list[str]:
    return [f"{num_bytes}", "B"] if num_bytes < 1000 else [f"{num_bytes / 1000:.3f}", "kB"]


def test_ls_of_one_says_its_key(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    entry = store.entries()[1]
    code, lines = cache(capsys, store, "ls", entry.digest[:8])
    assert code == 0
    told = dict(line.split(maxsplit=1) for line in lines[1:])
    assert told == {"digest": entry.digest, "state": "whole", **dict(entry.parts)}


def test_ls_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = Store(tmp_path / "absent")
    assert cache(capsys, store, "ls") == (0, [f"{store.root}: 0 entries, 0 B"])
    assert not store.root.exists()


def test_ls_says_what_is_unfinished_and_being_built(
    capsys: pytest.CaptureFixture[str], store: Store
) -> None:
    unfinished = store.entries()[1].digest
    (folder_of(store.root, unfinished) / "manifest.sha256").unlink()
    with store.open(key("new")):
        _, lines = cache(capsys, store, "ls")
    states = {line.split()[0]: line for line in lines[2:]}
    assert states[unfinished[:12]].endswith("  unfinished")
    assert states[key("new").digest[:12]].endswith("  being built")
    assert states[key("new").digest[:12]].split()[1] == "-"  # says nothing of itself yet


def test_verify(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    first, second = (e.digest for e in store.entries())
    code, lines = cache(capsys, store, "verify")
    assert code == 0
    assert sorted(lines[:2]) == sorted([f"{first[:12]}  OK", f"{second[:12]}  OK"])
    assert lines[2] == f"{store.root}: 2 entries, 0 damaged"
    files = folder_of(store.root, second) / "files"
    os.truncate(files / "a.so", 10)
    (files / "empty").unlink()
    code, lines = cache(capsys, store, "verify")
    assert code == 1
    assert f"{second[:12]}  truncated: files/a.so has 10 of 200 bytes" in lines
    assert f"{second[:12]}  missing: files/empty" in lines
    assert f"{first[:12]}  OK" in lines
    assert lines[-1] == f"{store.root}: 2 entries, 1 damaged"
    assert cache(capsys, store, "verify", first)[0] == 0
    assert cache(capsys, store, "verify", second[:9])[0] == 1
    assert len(store.entries()) == 2


def test_verify_leaves_alone_what_is_being_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = Store(tmp_path / "cache")
    with store.open(key()):
        code, lines = cache(capsys, store, "verify")
    assert (code, lines[0]) == (0, f"{key().digest[:12]}  being built, not verified")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--older-than", "30d"], ["8"]),
        (["--older-than", "6w"], ["8", "64"]),
        (["--max-bytes", "1.5kB"], ["8"]),  # one is about 1.1 kB
        (["--max-bytes", "1kB"], []),
        (["--max-bytes", "1GiB"], ["8", "64"]),
        (["--all"], []),
        (["--damaged"], ["8", "64"]),
    ],
)
def test_prune(
    capsys: pytest.CaptureFixture[str], store: Store, words: list[str], left: list[str]
) -> None:
    entries = store.entries()
    code, dry = cache(capsys, store, "prune", *words, "--dry-run")
    assert (code, store.entries()) == (0, entries)
    code, lines = cache(capsys, store, "prune", *words)
    assert [dict(e.parts)["bucket"] for e in store.entries()] == left
    count = len(entries) - len(left)
    freed = sum(e.num_bytes for e in entries) - sum(e.num_bytes for e in store.entries())
    told = " ".join(size_of(freed))
    named = "1 entry" if count == 1 else f"{count} entries"
    assert (code, lines[-1]) == (0, f"{store.root}: freed {told}, {named}")
    assert len(lines) == count + 1
    assert dry == [*lines[:-1], lines[-1].replace("freed", "would free")]


def test_prune_says_what_stays(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    recent = store.entries()[0]
    with Store(store.root).open(key(**{n: v for n, v in recent.parts if n != "name"})):
        _, lines = cache(capsys, store, "prune", "--all")
    assert f"{recent.digest[:12]}  stays: a process uses it" in lines
    assert [e.digest for e in store.entries()] == [recent.digest]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "the following arguments are required: action"),
        (("remove",), "invalid choice: 'remove'"),
        (("prune",), "give --older-than 30d, --max-bytes 2GiB, --damaged or --all"),
        (("prune", "--dry-run"), "give --older-than 30d"),
        (("prune", "ab", "--all"), "prune takes no entry, it is 'ab'"),
        (("ls", "--all"), "--all goes with prune, not with ls"),
        (("verify", "--older-than", "3d"), "--older-than goes with prune, not with verify"),
        (("prune", "--older-than", "30"), "--older-than is '30'; give a number and one of"),
        (("prune", "--older-than", "-1d"), "expected one argument"),
        (("prune", "--max-bytes", "0.5"), "--max-bytes is '0.5'; give a number and a unit"),
        (("prune", "--max-bytes", "50%"), "--max-bytes is '50%'"),
        (("prune", "--max-bytes", "8G"), "write GB or GiB"),
        (("verify", "ab"), "no of 0 entries in"),
        (("ls", "ab"), "no of 0 entries in"),
    ],
)
def test_wrong_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    assert told in fails(capsys, *words, "--cache-dir", str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_digits_of_several_entries(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    assert "2 of 2 entries" in fails(capsys, "verify", "", "--cache-dir", str(store.root))


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [("30d", 30 * 86400), ("1.5h", 5400), ("2w", 14 * 86400), (" 90s ", 90), ("5m", 300)],
)
def test_ages_are_read(spec: str, seconds: float) -> None:
    assert read_age(spec) == seconds


@pytest.mark.parametrize("spec", ["", "d", "30", "30 d", "30D", "1e3s", "-1d", "nand", "1y"])
def test_what_is_no_age(spec: str) -> None:
    with pytest.raises(ValueError, match="as 30d"):
        read_age(spec)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-5, "0s"), (0.4, "0s"), (59, "59s"), (3599, "59m"), (86400, "1d"), (700000, "1w")],
)
def test_ages_are_told(seconds: float, told: str) -> None:
    assert age(seconds) == told


def test_sizes_are_read() -> None:
    assert read_bytes("2GiB") == 2 * 2**30
    assert read_bytes("500 MB") == 500 * 10**6


def test_it_needs_no_torch(store: Store) -> None:
    script = (
        "import sys; from registry.cli import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", script, "cache", "ls", "--cache-dir", str(store.root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 entries" in done.stdout


def test_the_users_folder_is_the_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "default_root", staticmethod(lambda: tmp_path / "mine"))
    assert cli.main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine'}: 0 entries, 0 B\n"


def test_k3_no_other_tools_folder_is_set(tmp_path: Path) -> None:
    """A user's own choice of folders, ours and other tools', is never overwritten."""
    script = (
        "import os, sys; before = dict(os.environ); from compiler.store import Store;"
        "from tests.kept import build, key; store = Store(Store.default_root());"
        "build(store, key()); assert dict(os.environ) == before; print(store.root)"
    )
    own = {"XDG_CACHE_HOME": str(tmp_path / "xdg"), "TORCHINDUCTOR_CACHE_DIR": "/users/own"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "xdg")


@pytest.mark.parametrize("action", ["ls", "verify", "prune"])
def test_a_file_is_no_cache(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    more = ["--all"] if action == "prune" else []
    told = fails(capsys, action, *more, "--cache-dir", str(tmp_path / "file"))
    assert f"the cache directory {tmp_path}/file is a file; give a folder" in told
