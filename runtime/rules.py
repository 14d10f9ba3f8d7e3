"""The limits a scheduler keeps, and the refusal of an engine that has too much to do."""

import dataclasses

from runtime.drafts import Drafts
from runtime.ranges import whole

CHUNK = 512  # most prompt tokens of one request per step, where nobody says otherwise


class Overloaded(ValueError):
    """The queue is full: the request was not taken. Try again later, or elsewhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """How a scheduler fills its steps."""

    chunk: int  # most prompt tokens of one request per step
    budget: int  # most tokens per step
    max_waiting: int | None = None  # requests that may wait; None: any number
    drafts: Drafts | None = None  # None: no drafts

    def check(self, slots: int) -> None:
        """Raise ValueError for rules under which `slots` requests could not all run."""
        whole("chunk", self.chunk, 1)
        rows = 1 + self.depth
        if self.budget < slots * rows:
            told = f" with {self.depth} drafts each" if self.depth else ""
            raise ValueError(
                f"budget is {self.budget} tokens per step; {slots} requests{told} may run at "
                f"once, so it must be at least {slots * rows}"
            )
        if self.max_waiting is not None:
            whole("max_waiting", self.max_waiting, 1)  # all wait for the next step, at least

    @property
    def depth(self) -> int:
        """Drafts per step."""
        return self.drafts.depth if self.drafts else 0
