"""Numbers that callers give: each is refused by field, value and range."""

import sys
from typing import Any


def whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless `value` is an int from `low` to `high`; None: no upper limit."""
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} is {value!r:.60}; it must be a whole number {limit}")


def real(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    """Raise ValueError unless `value` is finite and from `low`, or above it, to `high`."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not ok or value > sys.float_info.max or (above and value == low):
        start = f"above {low:g}" if above else f"from {low:g}"
        limit = f"at most {min(high, sys.float_info.max):g}"
        raise ValueError(f"{name} is {value!r:.60}; it must be a number {start}, {limit}")
