"""The timeline: every number that must be there, in order, in its lane, and nothing left behind."""

import importlib
import json
import sys
from itertools import pairwise

import pytest
import torch

from compiler.backend import EAGER
from dsv4 import model, mtp
from dsv4.config import Config
from dsv4.context import Ctx
from runtime import chrome
from runtime.drafts import Drafts
from runtime.engine import Engine
from runtime.pages import fit
from runtime.profile_hook import MARKS
from runtime.request import Limits, Request, Sampling
from runtime.sequence import LANES, NOT_HERE, STEPS
from runtime.timeline import Amount, amounts
from runtime.trace import Trace
from tests import counting as fake
from tests import tiny

CFG = tiny.short(mtp=0, max_positions=200)
DRAFTING = tiny.short(max_positions=200)
LAYER = (21, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32)  # of a CSA layer
PROMPT = (13, 14, 15, 17, 18, 19, 20, *LAYER, 33, 35, 37, 38, 41)
DECODE = (42, 43, 44, 45, 47, 49, 50, 51, 52)


def real(cfg: Config, dtype: torch.dtype = torch.float32) -> fake.Model:
    ctx, params = Ctx(cfg, ops=EAGER.ops), tiny.params(cfg, 0, dtype)
    return fake.Model(
        cfg,
        params,
        lambda p, s, b: model.step(p, s, b, ctx),
        (lambda p, s, h, b: mtp.draft(p, s, h, b, ctx)) if cfg.mtp else None,
    )


def run(trace: Trace | None, made: list[Request], cfg: Config = CFG, **more) -> list[Request]:
    drafts = more.get("drafts")
    sizes = fit(cfg, [80] * 3, most=16, drafts=drafts.depth if drafts else 0)
    return Engine(real(cfg), sizes, chunk=16, watch=trace, **more).generate(made)


def request(n: int = 20, **more) -> Request:
    given = {"limits": Limits(max_new_tokens=4, ignore_eos=True)} | more
    return Request(prompt=tiny.tokens(CFG, 1, n, n)[0].tolist(), **given)


def of(trace: Trace, number: int) -> dict[int, Amount]:
    return amounts((lap, p) for lap in trace.laps for p in lap.parts if p.request == number)


def test_every_number_of_a_request() -> None:
    trace = Trace()
    run(trace, [request()])
    got = of(trace, 0)
    want = {n for n in PROMPT + DECODE if n != 13}
    assert set(got) == want
    layers, steps = CFG.layers, 2 + 3  # two chunks, the second brings a token, and three more
    assert got[21].times == got[30].times == layers * steps
    assert got[20].times == 2
    assert got[47].times == got[43].times == 3
    assert got[42].times == 2 * 3  # before and after the pages are taken
    assert got[35].times == 4  # one per token
    assert got[51].times == got[52].times == got[15].times == 1
    assert all(a.total_ns > 0 for a in got.values())
    parts = sum(got[n].total_ns for n in range(21, 34) if n in got)
    assert 0 < got[47].total_ns < parts
    assert not set(got) & NOT_HERE.keys() - {27, 28, 45}


def test_sampling_and_hits_are_seen() -> None:
    trace = Trace()
    warm = request(90, sampling=Sampling(temperature=1.0, top_k=4))
    run(trace, [warm])
    assert 34 in of(trace, 0)
    assert 16 not in of(trace, 0)
    trace = Trace()
    sizes = fit(CFG, [120] * 2, most=16)
    e = Engine(real(CFG), sizes, chunk=16, watch=trace)
    for _ in range(2):
        e.generate([request(90)])
    assert 16 not in of(trace, 0)
    assert 16 in of(trace, 1)


def test_drafts_have_their_numbers() -> None:
    trace = Trace()
    run(trace, [request()], DRAFTING, drafts=Drafts(depth=2))
    got = of(trace, 0)
    assert {36, 46, 48} <= got.keys()
    assert not any(s.number in (21, 33) for lap in trace.laps for s in after(lap, 36))


