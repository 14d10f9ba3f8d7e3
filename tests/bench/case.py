"""What is timed: a prompt of N tokens, or one token for each of B sequences that hold C tokens."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    decode: bool
    batch: int  # sequences
    tokens: int  # of the prompt, or of the context before the new token

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"decode:{self.batch}x{self.tokens}" if self.decode else f"prefill:{self.tokens}"

    @property
    def title(self) -> str:
        """For the table."""
        if not self.decode:
            return f"prefill {self.tokens:,}"
        return f"decode, batch {self.batch}, context {self.tokens:,}"

    @property
    def step_tokens(self) -> int:
        """Tokens that one step computes."""
        return self.batch if self.decode else self.tokens


# Positions of a decode case run from its context on; all groups of 4 tokens close once in a run.
STEPS = 4
SHORT = ("prefill:512", "decode:1x512", "decode:8x512")
DEFAULT = (
    "prefill:512",
    "prefill:2048",
    "decode:1x512",
    "decode:8x512",
    "decode:32x512",
    "decode:1x8192",
)
FULL = (*DEFAULT, "decode:8x8192", "decode:32x8192")


def parse(text: str) -> Case:
    """A case from `prefill:TOKENS` or `decode:BATCHxCONTEXT`. Raises ValueError."""
    kind, _, sizes = text.partition(":")
    batch, _, tokens = sizes.rpartition("x") if kind == "decode" else ("1", "x", sizes)
    if kind not in ("prefill", "decode") or not (batch.isdigit() and tokens.isdigit()):
        raise ValueError(f"case {text!r}; write prefill:TOKENS or decode:BATCHxCONTEXT")
    case = Case(decode=kind == "decode", batch=int(batch), tokens=int(tokens))
    if case.batch < 1 or case.tokens < 1 or (case.decode and case.tokens % 16):
        raise ValueError(f"case {text!r}; sizes are at least 1, a context is a multiple of 16")
    return case


def longest(cases: list[Case]) -> int:
    """Tokens of the longest sequence that any case reaches, with room for the timed steps."""
    return max(c.tokens + 256 * c.decode for c in cases)
