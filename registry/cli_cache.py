"""`dsv4 cache`: the compiled graphs kept on disk, listed, verified or removed."""

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path

from compiler.store import Store
from compiler.store_entries import Stored
from runtime.columns import columns, size

_PARTS = ("model", "step", "bucket", "dtype", "backend")  # of a key, as columns
_SHORT = 12  # digits of a digest
_UNITS = (("w", 604800), ("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([wdhms])")
_PRUNING = ("older_than", "max_bytes", "damaged", "all", "dry_run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `dsv4 cache`."""
    parser.add_argument(
        "action",
        choices=("ls", "verify", "prune"),
        help="ls: what there is; verify: check every byte; prune: remove some",
    )
    parser.add_argument(
        "entry", nargs="?", help="one entry, by the first digits that ls shows; default: all"
    )
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="default: the user's cache folder, as ls shows it"
    )
    prune = parser.add_argument_group("what prune removes, least recently used first")
    prune.add_argument(
        "--older-than", metavar="AGE", help="entries not used for this long: 30d, 12h, 2w"
    )
    prune.add_argument(
        "--max-bytes", metavar="SIZE", help="those used longest ago until this remains: 2GiB, 500MB"
    )
    prune.add_argument("--damaged", action="store_true", help="damaged and unfinished entries")
    prune.add_argument("--all", action="store_true", help="every entry")
    prune.add_argument("--dry-run", action="store_true", help="say what would go; remove nothing")


def run(args: argparse.Namespace) -> int:
    """Do it; 1 if `verify` found damage. Raises ValueError for arguments, and OSError."""
    given = [name for name in _PRUNING if getattr(args, name) not in (None, False)]
    if args.action != "prune" and given:
        raise ValueError(f"--{given[0].replace('_', '-')} goes with prune, not with {args.action}")
    folder = Store.default_root() if args.cache_dir is None else Path(args.cache_dir).expanduser()
    actions: dict[str, Callable[[Store, argparse.Namespace], int]]
    actions = {"ls": _list, "verify": _verify, "prune": _prune}
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"the cache directory {folder} is a file; give a folder")
    return actions[args.action](Store(folder), args)


def read_age(spec: str) -> float:
    """Seconds in an age as people write it. Raises ValueError."""
    match = _AGE.fullmatch(spec.strip())
    if match is None:
        units = ", ".join(unit for unit, _ in _UNITS)
        raise ValueError(f"--older-than is {spec!r}; give a number and one of {units}, as 30d")
    return float(match[1]) * dict(_UNITS)[match[2]]


def read_bytes(spec: str) -> int:
    """Bytes in a size as people write it. Raises ValueError, for a fraction too."""
    # Late: it imports torch, which the other actions do without.
    from runtime.memory import UNITS, read_memory

    if not spec.strip()[-1:].isalpha():  # to read_memory it would be a part of free memory
        raise ValueError(f"--max-bytes is {spec!r}; give a number and a unit: {', '.join(UNITS)}")
    return read_memory(spec).num_bytes


def age(seconds: float) -> str:
    """Seconds in the largest unit that leaves at least 1."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return "0s"


def _chosen(store: Store, start: str | None) -> list[Stored]:
    """All entries, or the one whose digest starts so."""
    found = store.entries()
    if start is None:
        return found
    matching = [entry for entry in found if entry.digest.startswith(start)]
    if len(matching) != 1:
        count = len(matching) or "no"
        raise ValueError(
            f"{count} of {len(found)} entries in {store.root} start with {start!r}; give the "
            "digits of one, as `dsv4 cache ls` shows them"
        )
    return matching


def _state(entry: Stored) -> str:
    if entry.busy:
        return "being built"
    return "" if entry.whole else "unfinished"


def _list(store: Store, args: argparse.Namespace) -> int:
    chosen, now_s = _chosen(store, args.entry), time.time()
    total = size(sum(entry.num_bytes for entry in chosen))
    print(f"{store.root}: {_count(len(chosen))}, {total}")
    if args.entry is not None:
        (entry,) = chosen
        facts = [("digest", entry.digest), ("state", _state(entry) or "whole"), *entry.parts]
        print("\n".join(columns(facts)))
        return 0
    rows: list[tuple[str, ...]] = [("entry", *_PARTS, "size", "age", "used", "state")]
    for entry in chosen:
        parts = dict(entry.parts)
        told = (size(entry.num_bytes), age(now_s - entry.made_s), age(now_s - entry.used_s))
        named = (parts.get(name, "-") for name in _PARTS)
        rows.append((entry.digest[:_SHORT], *named, *told, _state(entry)))
    if chosen:
        print("\n".join(columns(rows, right=(6, 7, 8))))
    return 0


def _verify(store: Store, args: argparse.Namespace) -> int:
    damaged = 0
    chosen = _chosen(store, args.entry)
    for entry in chosen:
        (verdict,) = store.verify(entry.digest)
        damaged += bool(verdict.faults)
        told = ("being built, not verified",) if verdict.busy else verdict.faults or ("OK",)
        for line in told:
            print(f"{entry.digest[:_SHORT]}  {line}")
    print(f"{store.root}: {_count(len(chosen))}, {damaged} damaged")
    return 1 if damaged else 0


def _prune(store: Store, args: argparse.Namespace) -> int:
    if args.entry is not None:
        raise ValueError(f"prune takes no entry, it is {args.entry!r}; say which by the options")
    if args.older_than is None and args.max_bytes is None and not (args.damaged or args.all):
        raise ValueError(
            "prune was not told what to remove; give --older-than 30d, --max-bytes 2GiB, "
            "--damaged or --all"
        )
    pruned = store.prune(
        older_than_s=None if args.older_than is None else read_age(args.older_than),
        max_bytes=None if args.max_bytes is None else read_bytes(args.max_bytes),
        damaged=args.damaged,
        everything=args.all,
        dry_run=args.dry_run,
    )
    for entry, why in pruned.removed:
        print(f"{entry.digest[:_SHORT]}  {size(entry.num_bytes)}  {why}")
    for entry in pruned.in_use:
        print(f"{entry.digest[:_SHORT]}  stays: a process uses it")
    done = "would free" if args.dry_run else "freed"
    print(f"{store.root}: {done} {size(pruned.freed_bytes)}, {_count(len(pruned.removed))}")
    return 0


def _count(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"
