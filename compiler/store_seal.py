"""What makes a folder of files a whole entry: a manifest, and a sum over the manifest.

    files/            what the compiler wrote, nested as it likes
    meta.json         the key's parts, when it was made and how long that took: for people
    manifest.json     the key's digest, and path, size and sha256 of every file above
    manifest.sha256   the sum of manifest.json; written last, by rename: with it the entry is whole

Two kinds of file are no part of an entry, since compilers add them to whole ones: `*.lock`, which
nobody loads, and `__pycache__`, which `clean` removes before use because Python would load it
unchecked. Everything else that is not in the manifest is foreign, unless a process added it while
it had the entry open: then who leaves the entry last seals it again (`grow`).
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILES, META, MANIFEST, SUM = "files", "meta.json", "manifest.json", "manifest.sha256"
_FORMAT = 1
_UNCHECKED = "__pycache__"


def seal(folder: Path, digest: str, meta: Mapping[str, Any]) -> None:
    """Make `folder` a whole entry of the key `digest`; on return it is on the disk.

    The compiler's files are not flushed: after a loss of power their sums say what is missing.
    Raises ValueError for what an entry cannot hold, such as a link, and OSError.
    """
    files, strange = _scan(folder)
    if strange:
        raise ValueError("; ".join(strange))
    files.pop(META, None)
    sizes = [file.stat().st_size for file in files.values()]
    write_whole(folder / META, _text({**meta, "bytes": sum(sizes)}))
    files[META] = folder / META
    listed = [[name, file.stat().st_size, _sha256(file)] for name, file in sorted(files.items())]
    manifest = _text({"format": _FORMAT, "key": digest, "files": listed})
    write_whole(folder / MANIFEST, manifest)
    write_whole(folder / SUM, _sum_of(manifest))


def sealed(folder: Path) -> bool:
    """Whether `folder` claims to be whole."""
    return (folder / SUM).is_file()


def faults(folder: Path, digest: str) -> tuple[str, ...]:
    """Everything that keeps `folder` from being the whole entry of `digest`; none: it is.

    Reads and sums every file, changes nothing.
    """
    if not sealed(folder):
        return (f"unfinished: no {SUM}, as if who built it was killed",)
    manifest = _manifest(folder)
    if isinstance(manifest, str):
        return (manifest,)
    if manifest["format"] != _FORMAT:
        return (f"foreign: format {manifest['format']}, this is format {_FORMAT}",)
    if manifest["key"] != digest:
        return (f"foreign: made for {manifest['key'][:12]}, not for {digest[:12]}",)
    files, told = _scan(folder)
    if not (folder / FILES).is_dir():
        told.append(f"missing: {FILES}")
    for name, size, sha256 in manifest["files"]:
        told += _file_faults(name, files.pop(name, None), size, sha256)
    told += [f"foreign: {name} is not in the manifest" for name in sorted(files)]
    return tuple(told)


def added(folder: Path) -> tuple[str, ...]:
    """The files of a whole entry that its manifest does not have, by names alone."""
    manifest = _manifest(folder) if sealed(folder) else ""
    if isinstance(manifest, str):
        return ()
    return tuple(sorted(_scan(folder)[0].keys() - {name for name, _, _ in manifest["files"]}))


def grow(folder: Path, digest: str) -> tuple[str, ...]:
    """Seal an entry with what was added to it, if nothing else about it changed; what was added.

    For who holds the entry alone. Raises as `seal`.
    """
    new = added(folder)
    if not new or len(faults(folder, digest)) != len(new):  # each of them is one fault
        return ()
    seal(folder, digest, read_meta(folder))
    return new


def read_meta(folder: Path) -> dict[str, Any]:
    """What meta.json says; nothing if it cannot be read. For people: it is not checked here."""
    try:
        meta = json.loads((folder / META).read_bytes())
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def clean(folder: Path) -> None:
    """Remove what Python would load without asking us."""
    for path in [p for p in folder.rglob(_UNCHECKED) if p.is_dir() and not p.is_symlink()]:
        with contextlib.suppress(FileNotFoundError):  # another process cleans as well
            shutil.rmtree(path)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file that is there whole, on the disk, or not at all."""
    part = file.with_name(f".{file.name}.part")
    with part.open("wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _text(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode("ascii")


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _sum_of(manifest: bytes) -> bytes:
    """A line as `sha256sum -c` reads it."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode("ascii")


def _manifest(folder: Path) -> dict[str, Any] | str:
    """The manifest, or what is wrong with it. Parsed only if its sum is right."""
    try:
        content, told = (folder / MANIFEST).read_bytes(), (folder / SUM).read_bytes()
    except FileNotFoundError:
        return f"missing: {MANIFEST}"
    except OSError as error:
        return f"unreadable: {MANIFEST}: {error.strerror}"
    if told != _sum_of(content):
        return f"changed: {MANIFEST} or {SUM}, they do not agree"
    return json.loads(content)


def _scan(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """The plain files of an entry by name, and what no compiler of ours writes.

    Without locks, the manifest and its sum: those are checked on their own.
    """
    files: dict[str, Path] = {}
    strange = []
    for name, path, found in _walk(folder):
        if found.st_uid != os.geteuid():
            strange.append(f"foreign: {name} belongs to user {found.st_uid}")
        elif not stat.S_ISREG(found.st_mode):
            strange.append(f"foreign: {name} is no plain file")
        elif path.suffix != ".lock" and name not in (MANIFEST, SUM):
            files[name] = path
    return files, strange


def _walk(folder: Path, prefix: str = "") -> Iterator[tuple[str, Path, os.stat_result]]:
    """Everything in `folder` that is not a folder, with its name from the top."""
    for path in sorted(folder.iterdir()):
        try:
            found = path.lstat()
        except FileNotFoundError:  # the temporary file of a compiler at work next to us
            continue
        # A name is bytes to the kernel; here it is text that any log can show.
        name = prefix + path.name.encode("utf-8", "backslashreplace").decode()
        if not stat.S_ISDIR(found.st_mode):
            yield name, path, found
        elif path.name != _UNCHECKED:
            yield from _walk(path, f"{name}/")


def _file_faults(name: str, file: Path | None, size: int, sha256: str) -> Iterator[str]:
    if file is None:
        yield f"missing: {name}"
        return
    try:
        have = file.stat().st_size
        if have != size:
            yield f"{'truncated' if have < size else 'grown'}: {name} has {have} of {size} bytes"
        elif _sha256(file) != sha256:
            yield f"changed: {name} has other content than was written"
    except OSError as error:
        yield f"unreadable: {name}: {error.strerror}"
