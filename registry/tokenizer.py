"""Text to token ids and back, with the tokenizer files of a model directory. Never online."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.text import Detokenizer

SUFFIXES = (".json", ".model", ".txt", ".jinja")
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A transformers tokenizer, reduced to what generation needs."""

    def __init__(self, inner: Any) -> None:
        """`inner`: a `PreTrainedTokenizerBase`."""
        self._inner = inner
        self._size = max(inner.get_vocab().values(), default=-1) + 1  # ids may have gaps

    @property
    def bos(self) -> int | None:
        """The id that its files give as beginning of sequence, if they do."""
        return self._inner.bos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is added."""
        # Not verbose: it would warn of long texts, and length is for `Request.check` to refuse.
        return self._inner.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. Special tokens, and ids that the files do not know, have none.

        Bytes that are not text, among them characters cut short, become U+FFFD.
        """
        known = [i for i in ids if i < self._size]
        return self._inner.decode(
            known, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def stream(self) -> Detokenizer:
        """Text piece by piece, whole characters only."""
        return Detokenizer(self.decode)


def load(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None if it holds no tokenizer files.

    Raises ValueError if there are files and they cannot be read.
    """
    folder = Path(directory)
    if not any((folder / name).is_file() for name in FILES):
        return None
    from transformers import AutoTokenizer, logging  # late: slow, and not needed for token ids

    told = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn about parts of config.json that are ours to judge
    try:
        with tempfile.TemporaryDirectory() as alone:
            # Without config.json: transformers would judge it, and by other rules than ours.
            for file in folder.iterdir():
                if file.is_file() and file.name != "config.json" and file.suffix in SUFFIXES:
                    (Path(alone) / file.name).symlink_to(file.resolve())
            inner = AutoTokenizer.from_pretrained(
                alone, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"the tokenizer files in {folder} cannot be read: {error}") from error
    finally:
        logging.set_verbosity(told)
    return Tokenizer(inner)
