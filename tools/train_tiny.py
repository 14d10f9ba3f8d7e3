"""Trains the built-in model with this stack itself: `step`, `draft` and autograd.

    python -m tools.train_tiny --corpus corpus.txt --tokenizer DIR --minutes 60 --out DIR

The loss is the next-token cross entropy of the backbone plus 0.3 times the draft module's. Expert
balance is kept without an auxiliary loss: after each step the router bias moves by a fixed amount
towards the experts that got fewer tokens than the mean. The learning rate follows the clock (linear
warm-up, then cosine to a tenth), so the run ends after `--minutes` with a finished schedule.
`state.pt` in the output directory is rewritten every few minutes and `--resume` continues from it.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4 import config, model, mtp, table
from dsv4.batch import Batch
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools
from dsv4.tree import from_paths, leaves, paths
from tools.tiny_corpus import split

DRAFT_WEIGHT = 0.3
BIAS_STEP = 1e-3


def encode(text: str, tokenizer: Any) -> Tensor:
    """Token ids of whole chapters, each between BOS (0) and EOS (1). [tokens]"""
    ids: list[int] = []
    for chapter in text.strip().split("\n\n"):
        ids += [0, *tokenizer.encode(chapter, add_special_tokens=False).ids, 1]
    return torch.tensor(ids)


def losses(
    params: Params, pools: Pools, batch: Batch, target_T: Tensor, ctx: Ctx
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross entropy of the backbone and of the draft module, and the expert load [layers, X].

    The last layer of the load is the draft module's. The draft's position 0 has no streams before
    it and is left out.
    """
    out, pools = model.step(params, pools, batch, ctx)
    drafted, _ = mtp.draft(params, pools, out.hidden.roll(1, 0), batch, ctx)
    main = F.cross_entropy(out.logits, target_T)
    each = F.cross_entropy(drafted.logits, target_T, reduction="none")
    real = (batch.positions > 0).to(each.dtype)
    return main, (each * real).sum() / real.sum(), torch.cat((out.load, drafted.load))


def rebalance(params: Params, load_LX: Tensor) -> None:
    """Move each router bias by BIAS_STEP towards the mean load, in place."""
    assert params.mtp is not None
    blocks = (*params.layers, params.mtp.block)
    for block, load in zip(blocks, load_LX.float(), strict=True):
        if block.ffn.bias is not None:
            block.ffn.bias.data += BIAS_STEP * torch.sign(load.mean() - load)


