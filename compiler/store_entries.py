"""The entries under a store's root as a list: what there is, what is damaged, what may go.

Nothing here makes an entry or trusts one: metadata is for people, and a folder is an entry by its
place and name alone, `<root>/ab/ab12...` with 64 digits. Whatever else is there is not touched.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from compiler import store_seal
from compiler.store_lock import lock

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """One entry on the disk. Times are seconds since 1970."""

    digest: str
    parts: tuple[tuple[str, str], ...]  # of its key; none if the entry does not say
    num_bytes: int
    built_s: float | None  # seconds it took to build
    made_s: float
    used_s: float
    whole: bool  # it was completed; whether it still is what was written, `verify` says
    busy: bool  # a process builds it right now


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What verifying one entry found; neither faults nor busy: it is what was written."""

    digest: str
    faults: tuple[str, ...] = ()
    busy: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned:
    """What was removed and why, and what would have been but for a process that uses it."""

    removed: tuple[tuple[Stored, str], ...]
    in_use: tuple[Stored, ...]

    @property
    def freed_bytes(self) -> int:
        """Bytes of all that was removed."""
        return sum(entry.num_bytes for entry, _ in self.removed)


def folder_of(root: Path, digest: str) -> Path:
    """Where the entry of a digest is."""
    return root / digest[:2] / digest


def lock_of(root: Path, digest: str) -> Path:
    """Who may touch the entry of a digest; its time says when the entry was last used."""
    return root / digest[:2] / f"{digest}.lock"


def entries(root: Path) -> list[Stored]:
    """Every entry, the one used last first. No root, no entries. Raises OSError."""
    found = (_stored(root, digest) for digest in _digests(root))
    return sorted((e for e in found if e is not None), key=lambda e: (-e.used_s, e.digest))


def verify(root: Path, digest: str | None = None) -> list[Verdict]:
    """The verdict on every entry, or on one. Changes nothing.

    Raises ValueError if there is no such entry, and OSError.
    """
    wanted = list(_digests(root)) if digest is None else [digest]
    if digest is not None and not os.path.lexists(folder_of(root, digest)):
        raise ValueError(f"{root} has no entry {digest!r}; give all 64 digits of one that it has")
    verdicts = []
    for each in wanted:
        with _looking(root, each) as free:
            if free:
                faults = store_seal.faults(folder_of(root, each), each)
                verdicts.append(Verdict(digest=each, faults=faults))
            else:
                verdicts.append(Verdict(digest=each, busy=True))
    return verdicts


def prune(
    root: Path,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    damaged: bool = False,
    everything: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Remove entries: all, the damaged, those not used for a time, and the longest unused of the
    rest until `max_bytes` remain. An entry that a process builds or loads stays. Raises OSError.
    """
    now_s = time.time()

    def due(entry: Stored) -> str | None:
        if everything:
            return "all"
        if older_than_s is not None and now_s - entry.used_s > older_than_s:
            return "not used for long"
        faults = store_seal.faults(folder_of(root, entry.digest), entry.digest) if damaged else ()
        return faults[0] if faults else None

    sweep, there = _Sweep(root, dry_run), entries(root)[::-1]
    for entry in there:
        sweep.take(entry, due)
    left = [entry for entry in there if entry.digest not in sweep.removed]
    num_bytes = sum(entry.num_bytes for entry in left)
    for entry in left:
        if max_bytes is None or num_bytes <= max_bytes:
            break
        if sweep.take(entry, lambda _: "longest unused"):
            num_bytes -= entry.num_bytes
    return Pruned(removed=tuple(sweep.removed.values()), in_use=tuple(sweep.in_use.values()))


class _Sweep:
    """What a pruning did so far, by digest."""

    def __init__(self, root: Path, dry_run: bool) -> None:
        self._root, self._dry_run = root, dry_run
        self.removed: dict[str, tuple[Stored, str]] = {}
        self.in_use: dict[str, Stored] = {}

    def take(self, entry: Stored, due: Callable[[Stored], str | None]) -> bool:
        """Remove the entry if it is due and no process uses it; whether it went."""
        if due(entry) is None:
            return False
        held = lock(lock_of(self._root, entry.digest), shared=False)
        if held is None:
            self.in_use[entry.digest] = entry
            return False
        try:
            # Once more: it may have been used or completed until we held it.
            now = _stored(self._root, entry.digest)
            why = due(now) if now is not None else None
            if now is None or why is None:
                return False
            if not self._dry_run:
                remove_folder(folder_of(self._root, entry.digest))
                held.remove()
        finally:
            held.release()
        self.removed[entry.digest] = (now, why)
        return True


def remove(root: Path, digest: str, *, only_unfinished: bool = False) -> bool:
    """Remove one entry; whether it is gone. False: a process uses it, or it is whole."""
    held = lock(lock_of(root, digest), shared=False)
    if held is None:
        return False
    try:
        folder = folder_of(root, digest)
        if only_unfinished and store_seal.sealed(folder):
            return False
        remove_folder(folder)
        held.remove()
    finally:
        held.release()
    return True


def remove_folder(folder: Path) -> None:
    """Remove what is at an entry's place, whatever it is."""
    # First what makes it whole: who is killed in the middle leaves an unfinished entry.
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        (folder / store_seal.SUM).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _digests(root: Path) -> Iterator[str]:
    """The names of all entries, in order."""
    if not root.exists():
        return
    for group in sorted(p for p in root.iterdir() if p.is_dir() and not p.is_symlink()):
        for path in sorted(group.iterdir()):
            if _DIGEST.fullmatch(path.name) and path == folder_of(root, path.name):
                yield path.name


def _stored(root: Path, digest: str) -> Stored | None:
    """One entry as it is now; None if it went meanwhile."""
    folder = folder_of(root, digest)
    try:
        made_s, num_bytes = folder.lstat().st_mtime, _bytes_below(folder)
    except FileNotFoundError:
        return None
    meta = store_seal.read_meta(folder)
    parts, built_s = meta.get("parts"), meta.get("built_s")
    with _looking(root, digest) as free:
        busy = not free
    try:
        used_s = lock_of(root, digest).stat().st_mtime
    except FileNotFoundError:
        used_s = made_s
    return Stored(
        digest=digest,
        parts=tuple((str(k), str(v)) for k, v in parts.items()) if isinstance(parts, dict) else (),
        num_bytes=num_bytes,
        built_s=built_s if isinstance(built_s, float) else None,
        made_s=made_s,
        used_s=used_s,
        whole=store_seal.sealed(folder),
        busy=busy,
    )


def _bytes_below(path: Path) -> int:
    """Bytes of all files in a folder, of whatever kind; links count as themselves."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    num_bytes = 0
    for inner in path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            num_bytes += _bytes_below(inner)
    return num_bytes


@contextlib.contextmanager
def _looking(root: Path, digest: str) -> Iterator[bool]:
    """Whether nobody builds the entry, and nobody will inside."""
    path = lock_of(root, digest)
    there = path.exists()
    held = lock(path, shared=True) if there else None
    try:
        yield held is not None or not there
    finally:
        if held is not None:
            held.release()
