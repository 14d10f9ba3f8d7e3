"""What the next step does: a value that can be logged, replayed and tested."""

import dataclasses

from runtime.request import Request


@dataclasses.dataclass(frozen=True)
class Work:
    """Tokens `start` .. `start + count - 1` of one request."""

    request: Request
    start: int
    count: int
    wanted: int  # how many of the last tokens have their logits wanted: 0 inside a prompt


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step."""

    work: tuple[Work, ...]

    @property
    def decode(self) -> bool:
        """Whether every request computes exactly its newest token."""
        return all(w.count == 1 and w.wanted for w in self.work)

    @property
    def tokens(self) -> int:
        """Tokens in the step."""
        return sum(w.count for w in self.work)
