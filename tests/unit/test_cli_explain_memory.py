"""`dsv4 explain --memory`: what caches of a size serve, in words and for machines."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dsv4 import config_json, table
from dsv4.config import preset
from registry import cli
from registry.explain import explain
from runtime.pools import PoolOptions
from runtime.save import save

TINY = dataclasses.replace(
    preset("tiny"), vocab=64, dim=32, q_rank=16, o_rank=8, expert_dim=16, head_dim=32, index_dim=16
)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines of the section about pools."""
    assert cli.main(["explain", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    _, _, rest = out.partition("\npools\n")
    return [line.strip() for line in rest.partition("\n\n")[0].splitlines()]


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert cli.main(["explain", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a refused command writes."""
    assert cli.main(["explain", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_i2_the_report_tells_bytes_by_kind_and_what_they_serve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("flash", "--memory", "8GiB", "--slots", "4", "--drafts", "3", "--chunk", "256")
    lines = told(capsys, *words)
    text = "\n".join(lines)
    for part in (
        "8.590 GB for caches alone (8GiB as given), in bfloat16; max_model_len 1,048,576",
        "pages of 128 tokens, chunks of 256 tokens, 3 drafts",
        "window 5.767 MB, overlap 430.080 kB, draft streams 32.768 kB",
        "open inputs 12.206 MB, draft rows 890.880 kB",
        "compressed 708.608 kB, index keys 172.032 kB",
        "a sequence grows by 6880 B per token (compressed 5536, index keys 1344)",
        "waste: index 0 of each group",
        "largest request: 1,048,576 tokens; when several run at once: 1 of 1,048,576, 4 of ",
    ):
        assert part in text
    assert next(line for line in lines if line.startswith("1,048,576 tokens")).split()[2:4] == [
        "1",
        "7.234",
    ]
    pools = facts(capsys, *words)["pools"]
    assert pools["sizes"]["slots"] == 5
    assert (pools["chunk"], pools["sizes"]["drafts"]) == (256, 3)
    assert pools["memory"] == {"num_bytes": 8 * 2**30, "source": "8GiB as given"}
    assert 0 <= pools["memory"]["num_bytes"] - pools["bytes"] == pools["waste"]["unused"]
    assert pools["lengths"]["1048576"]["fits"] == 1


@pytest.mark.parametrize("drafts", ["0", "1", "8"])
def test_b5_b4_b2_the_hit_rule_is_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], drafts: str
) -> None:
    lines = told(capsys, "flash", "--memory", "20GB", "--drafts", drafts)
    assert lines[-1] == (
        "hit unit: one page, 128 tokens, with any number of drafts or none; prompts of 129 tokens "
        "or more can hit, in multiples of 128"
    )


def test_i5_i1_too_little_memory_is_refused_with_remedies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = fails(capsys, "flash", "--memory", "7.3GB", "--slots", "8")
    assert line.startswith("dsv4: error: max_model_len 1048576 cannot be served: history pages are")
    assert "in this memory at most max_model_len " in line
    assert "for 1048576 tokens at least " in line
    length = line.partition("at most max_model_len ")[2].partition(";")[0]
    words = ("flash", "--memory", "7.3GB", "--slots", "8", "--max-model-len")
    assert facts(capsys, *words, length)["pools"]["largest_request"] >= int(length)
    assert "cannot be served" in fails(capsys, *words, str(int(length) + 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slots", "4"), "--slots needs --memory, as --memory 8GiB"),
        (("--max-model-len", "4"), "--max-model-len needs --memory"),
        (("--memory", "8"), "write 8B for bytes, 8GiB"),
        (("--memory", "1.5"), "at most 1; for a size add a unit"),
        (
            ("--memory", "8GB", "--drafts", "9"),
            "drafts is 9; it must be a whole number from 0 to 8",
        ),
        (("--memory", "8GB", "--chunk", "0"), "chunk is 0"),
        (("--memory", "8GB", "--max-model-len", "9999999"), "from 1 to 1048576"),
        (("--memory", "8GB", "--slots", "many"), "invalid int value: 'many'"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert message in fails(capsys, "flash", *words)


def test_a_fraction_is_of_what_is_free_here(capsys: pytest.CaptureFixture[str]) -> None:
    pools = facts(capsys, "tiny", "--memory", "0.01")["pools"]
    assert pools["memory"]["source"].startswith("0.01 of ")
    assert pools["largest_request"] == pools["max_model_len"] == preset("tiny").max_positions


def test_caches_of_a_draft_module_are_there_where_it_drafts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    none, two = (
        facts(capsys, "flash", "--memory", "20GB", "--drafts", drafts)["pools"]
        for drafts in ("0", "2")
    )
    assert (none["draft_module"], two["draft_module"]) == (False, True)
    windows = [pools["groups"]["window_pages"]["kinds"] for pools in (none, two)]
    assert [kinds["window"] for kinds in windows] == [43 * 128 * 1024, 44 * 128 * 1024]
    assert "draft streams" not in windows[0]
    lines = told(capsys, "flash", "--memory", "20GB")
    assert lines[1].endswith("0 drafts (no caches for a draft module)")


def test_drafts_without_weights_for_them_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    params = table.init(TINY, torch.Generator().manual_seed(3))
    save(dataclasses.replace(params, mtp=None), TINY, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json.write(TINY)))
    words = (str(tmp_path), "--memory", "100MB", "--drafts")
    assert "this model has no draft module" in fails(capsys, *words, "1")
    assert facts(capsys, *words, "0")["pools"]["draft_module"] is False


def test_without_memory_nothing_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts(capsys, "flash") == explain("flash")
    assert "pools" not in explain("flash")


def test_help_tells_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    options = PoolOptions()
    assert f"one sequence per step; default: {options.chunk}" in out
    assert f"drafted ahead; default: {options.drafts}" in out


def test_i2_other_dtypes_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("flash", "--memory", "20GB", "--dtype", "float32")
    assert facts(capsys, *words)["pools"]["bytes_per_token"]["total"] == 2 * 6880
