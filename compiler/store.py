"""Compiled graphs kept on disk between processes: found whole, or built once.

An entry is what a compiler wrote for one `Key`. It is built at its final place, since compilers
write absolute paths into what they make, under a lock that one process holds alone, and is whole
once its manifest is written (`store_seal.py`). What a killed process left is removed and built
again; so is an entry in which one byte changed, as its files are loaded as code.

A store never fails a program that could run without it. Where the disk is full, read-only or not
safe to load code from, it says so once, is `off`, and entries are made in temporary folders.
"""

import atexit
import contextlib
import dataclasses
import errno
import functools
import itertools
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import platformdirs

from compiler import store_entries, store_seal
from compiler.key import Key
from compiler.store_entries import Pruned, Stored, Verdict, folder_of, lock_of
from compiler.store_lock import Lock, lock

log = logging.getLogger(__name__)

T = TypeVar("T")
_TOLD = 5  # faults named in one line
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The files of one key, for as long as it is open."""

    found: bool  # they were there and are what was written; else `files` is empty: build them
    files: Path
    kept: bool  # in the store; else in a temporary folder of this process
    note: str | None = None  # why what was there was not used
    waited_s: float = 0.0  # for another process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Entries that were opened and left without an error."""

    graphs: int = 0
    hits: int = 0
    grown: int = 0  # hits to which the compiler nevertheless added something
    not_kept: int = 0

    def __str__(self) -> str:
        """As "12 graphs, 12 hits"."""
        told = f"{self.graphs} graphs, {self.hits} hits"
        told += f" ({self.grown} added to)" if self.grown else ""
        return told + (f", {self.not_kept} not kept" if self.not_kept else "")


