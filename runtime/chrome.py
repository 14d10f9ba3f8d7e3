"""A timeline in Chrome's trace event format, which Perfetto and chrome://tracing read.

Process 1 is the engine, with a row for its steps and one per lane; every request is a process of
its own, with the same rows and only what went on for it. Times are microseconds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from runtime.request import Request
from runtime.sequence import FORWARD, LANES, NOT_HERE, STEPS
from runtime.timeline import Lap, Part, Segment, forward_of, segments_of

ENGINE = 1  # its process id
FIRST_REQUEST = 2  # process id of request 0
ROW = 1  # thread id of the row of steps; those of the lanes follow
LANE_ROWS = {lane: i for i, lane in enumerate(LANES, start=ROW + 1)}

_Event = dict[str, Any]


def events(
    start_ns: int,
    started: Sequence[Segment],
    requests: Mapping[int, Request],
    laps: Sequence[Lap],
) -> dict[str, Any]:
    """The whole file as a value; `json.dump` writes it. Times count from `start_ns`."""
    out: list[_Event] = [*_names(ENGINE, "engine", 0)]
    out += [_segment(s, ENGINE) for s in started]
    for lap in laps:
        out += _lap(lap, lap.whole, ENGINE)
        out += _forward(lap)
        for part in lap.parts:
            if part.request in requests:
                pid = FIRST_REQUEST + part.request
                out += _lap(lap, part, pid)
                out += _request_forward(lap, part, pid)
    for number, request in requests.items():
        pid = FIRST_REQUEST + number
        out += _names(pid, f"request {number}", pid)
        out += _life(request, pid)
    for event in out:  # so far in nanoseconds, which add up exactly
        if event["ph"] != "M":
            event["ts"] = (event["ts"] - start_ns) / 1e3
        if event["ph"] == "X":
            event["dur"] /= 1e3
    told = {str(number): why for number, why in NOT_HERE.items()}
    return {
        "traceEvents": out,
        "displayTimeUnit": "ms",
        "otherData": {"not in this process": told},
    }


def _names(pid: int, name: str, place: int) -> Iterator[_Event]:
    """Names and order of a process and its rows."""
    rows = {ROW: "steps"} | {LANE_ROWS[lane]: f"{lane} {told}" for lane, told in LANES.items()}
    yield _meta("process_name", pid, 0, {"name": name})
    yield _meta("process_sort_index", pid, 0, {"sort_index": place})
    for tid, told in rows.items():
        yield _meta("thread_name", pid, tid, {"name": told})
        yield _meta("thread_sort_index", pid, tid, {"sort_index": tid})


def _meta(name: str, pid: int, tid: int, args: _Event) -> _Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _segment(s: Segment, pid: int) -> _Event:
    """One segment in the row of its lane; one without length is an instant."""
    step = STEPS[s.number]
    event = {
        "name": f"{step.label} {step.name}",
        "cat": "sequence57",
        "pid": pid,
        "tid": LANE_ROWS[step.lane],
        "ts": s.start_ns,
        "args": {"number": step.label, "lanes": step.lanes},
    }
    if s.end_ns == s.start_ns:
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": s.end_ns - s.start_ns}


def _lap(lap: Lap, part: Part, pid: int) -> Iterator[_Event]:
    """A step in the row of steps, and what of it is not the forward."""
    kind = "decode" if part.decode else "prompt"
    yield {
        "ph": "X",
        "name": f"step {lap.index}: {kind}, {part.rows} rows",
        "cat": "step",
        "pid": pid,
        "tid": ROW,
        "ts": lap.start_ns,
        "dur": lap.end_ns - lap.start_ns,
        "args": {
            "requests": [p.request for p in lap.parts],
            "rows": part.rows,
            "drafts": part.drafts,
            "tokens": part.tokens,
            "error": lap.error,
        },
    }
    whole = forward_of(lap, part)
    for s in segments_of(lap, part):
        if not _inside(s, whole):
            yield _segment(s, pid)


def _inside(s: Segment, whole: Segment | None) -> bool:
    return whole is not None and whole.start_ns <= s.start_ns and s.end_ns <= whole.end_ns


def _forward(lap: Lap) -> Iterable[_Event]:
    """The forward as a whole, and in it its parts."""
    whole = forward_of(lap, lap.whole)
    if whole is None:
        return
    yield _segment(whole, ENGINE)
    for s in lap.segments:
        if s.number != FORWARD and _inside(s, whole):
            yield _segment(s, ENGINE)


def _request_forward(lap: Lap, part: Part, pid: int) -> Iterable[_Event]:
    """The forward as one: its parts stand once, in the engine's process."""
    whole = forward_of(lap, part)
    if whole is not None:
        yield _segment(whole, pid)


def _life(request: Request, pid: int) -> Iterator[_Event]:
    """The wait in the queue."""
    if request.admitted_s:
        added_ns, admitted_ns = (int(t * 1e9) for t in (request.added_s, request.admitted_s))
        yield _segment(Segment(13, added_ns, admitted_ns), pid)
