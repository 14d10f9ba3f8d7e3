"""From a checkpoint on disk to text, through the command line."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv4 import config_json, model
from dsv4.context import Ctx
from registry import cli, tokenizer
from registry.build import build
from runtime.save import save
from tests import tiny

pytestmark = pytest.mark.e2e

VOCAB = 320
SPECIAL = ["<bos>", "<eos>"]
TEXT = "In the beginning God created the heaven and the earth. Γένεσις, 創世記. " * 4
CFG = tiny.config(vocab=VOCAB, max_positions=64, bos=0, eos=(1,))


def write_tokenizer(folder: Path) -> None:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer=trainer)
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    save(tiny.params(CFG), CFG, folder)
    (folder / "config.json").write_text(json.dumps(config_json.write(CFG)))
    return folder


@pytest.fixture(scope="module")
def folder(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a byte-level tokenizer."""
    out = tmp_path_factory.mktemp("model")
    for file in bare.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    write_tokenizer(out)
    return out


def generate(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = cli.main(["generate", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict:
    code, out, err = generate(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_tokenizer(folder: Path, bare: Path) -> None:
    words = tokenizer.load(folder)
    assert words is not None
    assert tokenizer.load(bare) is None
    ids = words.encode(TEXT)
    assert words.decode(ids) == TEXT
    assert words.bos == 0
    assert words.decode([0, *ids, 1, VOCAB + 7]) == TEXT
    stream = words.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.close() == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_broken_tokenizer(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((bare / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer files in .* cannot be read"):
        tokenizer.load(tmp_path)


def test_one_prompt_is_streamed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", folder, "--prompt", "In the", "--max-new-tokens", "8")
    code, out, err = generate(capsys, *words)
    (want,) = as_json(capsys, *words)["outputs"]
    assert code == 0
    assert out == want["text"] + "\n"
    assert len(want["token_ids"]) == 8
    assert "time to first token" in err
    assert "decode 7 tokens at" in err
    assert len(err.splitlines()) == 1


def test_greedy_is_forward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BOS first; tokens and logprobs are those of the model as research sees it."""
    words = ("--model", folder, "--prompt", "In the", "--max-new-tokens", "8", "--logprobs", "2")
    (got,) = as_json(capsys, *words, "--dtype", "float64", "--chunk", "2")["outputs"]
    prompt, new = got["prompt_token_ids"], got["token_ids"]
    assert prompt[0] == CFG.bos
    made = build(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model.forward(made.params, torch.tensor([prompt + new[:-1]]), Ctx(made.cfg))[0]
    logs = logits[len(prompt) - 1 :].log_softmax(-1)
    assert logs.argmax(-1).tolist() == new
    for row, score in zip(logs, got["logprobs"], strict=True):
        best = row.topk(2)
        assert score["logprob"] == pytest.approx(float(row.max()), rel=1e-9)
        assert [t["token_id"] for t in score["top"]] == best.indices.tolist()
    (bare,) = as_json(capsys, *words, "--no-bos")["outputs"]
    assert bare["prompt_token_ids"] == prompt[1:]


def test_company_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three prompts at once and each alone, sampled, in float64: the same text."""
    prompts = ("In the beginning", "And", "G")
    rest = ("--temperature", "0.9", "--top-k", "50", "--seed", "5", "--max-new-tokens", "9")
    base = ("--model", folder, "--dtype", "float64", *rest)
    together = as_json(capsys, *base, "--chunk", "3", "--prompt", *prompts)["outputs"]
    for prompt, got in zip(prompts, together, strict=True):
        (want,) = as_json(capsys, *base, "--prompt", prompt)["outputs"]
        assert got["token_ids"] == want["token_ids"]
        assert got["text"] == want["text"]
    code, out, _ = generate(capsys, *base, "--prompt", *prompts)
    assert code == 0
    for i, (prompt, got) in enumerate(zip(prompts, together, strict=True), start=1):
        assert f"== {i}: {prompt!r}\n{got['text']}\n" in out


def test_stop_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--model", folder, "--prompt", "In", "--max-new-tokens", "12", "--ignore-eos")
    (free,) = as_json(capsys, *base)["outputs"]
    stop = free["text"][5:8]
    (cut,) = as_json(capsys, *base, "--stop", stop)["outputs"]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == free["text"][: free["text"].index(stop)]


def test_token_ids(bare: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint without a tokenizer: ids in, ids out, nothing added."""
    base = ("--token-ids", "5,6,7", "--max-new-tokens", "4")
    (got,) = as_json(capsys, "--model", bare, *base)["outputs"]
    assert got["prompt_token_ids"] == [5, 6, 7]
    assert got["text"] is None
    code, out, _ = generate(capsys, "--model", bare, *base)
    assert code == 0
    assert [int(t) for t in out.split()] == got["token_ids"]
    (same,) = as_json(capsys, "--model", folder, *base)["outputs"]
    assert same["token_ids"] == got["token_ids"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "/nowhere", "--prompt", "x"), "no such model directory: /nowhere"),
        (("--model", "", "--prompt", "x"), "no such model directory: ''"),
        (("--model", "EMPTY", "--prompt", "x"), "holds no config.json"),
        (("--model", "OTHER", "--prompt", "x"), "LlamaForCausalLM"),
        (("--model", "GOOD"), "--prompt"),
        (("--model", "GOOD", "--prompt", ""), "the prompt is empty"),
        (("--model", "GOOD", "--prompt", "a" * 400), "max_position_embeddings) is 64"),
        (("--model", "GOOD", "--prompt", "a\udcff"), "not valid UTF-8"),
        (("--model", "GOOD", "--token-ids", "1,320"), "token id 320 is out of range; "),
        (("--model", "GOOD", "--token-ids", "-1"), "token id -1 is out of range"),
        (("--model", "GOOD", "--token-ids", ""), "is empty"),
        (("--model", "GOOD", "--token-ids", "1,x"), "write whole numbers with commas"),
        (("--model", "BARE", "--prompt", "x"), "no tokenizer; give the prompt as --token-ids"),
        (("--model", "BARE", "--token-ids", "1", "--stop", "x"), "stop strings need a tokenizer"),
        (("--model", "GOOD", "--prompt", "x", "--temperature", "-1"), "temperature is -1.0"),
        (("--model", "GOOD", "--prompt", "x", "--top-p", "0"), "top_p is 0.0"),
        (("--model", "GOOD", "--prompt", "x", "--max-new-tokens", "0"), "max_new_tokens is 0"),
        (("--model", "GOOD", "--prompt", "x", "--max-new-tokens", "y"), "max-new-tokens"),
        (("--model", "GOOD", "--prompt", "x", "--chunk", "0"), "chunk is 0"),
        (("--model", "GOOD", "--prompt", "x", "--threads", "0"), "threads is 0"),
        (("--model", "GOOD", "--prompt", "x", "--stop", ""), "stop is"),
        (("--model", "GOOD", "--prompt", "x", "--dtype", "int8"), "dtype"),
    ],
)
def test_one_clear_line(
    words: tuple[str, ...],
    message: str,
    folder: Path,
    bare: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Proof 9: what the caller must change is told in one line, exit code 2, nothing on stdout."""
    other = tmp_path / "other"
    other.mkdir()
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (other / "config.json").write_text(json.dumps(raw))
    (tmp_path / "empty").mkdir()
    places = {"GOOD": folder, "BARE": bare, "OTHER": other, "EMPTY": tmp_path / "empty"}
    code, out, err = generate(capsys, *(places.get(w, w) for w in words))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("dsv4: error: ")
    assert message in err


def test_the_model_says_how_to_sample(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    asked = tmp_path / "generation_config.json"
    base = ("--model", tmp_path, "--prompt", "In the", "--max-new-tokens", "2")
    asked.write_text('{"do_sample": true, "top_p": 0.5, "top_k": null}')
    got = as_json(capsys, *base)["sampling"]
    assert (got["temperature"], got["top_p"], got["top_k"]) == (1.0, 0.5, 0)
    got = as_json(capsys, *base, "--temperature", "0.25")["sampling"]
    assert (got["temperature"], got["top_p"]) == (0.25, 0.5)
    told = generate(capsys, *base, "--temperature", "0.25")[2]
    assert "temperature 0.25 (given), top_p 0.5 (generation_config.json)" in told
    asked.write_text('{"do_sample": false, "temperature": 0.9}')
    assert as_json(capsys, *base)["sampling"]["temperature"] == 0.0
    assert "greedy" in generate(capsys, *base)[2]
    huge = "1" + "0" * 400
    cases = (
        ("[", "cannot be read as JSON"),
        ("[]", "holds a list"),
        ('{"do_sample": true, "top_p": 7}', "top_p is 7"),
        ('{"do_sample": true, "temperature": NaN}', "temperature is nan"),
        (f'{{"do_sample": true, "temperature": {huge}}}', "at most"),
    )
    for bad, word in cases:
        asked.write_text(bad)
        code, out, err = generate(capsys, *base)
        assert (code, out) == (2, "")
        assert word in err
        assert len(err) < 300


def test_the_tokenizer_does_not_judge_the_config(folder: Path, tmp_path: Path) -> None:
    """transformers refuses some configs that we read: an int for a float, the official spelling."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(
        '{"model_type": "deepseek_v4", "swiglu_limit": 10, "x": ['
    )
    words = tokenizer.load(tmp_path)
    assert words is not None
    assert words.decode(words.encode(TEXT)) == TEXT


def test_numbers_that_json_lacks_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = tiny.params(CFG)
    save(dataclasses.replace(params, norm=params.norm * torch.nan), CFG, tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    words = ("--model", tmp_path, "--token-ids", "5,6", "--json", "--logprobs", "1")
    code, out, err = generate(capsys, *words)
    assert (code, out) == (2, "")
    assert "logits after 2 tokens are not finite" in err


def test_no_memory_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object, **_more: object) -> None:
        raise RuntimeError("[enforce fail at alloc] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("registry.build.build", fails)
    code, out, err = generate(capsys, "--model", folder, "--prompt", "x")
    assert (code, out) == (2, "")
    assert err == "dsv4: error: not enough memory for this model and these lengths\n"