class Store:
    """The entries below one folder. Threads and processes may share it."""

    def __init__(self, root: str | Path, *, patience_s: float = 1800.0) -> None:
        """Use `root`, which `open` makes; wait for another process `patience_s` at most."""
        self.root = Path(root).absolute()
        self.patience_s = patience_s
        self.off: str | None = None  # why nothing is kept
        self.counts = Counts()
        self._mutex = threading.Lock()

    @staticmethod
    def default_root() -> Path:
        """The user's own cache folder for this program, as the platform has it."""
        return platformdirs.user_cache_path("dsv4").absolute()

    @contextlib.contextmanager
    def open(self, key: Key, *, counted: bool = True) -> Iterator[Entry]:
        """The entry of `key`: whole, or an empty folder that is kept if it is left without error.

        Load inside all that is needed: an entry that is not open may be pruned. A thread must not
        open a key that it has open. What is no graph should not be `counted` as one.
        """
        entry, held = self._begin(key)
        start_s, grew = time.monotonic(), False
        try:
            yield entry
            if held is not None and not entry.found:
                entry = self._complete(key, entry, time.monotonic() - start_s)
            elif held is not None:
                grew = self._grew(entry)
            if counted:
                self._count(entry, grew)
        except BaseException as error:
            if held is not None and not entry.found:
                self._abandon(key, held, error)
            raise
        finally:
            if held is not None:
                held.release()
        if grew:
            self._grow(key.digest)

    def use(self, key: Key, build: Callable[[Entry], T], *, counted: bool = True) -> T:
        """`build(entry)` with the entry open; once more if the store was what failed it.

        That is: the disk failed while it was built, or it was found whole and yet cannot be used;
        then it is removed. Raises what `build` raises.
        """
        entry = None
        try:
            with self.open(key, counted=counted) as entry:
                return build(entry)
        except Exception as error:
            if entry is None or not self._is_at_fault(key, entry, error):
                raise
        with self.open(key, counted=counted) as entry:
            return build(entry)

    def entries(self) -> list[Stored]:
        """As `store_entries.entries`."""
        return store_entries.entries(self.root)

    def verify(self, digest: str | None = None) -> list[Verdict]:
        """As `store_entries.verify`."""
        return store_entries.verify(self.root, digest)

    def prune(
        self,
        *,
        older_than_s: float | None = None,
        max_bytes: int | None = None,
        damaged: bool = False,
        everything: bool = False,
        dry_run: bool = False,
    ) -> Pruned:
        """As `store_entries.prune`."""
        return store_entries.prune(
            self.root,
            older_than_s=older_than_s,
            max_bytes=max_bytes,
            damaged=damaged,
            everything=everything,
            dry_run=dry_run,
        )

    def _begin(self, key: Key) -> tuple[Entry, Lock | None]:
        """An entry to use or to build, and the lock that keeps it; no lock: it is not kept."""
        digest = key.digest
        if self.off is None:
            try:
                for made in (*reversed(self.root.parents), self.root):
                    if not made.exists():
                        made.mkdir(mode=0o700, exist_ok=True)
                why = distrust(self.root)
                if why is None:
                    lock_of(self.root, digest).parent.mkdir(mode=0o700, exist_ok=True)
                    return self._find(digest)
                self._turn_off(why)
            except OSError as error:
                self._turn_off(str(error))
        return _apart(digest), None

    def _find(self, digest: str) -> tuple[Entry, Lock | None]:
        """Look with a shared lock, so that processes load a whole entry side by side; if there is
        none, look again alone: another process may have built it between the two locks.
        """
        waited_s = 0.0
        for shared, look in itertools.cycle(((True, self._whole), (False, self._fresh))):
            left_s = max(self.patience_s - waited_s, 0.0)
            held = lock(lock_of(self.root, digest), shared=shared, wait_s=left_s)
            if held is None:
                told = f"another process still holds it after {self.patience_s:g} s"
                log.warning("graph %s is built apart and not kept: %s", digest[:12], told)
                break
            waited_s += held.waited_s
            with contextlib.ExitStack() as stack:
                stack.callback(held.release)
                entry = look(digest)
                if entry is not None:
                    held.mark()
                    stack.pop_all()
                    if waited_s > 0:
                        log.info(
                            "graph %s: waited %.1f s for another process", digest[:12], waited_s
                        )
                    return dataclasses.replace(entry, waited_s=waited_s), held
        return dataclasses.replace(_apart(digest), waited_s=self.patience_s), None

    def _whole(self, digest: str) -> Entry | None:
        """The entry if it is what was written."""
        folder = folder_of(self.root, digest)
        store_seal.clean(folder)
        if store_seal.faults(folder, digest):
            return None
        return Entry(found=True, files=folder / store_seal.FILES, kept=True)

    def _fresh(self, digest: str) -> Entry | None:
        """An empty entry in place of one that is no use; None if there is a whole one."""
        folder, note = folder_of(self.root, digest), None
        if os.path.lexists(folder):
            faults = store_seal.faults(folder, digest)
            if not faults:
                return None
            more = f"; and {len(faults) - _TOLD} more" if len(faults) > _TOLD else ""
            note = "; ".join(faults[:_TOLD]) + more
            log.warning("graph %s is removed and built again: %s", digest[:12], note)
            store_entries.remove_folder(folder)
        for made in (folder, folder / store_seal.FILES):
            made.mkdir(mode=0o700)
        return Entry(found=False, files=folder / store_seal.FILES, kept=True, note=note)

    def _complete(self, key: Key, entry: Entry, built_s: float) -> Entry:
        """Make what was built a whole entry; if that fails it stays until this process ends."""
        digest = key.digest
        meta = {"parts": dict(key.parts), "made_s": time.time(), "built_s": built_s}
        try:
            store_seal.seal(folder_of(self.root, digest), digest, meta)
            return entry
        except ValueError as error:
            log.warning("graph %s is not kept: %s", digest[:12], error)
        except OSError as error:
            self._turn_off(str(error))
        _at_exit(functools.partial(store_entries.remove, self.root, digest, only_unfinished=True))
        return dataclasses.replace(entry, kept=False)

    def _grew(self, entry: Entry) -> bool:
        """Whether the compiler added files to a hit."""
        try:
            return bool(store_seal.added(entry.files.parent))
        except OSError as error:
            self._turn_off(str(error))
            return False

    def _grow(self, digest: str) -> None:
        """Seal a hit again to which the compiler added files, as one that found a part missing."""
        try:
            held = lock(lock_of(self.root, digest), shared=False)
            if held is None:  # who leaves it last does it
                return
            try:
                new = store_seal.grow(folder_of(self.root, digest), digest)
                if new:
                    log.info("graph %s: %d files were added to it", digest[:12], len(new))
            finally:
                held.release()
        except ValueError as error:  # the next who opens it builds it again
            log.warning("graph %s: what was added cannot be kept: %s", digest[:12], error)
        except OSError as error:
            self._turn_off(str(error))

    def _abandon(self, key: Key, held: Lock, error: BaseException) -> None:
        """Remove what a build that failed has left."""
        why = _disk_failure(error)
        if why is not None:
            self._turn_off(why)
        try:
            store_entries.remove_folder(folder_of(self.root, key.digest))
            held.remove()
        except OSError as failed:  # the next who opens it removes it
            log.warning("graph %s: what was begun stays: %s", key.digest[:12], failed)

    def _is_at_fault(self, key: Key, entry: Entry, error: Exception) -> bool:
        """Whether a build that failed may succeed without what the store gave it."""
        if not entry.found:
            return entry.kept and self.off is not None
        try:
            gone = store_entries.remove(self.root, key.digest)
            told = "removed and built again" if gone else "in use by another process and stays"
        except OSError as failed:
            gone, told = False, f"left as it is: {failed}"
        log.warning(
            "graph %s was found whole and failed: %s; it is %s", key.digest[:12], error, told
        )
        return gone

    def _turn_off(self, why: str) -> None:
        with self._mutex:
            first, self.off = self.off is None, self.off or why
        if first:
            log.warning(
                "compiled graphs are not kept in %s: %s; until that is mended, or another cache "
                "directory is given, every start compiles them",
                self.root,
                why,
            )

    def _count(self, entry: Entry, grew: bool) -> None:
        with self._mutex:
            self.counts = Counts(
                graphs=self.counts.graphs + 1,
                hits=self.counts.hits + entry.found,
                grown=self.counts.grown + grew,
                not_kept=self.counts.not_kept + (not entry.kept),
            )


