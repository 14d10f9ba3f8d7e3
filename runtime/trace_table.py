"""A timeline as text: per request, and for all steps, how often each number and for how long."""

from collections.abc import Iterable, Mapping, Sequence

from runtime.request import Request
from runtime.sequence import NOT_HERE, STEPS
from runtime.timeline import Amount, Lap, Segment, amounts

_HEAD = f"{'step':>5} lane  {'what':<40} {'count':>6} {'total ms':>10} {'share':>8}"


def table(
    started: Sequence[Segment],
    requests: Mapping[int, Request],
    laps: Sequence[Lap],
    lost: int,
) -> str:
    """The text; `lost` steps before `laps` were dropped."""
    lines: list[str] = []
    if started:
        lines += ["start-up", *_rows(_totals(started))]
    for number, request in requests.items():
        lines += [_title(request), *_rows(_of_request(number, request, laps))]
    if laps:
        took_ms = sum(lap.end_ns - lap.start_ns for lap in laps) / 1e6
        before = f" (the newest; {lost} before them were dropped)" if lost else ""
        failed = sum(lap.error is not None for lap in laps)
        told = f", {failed} failed" if failed else ""
        lines.append(f"all {len(laps)} steps{before}: {took_ms:.2f} ms{told}")
        lines += _rows(amounts((lap, lap.whole) for lap in laps))
    lines.append("not in this process")
    lines += [f"{n:>5} {STEPS[n].lane:<4}  {STEPS[n].name}: {why}" for n, why in NOT_HERE.items()]
    return "\n".join(lines)


def _title(request: Request) -> str:
    state = request.finish or request.status.value
    return (
        f"request {request.id}: {len(request.prompt)} prompt tokens, {len(request.output)} new, "
        f"{state}; what is done for a batch counts in full for each of its requests"
    )


def _totals(segments: Iterable[Segment]) -> dict[int, Amount]:
    out: dict[int, Amount] = {}
    for s in segments:
        times, total_ns = out.get(s.number, Amount(0, 0))
        out[s.number] = Amount(times + 1, total_ns + s.end_ns - s.start_ns)
    return out


def _of_request(number: int, request: Request, laps: Sequence[Lap]) -> dict[int, Amount]:
    """Its amounts, and its wait in the queue."""
    mine = ((lap, part) for lap in laps for part in lap.parts if part.request == number)
    wait: dict[int, Amount] = {}
    if request.admitted_s:
        wait[13] = Amount(1, int((request.admitted_s - request.added_s) * 1e9))
    return dict(sorted((wait | amounts(mine)).items()))


def _rows(found: Mapping[int, Amount]) -> list[str]:
    """A line per number. 47 is in brackets where its parts are listed: they add up without it."""
    again = 47 in found and any(n in found for n in range(21, 34))
    whole_ns = sum(a.total_ns for n, a in found.items() if n != 47 or not again) or 1
    lines = [_HEAD]
    for number, (times, total_ns) in found.items():
        step = STEPS[number]
        share = f"{total_ns / whole_ns:.1%}"
        share = f"({share})" if number == 47 and again else share
        lines.append(
            f"{step.label:>5} {step.lane:<4}  {step.name:<40} {times:>6} "
            f"{total_ns / 1e6:>10.3f} {share:>8}"
        )
    return lines