def optimiser(params: Params, rate: float) -> torch.optim.Optimizer:
    """AdamW; decay on matrices only. Router biases are moved by `rebalance`, not by gradients."""
    named = paths(params)
    trained = {n: t for n, t in named.items() if t.is_floating_point() and not n.endswith("bias")}
    for t in trained.values():
        t.requires_grad_()
    # Hyper-connections and norms steer whole streams: they are not pulled towards zero.
    decays = {n for n, t in trained.items() if t.dim() > 1 and "hc_" not in n and "ape" not in n}
    groups = [
        {"params": [t for n, t in trained.items() if n in decays], "weight_decay": 0.1},
        {"params": [t for n, t in trained.items() if n not in decays], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-9, fused=True)


def windows(ids: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` random windows of length + 1 tokens."""
    start = torch.randint(0, ids.numel() - length - 1, (count, 1), generator=generator)
    return ids[start + torch.arange(length + 1)]


class Trainer:
    """One training run: parameters, optimiser, data, clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the data and start from fresh parameters, or from `state.pt` with --resume."""
        from tokenizers import Tokenizer

        self.args, self.cfg = args, config.preset("tiny")
        self.ctx = Ctx(self.cfg)
        tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
        self.train_ids, self.held_ids = (
            encode(t, tokenizer) for t in split(args.corpus.read_text(encoding="utf-8"))
        )
        self.generator = torch.Generator().manual_seed(args.seed)
        self.params = table.init(self.cfg, self.generator)
        self.step, self.spent_s = 0, 0.0
        self.log: list[dict[str, float]] = []
        self.state = args.out / "state.pt"
        saved = torch.load(self.state) if args.resume else None
        if saved is not None:
            self.params = from_paths(self.params, saved["params"])
            self.step, self.spent_s, self.log = saved["step"], saved["spent_s"], saved["log"]
            self.generator.set_state(saved["generator"])
        self.optimiser = optimiser(self.params, args.rate)
        if saved is not None:
            self.optimiser.load_state_dict(saved["optimiser"])
        shape = (args.batch, args.length)
        self.batch, self.pools = model.fresh(self.params, torch.zeros(shape).long(), self.ctx)
        self.losses = torch.compile(losses, dynamic=False) if args.compile else losses

    def rate(self, done: float) -> float:
        """Learning rate after the fraction `done` of the time."""
        warm = min(1.0, (self.step + 1) / 100)
        return self.args.rate * warm * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))

    def once(self, done: float) -> tuple[float, float]:
        """One update. Returns both losses."""
        ids = windows(self.train_ids, self.args.length, self.args.batch, self.generator)
        batch = dataclasses.replace(self.batch, tokens=ids[:, :-1].reshape(-1))
        main, draft, load = self.losses(
            self.params, self.pools, batch, ids[:, 1:].reshape(-1), self.ctx
        )
        (main + DRAFT_WEIGHT * draft).backward()
        trained = [t for t in leaves(self.params) if t.grad is not None]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate(done)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        rebalance(self.params, load)
        self.step += 1
        return main.item(), draft.item()

    def held_out(self, most: int | None = None) -> tuple[float, float]:
        """Mean losses over the held-out text in consecutive windows."""
        n, b = self.args.length, self.args.batch
        count = (self.held_ids.numel() - 1) // (n * b)
        totals = torch.zeros(2)
        count = min(count, most or count)
        with torch.no_grad():
            for i in range(count):
                start = (i * b + torch.arange(b)[:, None]) * n
                ids = self.held_ids[start + torch.arange(n + 1)]
                batch = dataclasses.replace(self.batch, tokens=ids[:, :-1].reshape(-1))
                main, draft, _ = losses(
                    self.params, self.pools, batch, ids[:, 1:].reshape(-1), self.ctx
                )
                totals += torch.stack((main, draft))
        main, draft = (totals / count).tolist()
        return main, draft

    def save(self) -> None:
        """Write everything needed to resume, atomically."""
        kept = {
            "params": {n: t.detach() for n, t in paths(self.params).items()},
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
            "spent_s": self.spent_s,
            "log": self.log,
        }
        torch.save(kept, self.state.with_suffix(".tmp"))
        self.state.with_suffix(".tmp").replace(self.state)
        (self.args.out / "log.json").write_text(json.dumps(self.log, indent=1))

    def run(self) -> None:
        """Train until the time is up."""
        begin, budget = time.monotonic() - self.spent_s, self.args.minutes * 60
        saved = time.monotonic()
        while (done := (time.monotonic() - begin) / budget) < 1:
            main, draft = self.once(done)
            self.spent_s = time.monotonic() - begin
            if self.step % 20 == 0:
                print(f"{self.step} {self.spent_s:.0f}s loss {main:.3f} draft {draft:.3f}")
            if time.monotonic() - saved > self.args.save_minutes * 60:
                self.report(most=4)
                self.save()
                saved = time.monotonic()
        self.report()
        self.save()

    def report(self, most: int | None = None) -> None:
        """Measure on held-out text and log it."""
        main, draft = self.held_out(most)
        tokens = self.step * self.args.batch * self.args.length
        self.log.append(
            {"step": self.step, "tokens": tokens, "s": self.spent_s, "loss": main, "draft": draft}
        )
        print(
            f"held out after {self.step} steps, {tokens} tokens, {self.spent_s:.0f} s: "
            f"loss {main:.4f} (perplexity {math.exp(main):.2f}), draft {draft:.4f}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--save-minutes", type=float, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    Trainer(args).run()


if __name__ == "__main__":
    main()
