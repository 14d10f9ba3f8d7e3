"""What the next step does: a value that can be logged, replayed and tested.

A plan holds all that a step needs besides parameters and pools: it can be run a second time on
pools in the same state, and gives the same.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from runtime.pages import Held
from runtime.parcel import Parcel

if TYPE_CHECKING:
    from runtime.request import Proposal, Sampled, Sampling


class Work(NamedTuple):
    """Tokens `start` .. `start + len(tokens) - 1` of one request, and the drafts behind them."""

    id: int  # of the request
    start: int  # position of tokens[0]
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]  # proposed next tokens, to be verified; none inside a prompt
    wanted: int  # how many of the last rows have their logits wanted: 0 inside a prompt
    slot: int
    following: int  # the token after the last one where it is known, inside a prompt; else -1
    propose: int  # how many drafts to propose for the next step
    reach: int  # positions below it have pages
    sampling: "Sampling"
    logprobs: int | None
    q: Any = None  # [drafts, V] what the drafts were drawn from, where verification needs it

    @property
    def rows(self) -> int:
        """Rows in the step."""
        return len(self.tokens) + len(self.drafts)


class Plan(NamedTuple):
    """One step."""

    work: tuple[Work, ...]
    history: np.ndarray  # [len(work), Q] history page of each page_tokens positions
    window: np.ndarray  # [len(work), Q'] window page; column = page index modulo Q'
    admitted: tuple[int, ...] = ()  # requests that got a slot, in order
    preempted: tuple[int, ...] = ()  # requests that lost theirs
    imports: tuple[tuple[int, Held, Parcel], ...] = ()  # state to put in before the step

    @property
    def decode(self) -> bool:
        """Whether every request computes its newest token, and its drafts, and nothing else."""
        return all([len(w.tokens) == 1 and w.wanted for w in self.work])

    @property
    def tokens(self) -> int:
        """Rows in the step."""
        return sum(len(w.tokens) + len(w.drafts) for w in self.work)


class Ran(NamedTuple):
    """What a step computed for one work: the tokens that hold, and drafts of the next ones."""

    sampled: Sequence["Sampled"] = ()
    proposal: "Proposal | None" = None
