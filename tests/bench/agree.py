"""Whether all contestants compute the same model, before any of them is timed.

The distance of two rows of logits is |a - b| / |b| after taking each row's mean off (a common
shift changes no probability). The yardstick is our model in float32; a contestant may be as far
from it as ours in bfloat16 is, times a few. Since 4 x that is still far less than what another
computation gives, the check also prints two of those: the same prompt with its first half reversed,
and caches rounded where the contestant does not round them.
"""

import dataclasses

import torch
from torch import Tensor

ALLOWED = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far one contestant is from the yardstick; worst of its rows."""

    distance: float
    allowed: float
    logprob: float  # largest difference of a log-probability
    same_argmax: int  # rows whose most likely token is the same
    rows: int
    rounded: bool  # whether the yardstick rounds its caches as the contestant does

    @property
    def holds(self) -> bool:
        """Whether the contestant may be timed."""
        return self.distance <= self.allowed

    def line(self) -> str:
        """For the table."""
        verdict = "agrees" if self.holds else "COMPUTES SOMETHING ELSE, not timed"
        caches = ", caches rounded to fp8" if self.rounded else ""
        return (
            f"distance {self.distance:.4f} (allowed {self.allowed:.4f}{caches}), largest "
            f"difference of a log-probability {self.logprob:.3f}, same most likely token in "
            f"{self.same_argmax} of {self.rows}: {verdict}"
        )


def distance(a_NV: Tensor, b_NV: Tensor) -> float:
    """Largest relative distance of rows, up to a shift of each."""
    a = a_NV - a_NV.mean(-1, keepdim=True)
    b = b_NV - b_NV.mean(-1, keepdim=True)
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())


def compare(logits_NV: Tensor, yardstick_NV: Tensor, noise: float, rounded: bool) -> Agreement:
    """`noise`: the distance of our own bfloat16 model from the same yardstick."""
    if logits_NV.shape != yardstick_NV.shape or not bool(torch.isfinite(logits_NV).all()):
        apart = float("inf")
        return Agreement(
            distance=apart,
            allowed=ALLOWED * noise,
            logprob=apart,
            same_argmax=0,
            rows=len(yardstick_NV),
            rounded=rounded,
        )
    difference = logits_NV.log_softmax(-1) - yardstick_NV.log_softmax(-1)
    return Agreement(
        distance=distance(logits_NV, yardstick_NV),
        allowed=ALLOWED * noise,
        logprob=float(difference.abs().max()),
        same_argmax=int((logits_NV.argmax(-1) == yardstick_NV.argmax(-1)).sum()),
        rows=len(yardstick_NV),
        rounded=rounded,
    )
