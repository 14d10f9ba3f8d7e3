"""The simulator of data-parallel ranks: what goes in comes out, in the time one can add up."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime import balance_dp
from runtime.balance_dp import ALIGN, CLOSED, Costs
from tools import simulate as cli
from tools.arrivals import KINDS, Arrival, Load, draw, read
from tools.lockstep import Machine, Policy, Run, simulate
from tools.simulate import POLICIES, report

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {p.name: p for p in POLICIES}
SEED, OURS = BY_NAME["seed"], BY_NAME["align+work"]
COSTS = Costs(prefill_ns=1_000_000, decode_ns=2_000_000)
SMALL = Machine(ranks=1, limit=2, chunk=4, budget=8, costs=COSTS)  # 10 ms + 1 per token + 2 per row


def at(arrival_s: float, prompt: int, new: int, prefix: str = "") -> Arrival:
    return Arrival(
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        new_tokens=new,
        prefix=prefix,
        prefix_tokens=prompt if prefix else 0,
    )


def ms(seconds: np.ndarray) -> list[float]:
    return [round(1e3 * float(s), 6) for s in seconds]


# By hand.


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_one_request_by_hand(policy: Policy) -> None:
    run = simulate([at(0, 6, 3)], SMALL, policy)
    assert [s.prompt_tokens for s in run.steps] == [[4], [2], [0], [0]]
    assert ms(np.array([s.seconds for s in run.steps])) == [14, 12, 12, 12]
    assert (ms(run.first_s), ms(run.end_s)) == ([26], [50])
    row = report(run, COSTS)
    assert row["tok/s"] == pytest.approx(3 / 0.050)
    assert row["TTFT50 s"] == row["TTFT99 s"] == pytest.approx(0.026)
    assert row["TPOT50 ms"] == row["ITL99 ms"] == pytest.approx(12)
    assert (row["max/mean"], row["idle"], row["frozen"]) == (1, 0, 0)


def test_the_slowest_rank_sets_the_pace() -> None:
    machine = dataclasses.replace(SMALL, ranks=2)
    run = simulate([at(0, 4, 2), at(0, 2, 1)], machine, SEED)
    assert list(run.rank) == [0, 1]
    assert [s.prompt_tokens for s in run.steps] == [[4, 2], [0, 0]]
    assert ms(run.first_s) == [14, 14]
    assert ms(run.end_s) == [26, 14]
    # Of 26 ms the mean rank had 3 + 1 ms of work and the slowest 4 + 2.
    row = report(run, COSTS)
    assert row["idle"] == pytest.approx((1 + 1) / 26)
    assert row["max/mean"] == pytest.approx((4 / 3 + 2 / 1) / 2)


def test_decodes_go_first_and_admission_is_in_order() -> None:
    run = simulate([at(0, 4, 9), at(0.001, 9, 1), at(0.002, 1, 1)], SMALL, BY_NAME["open"])
    # The third waits for a slot: the second takes the last one, 4 tokens a step.
    assert [s.prompt_tokens[0] for s in run.steps[:5]] == [4, 4, 4, 1, 1]
    assert [s.states[0].decoding for s in run.steps[:5]] == [0, 1, 1, 1, 1]
    assert ms(run.first_s) == [14, 14 + 16 + 16 + 13, 14 + 16 + 16 + 13 + 13]


def test_cached_pages_are_not_computed() -> None:
    machine = dataclasses.replace(SMALL, page_tokens=4)
    arrivals = [at(0, 8, 1, "a"), at(1, 8, 1, "a"), at(2, 8, 1, "b"), at(3, 99, 1, "a")]
    run = simulate(arrivals, machine, OURS)
    # Whole pages; of 8 tokens not the last; of 99 the 8 that came before.
    assert list(run.cached) == [0, 4, 0, 8]


def test_pages_are_promised_once() -> None:
    machine = dataclasses.replace(SMALL, pages=10, page_tokens=4)
    run = simulate([at(0, 6, 3), at(0, 4, 1)], machine, SEED)  # 2 pages and 1
    # Before each step. Both prompts start with the first, which the second request ends with.
    assert [s.states[0].free_pages for s in run.steps] == [7, 8, 8, 8]


def test_a_router_sees_what_it_was_last_told() -> None:
    arrivals = [at(0, 1, 1), at(1, 1, 1)]
    for stale_s, ranks in ((0.1, [0, 0]), (10.0, [0, 1])):  # by then the first has long ended
        machine = dataclasses.replace(SMALL, ranks=2, stale_s=stale_s)
        assert list(simulate(arrivals, machine, SEED).rank) == ranks


def test_the_seed_freezes_and_ours_ends_the_wait() -> None:
    """A rank with a long answer is full; the other is free, and one request comes for it."""
    machine = Machine(ranks=2, limit=1)
    arrivals = [at(0, 100, 800), at(0.5, 100, 5)]
    wait_s = {}
    for policy in (SEED, OURS):
        run = simulate(arrivals, machine, policy)
        assert list(run.rank) == [0, 1]
        wait_s[policy.name] = run.first_s[1] - arrivals[1].arrival_s
    longest_s = ALIGN.full_hold_ms / 1e3 + 3 * 0.020  # a step under way, the bound, a step, its own
    assert wait_s["seed"] > 7
    assert 0.9 < wait_s["align+work"] <= longest_s


def test_a_gate_that_never_opens_is_refused() -> None:
    with pytest.raises(ValueError, match="policy shut lets no rank work with 1 requests open"):
        simulate([at(0, 6, 3)], SMALL, Policy("shut", SEED.route, lambda _: CLOSED))


# What holds for all.


def drawn(kind: str, requests: int = 80, seed: int = 3) -> list[Arrival]:
    return draw(kind, Load(rate=30.0, requests=requests, prefixes=8), seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_all_finish_and_no_token_is_lost(kind: str, policy: Policy) -> None:
    arrivals = drawn(kind)
    machine = Machine(ranks=4, pages=400)
    run = simulate(arrivals, machine, policy)
    prompts = np.array([a.prompt_tokens for a in arrivals])
    news = np.array([a.new_tokens for a in arrivals])
    assert sum(sum(s.prompt_tokens) for s in run.steps) == (prompts - run.cached).sum()
    assert sum(x.decoding for s in run.steps for x in s.states) == (news - 1).sum()
    assert (run.first_s > [a.arrival_s for a in arrivals]).all()
    assert (run.end_s[news > 1] > run.first_s[news > 1]).all()
    assert (run.end_s >= run.first_s).all()
    assert set(run.rank) == set(range(4))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_steps_keep_to_limits(policy: Policy) -> None:
    machine = Machine(ranks=3, limit=6)
    run = simulate(drawn("burst"), machine, policy)
    for step in run.steps:
        for state, tokens in zip(step.states, step.prompt_tokens, strict=True):
            assert state.decoding <= state.running <= machine.limit
            assert state.decoding + tokens <= machine.budget
            assert step.decision.prefill or tokens == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_is_held_for_longer_than_the_bound(kind: str) -> None:
    run = simulate(drawn(kind), Machine(ranks=5, limit=4), OURS)
    closed = [s for s in run.steps if s.decision == CLOSED]
    assert closed
    held = max(x.held_ms for s in closed for x in s.states if x.ready)
    assert held < max(ALIGN.hold_ms, ALIGN.full_hold_ms)


def same(a: Run, b: Run) -> bool:
    return bool((a.end_s == b.end_s).all()) and a.steps == b.steps


def test_runs_can_be_repeated() -> None:
    once, again = (simulate(drawn("tail"), Machine(), OURS) for _ in range(2))
    assert same(once, again)
    assert drawn("tail") != drawn("tail", seed=4)


def test_loads_are_what_was_asked_for() -> None:
    load = Load(rate=50.0, requests=5000, prompt_mean=100.0, new_mean=20.0)
    for kind in ("poisson", "burst"):
        arrivals = draw(kind, load, 0)
        assert arrivals[-1].arrival_s == pytest.approx(5000 / 50, rel=0.05)
        assert np.mean([a.prompt_tokens for a in arrivals]) == pytest.approx(100, rel=0.05)
        assert np.mean([a.new_tokens for a in arrivals]) == pytest.approx(20, rel=0.05)
        assert arrivals == sorted(arrivals, key=lambda a: a.arrival_s)
    longest = [max(a.prompt_tokens for a in draw(kind, load, 0)) for kind in ("poisson", "tail")]
    assert longest[1] > 3 * longest[0]


# Ours against the seed's.


def wave(seconds: int = 24) -> list[Arrival]:
    """A rate that swells and ebbs; every twentieth prompt is very long."""
    times = [t / 100 for t in range(100 * seconds) if t % 12 < 2 + 4 * (t % 1200 < 500)]
    return [
        at(t, 12_000 if i % 20 == 0 else 400 + 7 * i % 1600, 50 + 13 * i % 250)
        for i, t in enumerate(times)
    ]


def compared(arrivals: Sequence[Arrival]) -> None:
    machine = Machine()
    theirs, ours = (report(simulate(arrivals, machine, p), machine.costs) for p in (SEED, OURS))
    assert ours["TTFT99 s"] < theirs["TTFT99 s"]
    assert ours["tok/s"] >= theirs["tok/s"]
    assert ours["TPOT50 ms"] <= theirs["TPOT50 ms"]


@pytest.mark.parametrize("kind", KINDS)
def test_ours_is_sooner_and_no_slower(kind: str) -> None:
    compared(draw(kind, Load(rate=32.0, requests=500), 0))


def test_ours_is_sooner_and_no_slower_on_a_trace() -> None:
    compared(wave())


def test_the_command_of_the_docstring_is_one() -> None:
    found = re.search(r"python -m tools\.simulate (.*?)\n\n", balance_dp.__doc__ or "", re.DOTALL)
    assert found
    args = cli._parser().parse_args(found[1].replace("\\\n", " ").split())
    assert args.seeds == 3
    assert cli.chosen(args.policy, [*BY_NAME], "--policy") == ["seed", "align+work"]
    assert cli.chosen(args.arrivals, [*KINDS], "--arrivals") == [*KINDS]


# The command.


def written(path: Path, arrivals: Sequence[Arrival]) -> Path:
    path.write_text("\n".join(json.dumps(dataclasses.asdict(a)) for a in arrivals) + "\n")
    return path


def test_a_trace_is_read_by_time(tmp_path: Path) -> None:
    arrivals = [at(2, 5, 6, "a"), at(1, 3, 4)]
    assert read(written(tmp_path / "t.jsonl", arrivals)) == arrivals[::-1]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--arrivals", "poisson,tail", "--requests", "15", "--ranks", "2", "--seeds", "2"]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    head, *rows = out.splitlines()
    assert err == ""
    assert " ".join(head.split()) == (
        "arrivals policy tok/s TTFT50 s TTFT99 s TPOT50 ms TPOT99 ms ITL99 ms max/mean idle frozen"
    )
    assert [r.split()[:2] for r in rows] == [[k, n] for k in ("poisson", "tail") for n in BY_NAME]
    assert all(np.isfinite([float(x) for x in r.split()[2:]]).all() for r in rows)
    assert cli.main(words) == 0
    assert capsys.readouterr().out == out


def test_a_trace_from_the_shell(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.jsonl", [at(0, 6, 3)])
    options = "--ranks 1 --limit 2 --chunk 4 --budget 8 --prefill-ns 1000000 --decode-ns 2000000"
    command = [sys.executable, "-m", "tools.simulate", "--arrivals", "trace", "--trace", str(trace)]
    done = subprocess.run(
        [*command, "--policy", "seed", *options.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    row = " ".join(done.stdout.splitlines()[1].split())
    assert row == "trace seed 60.00 0.03 0.03 12.00 12.00 12.00 1.00 0.00 0.00"


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a refused command writes."""
    assert cli.main(["--requests", "30", *words]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("python -m tools.simulate: error: ")
    return line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--policy seed,nope", "--policy is 'nope'; it must be of open, seed,"),
        ("--arrivals nope", "--arrivals is 'nope'; it must be of poisson, burst, tail, trace"),
        ("--arrivals trace", "give both or neither"),
        ("--trace some.jsonl", "give both or neither"),
        ("--arrivals trace --trace /nowhere.jsonl", "No such file"),
        ("--rate abc", "invalid float value: 'abc'"),
        ("--rate nan", "rate is nan; it must be above 0"),
        ("--requests 0", "requests is 0; it must be at least 1"),
        ("--ranks 0", "ranks is 0; it must be at least 1"),
        ("--base-s inf", "base_s is inf"),
        ("--budget 24", "raise --budget or lower --limit"),
        ("--pages 1", "raise --pages"),
        ("--prefill-ns -1", "prefill_ns is -1"),
        ("--seeds 0", "--seeds is 0"),
        ("--nope", "unrecognized arguments: --nope"),
    ],
)
def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    assert told in fails(capsys, *words.split())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", "line 2: [1] is no object of"),
        ('{"arrival_s": 0, "prompt": 3}', "is no object of arrival_s, new_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 3}', "line 2: "),
        ('{"arrival_s": -1, "prompt_tokens": 3, "new_tokens": 1}', "arrival_s is -1"),
        ('{"arrival_s": NaN, "prompt_tokens": 3, "new_tokens": 1}', "arrival_s is nan"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "new_tokens": 1}', "prompt_tokens is 0"),
        ('{"arrival_s": 0, "prompt_tokens": 3, "new_tokens": 1e3}', "new_tokens is 1000.0"),
        ('{"arrival_s": 0, "prompt_tokens": 3, "new_tokens": 9999999}', "from 1 to 1048576"),
        ('{"arrival_s": 0, "prompt_tokens": 3, "new_tokens": 1, "prefix": []}', "prefix is []"),
    ],
)
def test_bad_traces_name_the_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, told: str
) -> None:
    trace = written(tmp_path / "t.jsonl", [at(0, 1, 1)])
    trace.write_text(trace.read_text() + line + "\n")
    assert told in fails(capsys, "--arrivals", "trace", "--trace", str(trace))


def test_traces_of_nothing_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n")
    assert "holds no requests" in fails(capsys, "--arrivals", "trace", "--trace", str(trace))
    trace.write_bytes(b"\xff\xfe\x00")
    assert "no UTF-8 text" in fails(capsys, "--arrivals", "trace", "--trace", str(trace))
    assert "directory" in fails(capsys, "--arrivals", "trace", "--trace", str(tmp_path))
