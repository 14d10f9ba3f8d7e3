"""The command line: one line and exit code 2 for what the caller must change."""

import argparse
import importlib.metadata
import json
import logging
import resource
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dsv4 import config_json
from dsv4.config import preset
from registry import cli, cli_explain, explain

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "registry.cli", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a refused command writes."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("dsv4: error: ")
    return line


def test_a_preset_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "pro"]) == 0
    out, err = capsys.readouterr()
    assert "145,116 tensors" in out
    assert err == ""


def test_json_is_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "flash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == explain.explain("flash")


def test_the_registry_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--registry"]) == 0
    assert "28 names" in capsys.readouterr().out
    assert cli.main(["explain", "--registry", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["names"]) == 28


def test_wrong_models_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "no such model directory" in fails(capsys, "explain", str(tmp_path / "absent"))
    assert "holds no config.json" in fails(capsys, "explain", str(tmp_path))
    file = tmp_path / "config.json"
    file.write_text("{")
    assert "cannot be read as JSON" in fails(capsys, "explain", str(tmp_path))
    assert "is not a directory" in fails(capsys, "explain", str(file))
    file.write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "'LlamaForCausalLM' is unknown" in fails(capsys, "explain", str(tmp_path))
    file.write_text('{"architectures": ["DeepseekV41ForCausalLM"]}')
    assert "planned, not built" in fails(capsys, "explain", str(tmp_path))
    assert "unknown" in fails(capsys, "explain", "flash", "--architecture", "Nothing")
    assert "'fast' is unknown" in fails(capsys, "explain", "flash", "--backend", "fast")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: COMMAND"),
        (("explode",), "invalid choice: 'explode'"),
        (("explain", "--nonsense"), "unrecognized arguments: --nonsense"),
        (("explain", "flash", "pro"), "unrecognized arguments: pro"),
        (("explain", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("explain", "flash", "--backend"), "expected one argument"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    line = fails(capsys, *words)
    assert message in line
    assert "--help)" in line


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["explain", "--help"]):
        assert cli.main(words) == 0
        assert "usage: dsv4" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    try:
        assert out == f"dsv4 {importlib.metadata.version('dsv4')}\n"
    except importlib.metadata.PackageNotFoundError:
        assert "not installed" in out


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(cli_explain, "run", fail)


def test_many_lines_become_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, ValueError("a checkpoint\n\n  missing: x\n  y \udcff"))
    line = fails(capsys, "explain")
    assert line == "dsv4: error: a checkpoint; missing: x; y \\udcff"
    raising(monkeypatch, PermissionError(13, "Permission denied", "config.json"))
    assert "Permission denied" in fails(capsys, "explain")
    raising(monkeypatch, ValueError())
    assert fails(capsys, "explain") == "dsv4: error: ValueError"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        cli.main(["explain", "--debug"])
    with pytest.raises(ValueError, match="no"):
        cli.main(["--debug", "explain"])


def test_our_own_faults_are_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, AssertionError("ours"))
    with pytest.raises(AssertionError, match="ours"):
        cli.main(["explain"])


def test_an_interrupt_is_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert cli.main(["explain"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_j5_registry_lines_appear_with_v(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(args: argparse.Namespace) -> int:
        logging.getLogger("registry.registry").info("A: x overrides y")
        return 0

    monkeypatch.setattr(cli_explain, "run", talk)
    for words in (["-v", "explain"], ["explain", "-v"]):
        assert cli.main(words) == 0
        assert capsys.readouterr().err == "registry.registry: A: x overrides y\n"
    assert cli.main(["explain"]) == 0
    assert capsys.readouterr().err == ""


def test_only_the_chosen_command_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "registry.cli_generate", None)  # importing it would fail
    assert cli.main(["explain", "tiny"]) == 0
    fake: Any = types.ModuleType("registry.cli_generate")
    fake.add_arguments = lambda parser: parser.add_argument("--prompt")
    fake.run = lambda args: len(args.prompt)
    monkeypatch.setitem(sys.modules, "registry.cli_generate", fake)
    assert cli.main(["generate", "--prompt", "explain"]) == 7
    capsys.readouterr()


def cpu_s() -> float:
    """CPU time of ended child processes, which a busy machine does not stretch."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_process_explains_the_largest_model_in_three_seconds() -> None:
    start_s = cpu_s()
    done = run("explain", "pro")
    assert (done.returncode, done.stderr) == (0, "")
    assert cpu_s() - start_s < 3


def test_a_process_ends_with_one_line_and_the_code() -> None:
    done = run("explain", "absent")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("dsv4: error: no such model directory: absent")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    words = [sys.executable, "-m", "registry.cli", "explain", "pro"]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


def test_a_closed_stdout_is_no_failure() -> None:
    """Python has no stdout object then."""
    words = [sys.executable, "-c", "import sys; from registry.cli import main; sys.exit(main())"]
    script = " ".join(shlex.quote(w) for w in (*words, "explain", "flash")) + " >&-"
    done = subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_directory_without_weights_is_refused_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json.write(preset("tiny"))))
    assert cli.main(["explain", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert any("safetensors" in line for line in told["refuses"]["now"])