def after(lap, number: int) -> list:
    """Segments between the first of a number and the commit."""
    numbers = [s.number for s in lap.segments]
    return list(lap.segments[numbers.index(number) : numbers.index(38)])


def test_order_and_nesting() -> None:
    """In a step: no gaps, and the order of the sequence; layers in order within the forward."""
    trace = Trace()
    run(trace, [request(), request(9)])
    for lap in trace.laps:
        for a, b in pairwise(lap.segments):
            assert a.end_ns == b.start_ns
            assert a.end_ns > a.start_ns
        numbers = [s.number for s in lap.segments]
        starts = [numbers.index(n) for n in (14, 19, 20, 21, 23, 26, 28, 29, 30, 32, 33, 38)]
        assert starts == sorted(starts)
        assert numbers[0] == 14
        begin = [i for i, n in enumerate(numbers) if n == 21]
        assert len(begin) == CFG.layers
        for i, j in pairwise(begin):
            layer = numbers[i:j]
            assert layer == [n for n in LAYER if n in layer]
    for a, b in pairwise(trace.laps):
        assert a.end_ns <= b.start_ns


def test_the_chrome_file() -> None:
    """Valid by the format's rules; every event in the row of its lane and inside its step."""
    trace = Trace()
    with trace.span(8):
        pass
    trace.mark(9)
    run(trace, [request(), request(9)])
    made = json.loads(json.dumps(trace.chrome()))
    events = made["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[1, tid][0] for tid in chrome.LANE_ROWS.values()} == set(LANES)
    assert {e["ph"] for e in events} == {"M", "X", "i"}
    assert {e["pid"] for e in events} == {1, 2, 3}
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        assert isinstance(e["name"], str)
        if e["ph"] == "M":
            continue
        assert e["ts"] >= 0
        if e["ph"] == "i":
            assert e["s"] == "t"
            continue
        assert e["dur"] > 0
        rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        if e["cat"] == "sequence57" and e["args"]["number"].isdigit():
            step = STEPS[int(e["args"]["number"])]
            assert names[e["pid"], e["tid"]][0] == step.lane == e["args"]["lanes"][0]
    for (pid, tid), spans in rows.items():
        _check_nested(spans)
        if tid != chrome.ROW:
            steps = rows[pid, chrome.ROW]
            inside = [any(a <= s + 1e-3 and t <= b + 1e-3 for a, b in steps) for s, t in spans]
            outside = 1 if names[pid, tid][0] in ("T", "W") else 0  # the queue, start-up
            assert inside.count(False) <= outside
    numbers = {e["args"]["number"] for e in events if e.get("cat") == "sequence57"}
    assert {str(n) for n in (8, 9, *PROMPT, *DECODE)} <= numbers
    assert made["otherData"]["not in this process"].keys() == {str(n) for n in NOT_HERE}


def _check_nested(spans: list[tuple[float, float]]) -> None:
    """Two spans of a row are apart, or one is in the other: the format needs it."""
    open_: list[tuple[float, float]] = []
    for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_ and open_[-1][1] <= start + 1e-3:
            open_.pop()
        assert not open_ or end <= open_[-1][1] + 1e-3
        open_.append((start, end))


def test_the_table() -> None:
    trace = Trace()
    with trace.span(4):
        pass
    run(trace, [request()])
    text = trace.table()
    assert "weights are loaded" in text
    assert "request 0: 20 prompt tokens, 4 new, length" in text
    assert "all 5 steps" in text
    assert "one rank holds all rows" in text
    lines = text[text.index("request 0") : text.index("all 5 steps")].splitlines()[2:]
    assert [int(line.split()[0]) for line in lines] == sorted({*PROMPT, *DECODE})
    shares = [float(line.split()[-1].strip("%")) for line in lines if "(" not in line[-10:]]
    assert sum(shares) == pytest.approx(100, abs=2.5)


def test_a_model_whose_parts_are_not_seen() -> None:
    """A compiled step, or this counter: the forward is one."""
    trace = Trace()
    e = fake.engine(watch=trace)
    e.generate([Request(prompt=[1] * 10, limits=Limits(max_new_tokens=3))])
    got = of(trace, 0)
    assert not set(range(21, 34)) & got.keys()
    assert got[0].times == 2
    assert got[47].times == 2
    assert "21-33 M     forward as a whole" in trace.table()
    json.dumps(trace.chrome())


def test_nothing_changes_and_nothing_stays() -> None:
    """The same tokens and scores; the hook is there in steps only, and puts back what was there."""
    seen: list[object] = []
    inner = real(CFG)

    def watched(p, s, b):
        seen.append(sys.getprofile())
        return inner.step(p, s, b)

    def outputs(trace: Trace | None) -> list:
        sizes = fit(CFG, [80] * 3, most=16)
        m = fake.Model(CFG, inner.params, watched)
        made = [request(logprobs=1), request(9, sampling=Sampling(temperature=1.0, seed=3))]
        Engine(m, sizes, chunk=16, watch=trace).generate(made)
        return [(r.output, r.scores) for r in made]

    plain = outputs(None)
    assert set(seen) == {None}
    seen.clear()
    assert outputs(Trace()) == plain
    assert None not in seen
    assert sys.getprofile() is None

    def other(*_: object) -> None:
        pass

    sys.setprofile(other)
    try:
        outputs(Trace())
        assert sys.getprofile() is other
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_step_that_breaks_off_leaves_no_hook(error: BaseException) -> None:
    inner, calls = fake.counter(fake.CFG), []

    def step(p, s, b):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return inner.step(p, s, b)

    trace = Trace()
    e = Engine(fake.Model(fake.CFG, inner.params, step), fake.sizes(), chunk=4, watch=trace)
    made = e.add(Request(prompt=[7] * 9, limits=Limits(max_new_tokens=3)))
    e.step()
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            e.step()
    else:
        e.step()
    assert sys.getprofile() is None
    e.drain()
    assert made.output == [8, 9, 10]
    assert [lap.error is not None for lap in trace.laps][:3] == [False, True, False]
    assert "1 failed" in trace.table()
    assert sys.getprofile() is None


def test_an_idle_engine_leaves_no_hook() -> None:
    trace = Trace()
    assert fake.engine(watch=trace).step() == []
    assert sys.getprofile() is None
    assert not trace.laps


@pytest.mark.parametrize("mark", MARKS, ids=lambda m: f"{m.module}.{m.name}")
def test_every_marked_function_exists(mark) -> None:
    """A rename must not make a number vanish in silence."""
    found: object = importlib.import_module(mark.module)
    for part in mark.name.split("."):
        found = getattr(found, part)
    code = found.__code__  # type: ignore[attr-defined]
    assert (code.co_qualname, found.__module__) == (mark.name, mark.module)
    if mark.given is not None:
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        assert mark.given[0] in names


def test_the_sequence_is_the_spec() -> None:
    assert sorted(STEPS) == list(range(58))
    assert all(set(step.lanes) <= set(LANES) for step in STEPS.values())
    assert all(3 <= n <= 52 for n in NOT_HERE)


def test_only_so_much_is_kept() -> None:
    trace = Trace(keep=3)
    e = fake.engine(watch=trace)
    e.generate([Request(prompt=[n], limits=Limits(max_new_tokens=2)) for n in range(5)])
    assert len(trace.laps) <= 3
    assert len(trace.requests) == 3
    for _ in range(3):
        e.generate([Request(prompt=[1], limits=Limits(max_new_tokens=4))])
    assert "before them were dropped" in trace.table()
    json.dumps(trace.chrome())
    with pytest.raises(ValueError, match="keep is 0"):
        Trace(keep=0)
    with pytest.raises(ValueError, match="watches another engine"):
        fake.engine(watch=trace)