def distrust(root: Path) -> str | None:
    """Why code must not be loaded from below `root`; None if only this user can write there."""
    found, user = root.stat(), os.geteuid()
    if found.st_uid != user:
        return f"it belongs to user {found.st_uid}, and this is user {user}; graphs are code"
    if found.st_mode & stat.S_IWOTH:
        return f"every user may write to it; graphs are code: chmod o-w {root}"
    for above in (*root.parents, *root.resolve().parents):
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"every user may replace it: {above} lacks the sticky bit; graphs are code"
    return None


def _apart(digest: str) -> Entry:
    """An empty entry of this process alone, removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"dsv4-{digest[:12]}-"))
    _at_exit(functools.partial(shutil.rmtree, folder))
    return Entry(found=False, files=folder, kept=False)


def _at_exit(remove: Callable[[], object]) -> None:
    """Remove something when this process ends, but not when a forked child does."""
    made_by = os.getpid()

    def act() -> None:
        if os.getpid() == made_by:
            with contextlib.suppress(OSError):  # nobody is left to tell
                remove()

    atexit.register(act)


def _disk_failure(error: BaseException | None) -> str | None:
    """What the disk did to a build, by the error or by one that it came from; None: nothing.

    A compiler that ran as another process leaves nothing but the words.
    """
    words = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        of_disk = isinstance(error, OSError) and error.errno in _DISK
        if of_disk or any(word in str(error) for word in words):
            return str(error)
        error = error.__cause__ or error.__context__
    return None
