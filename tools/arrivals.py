"""Requests over time: drawn from a seed, or read from a trace.

A trace has one JSON object a line: `arrival_s`, `prompt_tokens`, `new_tokens`, and optionally
`prefix` (any name: requests of one name begin alike) with `prefix_tokens` (how far).
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

MOST = 1 << 20  # tokens of a prompt, or of an output: what the model takes
LONGEST = 32_768  # tokens of a drawn prompt; a drawn output has an eighth of it
PERIOD_S, ON_S, FACTOR = 12.0, 4.0, 2.5  # a burst: 4 of 12 seconds at 2.5 times the mean rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    prefix: str = ""  # requests of one name share their first tokens; "": shares none
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming the field, the value and what is allowed."""
        at = self.arrival_s
        if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= 1e9:
            raise ValueError(f"arrival_s is {at!r}; it must be seconds from 0 to 1e9")
        if not isinstance(self.prefix, str):
            raise ValueError(f"prefix is {self.prefix!r}; it must be a name in quotes")
        least = (("prompt_tokens", 1), ("new_tokens", 1), ("prefix_tokens", 0))
        for name, low in least:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MOST:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number from {low} to {MOST}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What is drawn."""

    rate: float = 26.0  # requests per second
    requests: int = 1500
    prompt_mean: float = 2000.0
    new_mean: float = 200.0
    prefixes: int = 0  # how many shared prefixes there are; 0: none
    prefix_tokens: int = 1024

    def __post_init__(self) -> None:
        """Raise ValueError naming the field, the value and what is allowed."""
        for name in ("rate", "prompt_mean", "new_mean"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")
        for name, low in (("requests", 1), ("prefixes", 0), ("prefix_tokens", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")


def poisson(load: Load, rng: np.random.Generator) -> np.ndarray:
    """Seconds at which requests arrive at one rate."""
    return rng.exponential(1 / load.rate, load.requests).cumsum()


def bursts(load: Load, rng: np.random.Generator) -> np.ndarray:
    """Seconds at which requests arrive in on and off phases, at `rate` in the mean."""
    even = poisson(load, rng)
    inside = np.interp(even % PERIOD_S, (0, ON_S * FACTOR, PERIOD_S), (0, ON_S, PERIOD_S))
    return even // PERIOD_S * PERIOD_S + inside


def lognormal(mean: float, sigma: float, load: Load, rng: np.random.Generator) -> np.ndarray:
    """Lengths whose logarithms are normal."""
    return rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, load.requests)


def pareto(mean: float, shape: float, load: Load, rng: np.random.Generator) -> np.ndarray:
    """Lengths with a tail of power `shape`; the mean is that before the longest are cut."""
    return mean * (shape - 1) / shape * (1 + rng.pareto(shape, load.requests))


KINDS: MappingProxyType[str, tuple[Callable[..., np.ndarray], bool]] = MappingProxyType(
    {"poisson": (poisson, False), "burst": (bursts, False), "tail": (poisson, True)}
)  # times, and whether lengths are Pareto


def draw(kind: str, load: Load, seed: int) -> list[Arrival]:
    """`poisson` and `burst` have lognormal lengths; `tail` has Poisson times, Pareto lengths."""
    times, heavy = KINDS[kind]
    rng = np.random.default_rng(seed)
    at = times(load, rng)
    if heavy:
        prompts, news = (pareto(m, 1.6, load, rng) for m in (load.prompt_mean, load.new_mean))
    else:
        prompts = lognormal(load.prompt_mean, 1.0, load, rng)
        news = lognormal(load.new_mean, 0.8, load, rng)
    prompts = prompts.clip(1, LONGEST).astype(int)
    news = news.clip(1, LONGEST // 8).astype(int)
    owner = rng.integers(load.prefixes, size=load.requests) if load.prefixes else None
    return [
        Arrival(
            arrival_s=float(at[i]),
            prompt_tokens=int(prompts[i]),
            new_tokens=int(news[i]),
            prefix="" if owner is None else str(owner[i]),
            prefix_tokens=0 if owner is None else min(load.prefix_tokens, int(prompts[i])),
        )
        for i in range(load.requests)
    ]


def read(path: Path) -> list[Arrival]:
    """The requests of a trace by time. Raises ValueError naming the line that is wrong."""
    known = {f.name for f in dataclasses.fields(Arrival)}
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text; it must have one JSON object a line") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
            if not isinstance(entry, dict) or not entry.keys() <= known:
                raise ValueError(f"{line:.60} is no object of {', '.join(sorted(known))}")
            found.append(Arrival(**entry))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no requests; it must have one JSON object a line")
    return sorted(found, key=lambda a: a.arrival_s)
