"""The model that ships with the package: what it is, and that it learned what it claims."""

import math

import pytest
import torch
import torch.nn.functional as F

from dsv4 import mtp
from dsv4.config import Kind, Router, preset
from dsv4.context import Ctx
from registry import builtin_model, cli, tokenizer
from registry.build import build
from registry.model import CompiledModel

pytestmark = pytest.mark.e2e

# Genesis 40, Psalm 22 and Genesis 20 of the Authorized Version: chapters held out of training.
HELD_OUT = (
    "And it came to pass after these things, that the butler of the king of Egypt and his "
    "baker had offended their lord the king of Egypt.\nAnd Pharaoh was wroth against two of "
    "his officers, against the chief of the butlers, and against the chief of the "
    "bakers.\nAnd he put them in ward in the house of the captain of the guard, into the "
    "prison, the place where Joseph was bound.\nAnd the captain of the guard charged Joseph "
    "with them, and he served them: and they "
    "continued a season in ward.",
    "My God, my God, why hast thou forsaken me? why art thou so far from helping me, and from the "
    "words of my roaring?\nO my God, I cry in the day time, but thou hearest not; and in the night "
    "season, and am not silent.\nBut thou art holy, O thou that inhabitest the praises of Israel.\n"
    "Our fathers trusted in thee: they trusted, and thou didst deliver them.",
    "And Abraham journeyed from thence toward the south country, and dwelled between Kadesh and "
    "Shur, and sojourned in Gerar.\nAnd Abraham said of Sarah his wife, She is my sister: and "
    "Abimelech king of Gerar sent, and took Sarah.\nBut God came to Abimelech in a dream by night, "
    "and said to him, Behold, thou art but a dead man, for the woman which thou hast taken; for "
    "she is a man's wife.",
)


@pytest.fixture(scope="module")
def shipped() -> CompiledModel:
    return build(builtin_model.path())


def test_every_kind_of_layer_is_there(shipped: CompiledModel) -> None:
    cfg = shipped.cfg
    assert cfg == preset("tiny")
    assert {(p.kind, p.router) for p in cfg.plans} == {
        (Kind.WINDOW, Router.HASH),
        (Kind.CSA, Router.HASH),
        (Kind.HCA, Router.TOPK),
        (Kind.CSA, Router.TOPK),
    }
    assert cfg.mtp == 1
    assert cfg.index_heads >= 16
    assert shipped.draft is not None


def test_it_is_small_and_complete() -> None:
    folder = builtin_model.path()
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 12e6
    words = tokenizer.load(folder)
    assert words is not None
    text = "In the beginning, 創世記 \n\t<x>"
    assert words.decode(words.encode(text)) == text


def test_it_learned_the_language(shipped: CompiledModel) -> None:
    """Perplexity per token far below the 2,048 of chance and the hundreds of word frequencies."""
    words = tokenizer.load(builtin_model.path())
    assert words is not None
    losses, agreed = [], []
    for passage in HELD_OUT:
        ids = torch.tensor([[0, *words.encode(passage)]])
        with torch.no_grad():
            main, draft = mtp.forward(shipped.params, ids, Ctx(shipped.cfg))
        losses.append(F.cross_entropy(main[0, :-1], ids[0, 1:], reduction="none"))
        agreed.append((main.argmax(-1) == draft.argmax(-1))[0, 1:])
    perplexity = math.exp(torch.cat(losses).mean())
    assert perplexity < 21
    assert torch.cat(agreed).double().mean() > 0.7  # greedy acceptance of one draft


def test_the_front_page_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--prompt", "In the beginning", "--max-new-tokens", "60"]
    assert cli.main(words) == 0
    text, told = capsys.readouterr()
    known = {w for passage in HELD_OUT for w in passage.lower().split()}
    said = text.lower().split()
    assert len(said) > 25
    assert sum(w in known for w in said) > len(said) / 4
    assert "tokens/s" in told
    assert cli.main(words) == 0
    assert capsys.readouterr().out == text  # the same seed writes the same text
