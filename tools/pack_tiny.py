"""Turns a training state into the built-in checkpoint that ships with the package.

    python -m tools.pack_tiny --state run/state.pt --tokenizer DIR --out registry/builtin

Official tensor names, released precisions (bfloat16; float32 where released checkpoints have it), a
config.json in the released spelling, and the tokenizer's files. `tools.score_tiny` measures it.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch

from dsv4 import config, config_json, table
from dsv4.params import Params
from dsv4.tree import from_paths, paths
from runtime.save import save

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# A model this small repeats itself when it is greedy.
GENERATION = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def released(params: Params, cfg: config.Config) -> Params:
    """Parameters rounded to the precision in which released checkpoints store them."""
    named = paths(params)
    spec = paths(table.spec(cfg))
    rounded = {
        name: named[name].to(torch.bfloat16).to(leaf.dtype(torch.bfloat16))
        if leaf.stored not in ("f32", "i64")
        else named[name]
        for name, leaf in spec.items()
    }
    return from_paths(params, rounded)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cfg = config.preset("tiny")
    named = torch.load(args.state)["params"]
    params = released(from_paths(table.spec(cfg), named), cfg)
    args.out.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("*.safetensors"):
        old.unlink()
    save(params, cfg, args.out, dtype=torch.bfloat16)
    texts = {"config.json": config_json.write(cfg), "generation_config.json": GENERATION}
    for name, content in texts.items():
        text = json.dumps(content, indent=2) + "\n"
        (args.out / name).write_text(text, encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(args.tokenizer / name, args.out / name)
    total = sum(f.stat().st_size for f in args.out.iterdir())
    print(f"{args.out}: {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
