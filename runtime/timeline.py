"""What a trace has recorded, and its reading per request: data, and functions over it.

A step is cut into segments, one number at a time, named as for prompts. Whoever reads it for a
request that decodes gets the numbers of the decode loop. A request in a step is charged the whole
of what it waited for: what is done for the batch is done for each of its requests.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from runtime.sequence import FORWARD, FORWARD_STEPS, as_decode


class Segment(NamedTuple):
    """A time in which one of the 57 steps went on; both on the clock of perf_counter_ns."""

    number: int
    start_ns: int
    end_ns: int


class Part(NamedTuple):
    """One request in one step."""

    request: int
    decode: bool  # computes its newest token only
    rows: int
    drafts: int  # of the rows, those to be verified
    wanted: bool  # whether it gets tokens
    tokens: int  # that it got
    admitted: bool  # in this step
    hit: bool  # admitted with pages from the prefix cache
    ended: bool  # by this step

    def has(self, number: int) -> bool:
        """Whether a segment with this number (of a prompt) went on for this request, too."""
        if number == 15:
            return self.admitted
        if number == 16:
            return self.hit
        if number in (34, 35, 37, 39, 41, 50):
            return self.wanted
        return self.ended if number in (51, 52) else True


@dataclasses.dataclass(frozen=True)
class Lap:
    """One step of the engine."""

    index: int
    segments: tuple[Segment, ...]  # without gaps
    parts: tuple[Part, ...]
    error: str | None = None  # why it broke off

    @property
    def start_ns(self) -> int:
        """When it began."""
        return self.segments[0].start_ns

    @property
    def end_ns(self) -> int:
        """When it was over."""
        return self.segments[-1].end_ns

    @property
    def decode(self) -> bool:
        """Whether every request in it decodes."""
        return all(part.decode for part in self.parts)

    @property
    def whole(self) -> Part:
        """The step as if it were one request's: it decodes if all do."""
        return Part(
            request=-1,
            decode=self.decode,
            rows=sum(p.rows for p in self.parts),
            drafts=sum(p.drafts for p in self.parts),
            wanted=True,
            tokens=sum(p.tokens for p in self.parts),
            admitted=True,
            hit=True,
            ended=True,
        )


def make_lap(
    index: int, segments: Iterable[Segment], parts: tuple[Part, ...], error: str | None
) -> Lap:
    """A step from segments in order: neighbours of one number joined, empty ones dropped.

    Where the parts of the forward are seen, what comes before the first one prepares it.
    """
    listed = [s for s in segments if s.end_ns > s.start_ns]
    seen = any(s.number in FORWARD_STEPS - {FORWARD} for s in listed)
    joined: list[Segment] = []
    for s in listed:
        number = 20 if seen and s.number == FORWARD else s.number
        if joined and joined[-1].number == number:
            joined[-1] = joined[-1]._replace(end_ns=s.end_ns)
        else:
            joined.append(s._replace(number=number))
    return Lap(index, tuple(joined), parts, error)


def segments_of(lap: Lap, part: Part) -> Iterator[Segment]:
    """The segments of a step that went on for a request, under the numbers it knows them by."""
    newest: Segment | None = None
    for s in lap.segments:
        if not part.has(s.number):
            continue
        number = as_decode(s.number, part.drafts) if part.decode else s.number
        if newest is not None and (newest.number, newest.end_ns) == (number, s.start_ns):
            newest = newest._replace(end_ns=s.end_ns)
            continue
        if newest is not None:
            yield newest
        newest = s._replace(number=number)
    if newest is not None:
        yield newest


def forward_of(lap: Lap, part: Part) -> Segment | None:
    """The forward of a step as a whole: 47 where the request decodes, else `FORWARD`."""
    forward = [s for s in lap.segments if s.number in FORWARD_STEPS]
    if not forward:
        return None
    number = as_decode(FORWARD, part.drafts) if part.decode else FORWARD
    return Segment(number, forward[0].start_ns, forward[-1].end_ns)


class Amount(NamedTuple):
    """How often a number occurred, and for how long in all."""

    times: int
    total_ns: int


def amounts(pairs: Iterable[tuple[Lap, Part]]) -> dict[int, Amount]:
    """By number, over (step, request in it). 47 covers 21 to 33 again where those are seen."""
    out: dict[int, Amount] = {}
    for lap, part in pairs:
        listed = list(segments_of(lap, part))
        whole = forward_of(lap, part)
        if whole is not None and whole.number == 47 and whole not in listed:
            listed.append(whole)
        for s in listed:
            times, total_ns = out.get(s.number, Amount(0, 0))
            out[s.number] = Amount(times + 1, total_ns + s.end_ns - s.start_ns)
    return dict(sorted(out.items()))
