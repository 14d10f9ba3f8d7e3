"""Measures a checkpoint on held-out text: loss, perplexity, and how often drafts are accepted.

    python -m tools.score_tiny --corpus corpus.txt [--model registry/builtin]

Greedy acceptance of one draft: how often the draft module's most likely token is the backbone's,
given the same text. Both are also counted along text that the backbone itself would write, where
drafts are really used: windows of held-out text continued greedily.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4 import mtp
from dsv4.context import Ctx
from registry.build import build
from registry.model import CompiledModel
from tools.tiny_corpus import split
from tools.train_tiny import encode

LENGTH = 512  # tokens of a window


def held_out(model: CompiledModel, ids: Tensor) -> dict[str, float]:
    """Losses (nats per token) and greedy draft acceptance over consecutive windows."""
    ctx = Ctx(model.cfg)
    count = (ids.numel() - 1) // LENGTH
    totals = torch.zeros(3, dtype=torch.float64)
    for i in range(count):
        part = ids[i * LENGTH : (i + 1) * LENGTH + 1]
        main, draft = mtp.forward(model.params, part[None, :-1], ctx)
        target = part[1:]
        same = (main[0].argmax(-1) == draft[0].argmax(-1))[1:].double().mean()
        losses = (F.cross_entropy(main[0], target), F.cross_entropy(draft[0, 1:], target[1:]))
        totals += torch.stack((*losses, same)).double()
    main, draft, same = (totals / count).tolist()
    return {
        "tokens": count * LENGTH,
        "loss": main,
        "perplexity": math.exp(main),
        "draft loss": draft,
        "draft acceptance": same,
    }


def written(model: CompiledModel, ids: Tensor, prompts: int = 16, tokens: int = 64) -> float:
    """Greedy acceptance along text the model writes after held-out prompts of 64 tokens."""
    ctx = Ctx(model.cfg)
    starts = torch.linspace(0, ids.numel() - 65, prompts).long()
    text = ids[starts[:, None] + torch.arange(64)]
    for _ in range(tokens):
        text = torch.cat((text, mtp.forward(model.params, text, ctx)[0][:, -1:].argmax(-1)), 1)
    main, draft = mtp.forward(model.params, text, ctx)
    same = main.argmax(-1) == draft.argmax(-1)
    return same[:, 64:].double().mean().item()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("registry/builtin"))
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    from tokenizers import Tokenizer

    model = build(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    _, text = split(args.corpus.read_text(encoding="utf-8"))
    ids = encode(text, tokenizer)
    with torch.no_grad():
        scores = held_out(model, ids) | {"acceptance in written text": written(model, ids)}
    for name, value in scores.items():
        print(f"{name:28} {value:.4f}")


if __name__ == "__main__":
    main()
