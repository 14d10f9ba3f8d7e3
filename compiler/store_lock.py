"""A lock file between processes: shared or alone, waited for with a bound.

`flock`: the kernel lets go when the holder ends, however it ends, so no lock is ever stale. Threads
exclude each other too, and the same thread would wait for itself.
"""

import fcntl
import logging
import os
import time
from pathlib import Path

log = logging.getLogger(__name__)

_POLL_S = 0.05
_TELL_S = 30.0  # how often a process that waits says so


class Lock:
    """A lock that is held until `release`."""

    def __init__(self, file: int, path: Path, *, shared: bool, waited_s: float) -> None:
        """Take over the open file."""
        self._file, self._path, self._shared, self.waited_s = file, path, shared, waited_s

    def mark(self) -> None:
        """Make the time of the lock file say when it was last used; alone, its content by whom."""
        os.utime(self._file)
        if not self._shared:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode("ascii"), 0)

    def remove(self) -> None:
        """Remove the lock file; only who holds it alone may."""
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let go, for forked children too, which hold the same open file."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)


def lock(path: Path, *, shared: bool, wait_s: float = 0.0) -> Lock | None:
    """Hold `path`, made if need be; None if it is not free within `wait_s`.

    Raises OSError where the file cannot be made or the file system has no locks.
    """
    start_s, waited_s, told_s = time.monotonic(), 0.0, -_TELL_S
    access = os.O_RDONLY if shared else os.O_RDWR  # who only looks may look at a read-only disk
    while True:
        file = os.open(path, access | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if _take(file, shared) and _is_still(file, path):
                held, file = Lock(file, path, shared=shared, waited_s=waited_s), -1
                return held
            if waited_s >= wait_s:
                return None
            if waited_s - told_s >= _TELL_S:
                told_s = waited_s
                # Who keeps us from sharing it holds it alone; others have not left their names.
                who = f"process {holder(path)}" if shared else "another process"
                log.info("waiting for graph %s, which %s holds", path.stem[:12], who)
        finally:
            if file >= 0:
                os.close(file)
        time.sleep(min(_POLL_S, wait_s - waited_s))
        waited_s = time.monotonic() - start_s


def holder(path: Path) -> str:
    """The process that last held the lock alone, for messages."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


def _take(file: int, shared: bool) -> bool:
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(file: int, path: Path) -> bool:
    """Whether the name still leads to this file: it may have been removed before we held it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
