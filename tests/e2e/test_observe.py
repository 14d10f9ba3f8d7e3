"""What the command line can record of a run: a trace, counters, what became of drafts."""

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from registry import cli
from runtime.sequence import NOT_HERE

pytestmark = pytest.mark.e2e

BASE = ("--prompt", "In the beginning", "--max-new-tokens", "10", "--dtype", "float32")
BASE = (*BASE, "--temperature", "0", "--ignore-eos")


def generate(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = cli.main(["generate", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_one_run_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same text as a plain run; a trace, counters and an acceptance table beside it."""
    code, plain, told = generate(capsys, *BASE)
    assert (code, len(told.splitlines())) == (0, 1)
    trace, metrics = tmp_path / "trace.json", tmp_path / "metrics.txt"
    more = ("--drafts", "3", "--trace", trace, "--metrics", metrics)
    code, out, err = generate(capsys, *BASE, *more)
    assert (code, out) == (0, plain)
    assert "tokens per step with drafts" in err
    assert "start-up" in err
    assert "request 0: " in err
    made = json.loads(trace.read_text())
    numbers = {e["args"]["number"] for e in made["traceEvents"] if e.get("cat") == "sequence57"}
    # Without 16: nothing to hit. 34: nothing to filter. 39: the text.
    want = {*range(3, 10), *range(13, 39), 39, *range(41, 53)} - {16, 34}
    want -= NOT_HERE.keys() - {27, 28, 45}
    assert {str(n) for n in want} <= numbers
    families = text_string_to_metric_families(metrics.read_text())
    got = {s.name: s.value for f in families for s in f.samples}
    assert got["vllm:generation_tokens_total"] == 10
    assert got["vllm:spec_decode_num_drafts_total"] > 0
    proposed, accepted = (
        got[f"vllm:spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted")
    )
    assert 0 < accepted <= proposed
    code, out, err = generate(capsys, *BASE, "--drafts", "3", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)["acceptance"]
    assert (sum(told["proposed"]), sum(told["accepted"])) == (proposed, accepted)
    assert told["mean_length_tokens"] > 1
    assert json.loads(out)["outputs"][0]["text"] + "\n" == plain


def test_no_prefix_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, queries in (((), True), (("--no-prefix-cache",), False)):
        metrics = tmp_path / "metrics.txt"
        code, out, _ = generate(capsys, *BASE, *more, "--metrics", metrics, "--json")
        assert code == 0
        assert json.loads(out)["acceptance"] is None
        families = text_string_to_metric_families(metrics.read_text())
        got = {s.name: s.value for f in families for s in f.samples}
        assert (got["vllm:prefix_cache_queries_total"] > 0) == queries


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trace", "NOWHERE/t.json"), "cannot be written"),
        (("--trace", ""), "the name is empty"),
        (("--metrics", "FOLDER"), "cannot be written"),
        (("--trace", "FOLDER/a", "--metrics", "FOLDER/a"), "name two files"),
        (("--drafts", "-1"), "--drafts is -1; it must be from 0 to 8"),
        (("--drafts", "9"), "--drafts is 9; it must be from 0 to 8"),
        (("--drafts", "x"), "--drafts"),
        (("--chunk", "0"), "--chunk is 0"),
    ],
)
def test_refused_before_the_model_loads(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loads(*_args: object, **_more: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("registry.build.build", loads)
    places = {"NOWHERE": str(tmp_path / "none"), "FOLDER": str(tmp_path)}
    given = [
        places.get(w.split("/")[0], w.split("/")[0]) + w[len(w.split("/")[0]) :] for w in words
    ]
    code, out, err = generate(capsys, *BASE, *given)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []  # looking leaves no file


def test_drafts_of_a_model_without_a_draft_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dsv4 import config_json
    from runtime.save import save
    from tests import tiny

    cfg = tiny.config(mtp=0, max_positions=64)
    save(tiny.params(cfg), cfg, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json.write(cfg)))
    words = ("--model", tmp_path, "--token-ids", "1,2", "--drafts", "2")
    code, out, err = generate(capsys, *words)
    assert (code, out) == (2, "")
    assert "has no draft module: leave it out" in err
