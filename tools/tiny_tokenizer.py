"""The tokenizer of the built-in tiny model: a byte-level BPE with 2,048 entries.

    python -m tools.tiny_tokenizer --corpus corpus.txt --out tokenizer/ [--ids ids/]

It is trained on the training part of the corpus only (see `tools.tiny_corpus.split`). The special
tokens have DeepSeek V4's names and ids. Every byte has an entry of its own and nothing is
normalized, so encoding and decoding any text gives it back unchanged. BOS and EOS are never added
by the tokenizer itself.

`--out` receives `tokenizer.json` and `tokenizer_config.json`, which
`transformers.AutoTokenizer.from_pretrained` loads. With `--ids`, the encoded corpus is written to
that folder as `train.pt` and `heldout.pt`: one int32 vector each, every chapter preceded by BOS
and followed by EOS.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny_corpus import split, split_chapters

VOCAB_SIZE = 2048
MODEL_MAX_LENGTH = 4096

BOS = "<｜begin▁of▁sentence｜>"  # noqa: RUF001
EOS = "<｜end▁of▁sentence｜>"  # noqa: RUF001
PAD = "<｜▁pad▁｜>"  # noqa: RUF001
SPECIAL_TOKENS = [BOS, EOS, PAD]  # an entry's place here is its id
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "add_bos_token": False,
    "add_eos_token": False,
    "model_max_length": MODEL_MAX_LENGTH,
    "clean_up_tokenization_spaces": False,
}


def train_tokenizer(train_text: str) -> Tokenizer:
    """Learn the merges from the training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(split_chapters(train_text), trainer=trainer)

    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the vocabulary has {tokenizer.get_vocab_size()} entries")
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    if ids != [BOS_ID, EOS_ID, PAD_ID]:
        raise ValueError(f"the special tokens have ids {ids}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files that `AutoTokenizer.from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(TOKENIZER_CONFIG, ensure_ascii=False, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def encode_chapters(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    """The token ids of a text in int32, each chapter between BOS and EOS."""
    ids: list[int] = []
    for chapter in split_chapters(text):
        encoded = tokenizer.encode(chapter, add_special_tokens=False).ids
        if tokenizer.decode(encoded, skip_special_tokens=False) != chapter:
            raise ValueError(f"the round trip changed the chapter beginning {chapter[:60]!r}")
        ids += [BOS_ID, *encoded, EOS_ID]
    return torch.tensor(ids, dtype=torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model's tokenizer.")
    parser.add_argument("--corpus", type=Path, required=True, help="from tools.tiny_corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer's files")
    parser.add_argument("--ids", type=Path, help="folder for train.pt and heldout.pt")
    arguments = parser.parse_args()

    train_text, held_out_text = split(arguments.corpus.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(train_text)
    save_tokenizer(tokenizer, arguments.out)

    for name, text in (("train", train_text), ("heldout", held_out_text)):
        ids = encode_chapters(tokenizer, text)
        print(f"{name}: {ids.numel()} tokens, {len(text) / ids.numel():.3f} characters per token")
        if arguments.ids is not None:
            arguments.ids.mkdir(parents=True, exist_ok=True)
            torch.save(ids, arguments.ids / f"{name}.pt")


if __name__ == "__main__":
    main()
