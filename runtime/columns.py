"""Tables and sizes as plain lines of text."""


def columns(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Rows padded to columns; those numbered in `right` align to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    out = []
    for row in rows:
        cells = (
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        out.append("  ".join(cells).rstrip())
    return out


def size(num_bytes: float) -> str:
    """Bytes in the largest decimal unit that leaves at least 1."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3f} {unit}"
    return f"{num_bytes:g} B"
