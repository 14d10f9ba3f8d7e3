"""How many drafts to propose, and how well they do. Host numbers only.

A draft costs time whether it is accepted or not. Its price, in plain steps of the model, is one run
of the draft module and one more row in the step that verifies it. A step with k drafts costs
1 + k * price and brings 1 + accepted tokens, so drafts pay where the accepted are at least
price * proposed.
"""

import dataclasses
import logging

from runtime.ranges import real, whole

RULES = ("coupled", "ratio")
MOST = 8  # drafts in a step
ENOUGH = 200  # first drafts that an acceptance is judged by

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
    """How a model's draft module is used. The rules: `dsv4/verify.py`.

    The floor lies between what broken drafts were seen to reach (0 to 0.1 of first drafts) and
    working ones (0.57 and up), over 4 standard deviations of `ENOUGH` samples from both.
    """

    depth: int = 3  # drafts in a step, at most
    rule: str = "coupled"  # the tokens of undrafted decoding; "ratio": accepts the most
    floor: float = 0.2  # share of first drafts accepted, below which the engine warns
    adaptive: bool = True  # stop drafting for a request while it does not pay
    window: int = 32  # verified steps that are judged together
    rest: int = 64  # tokens without drafts, doubled each time in a row
    longest_rest: int = 1024
    draft_cost: float | None = None  # of a run of the module in plain steps; None: an estimate
    row_cost: float = 0.05  # of one more row in a step, in plain steps

    def __post_init__(self) -> None:
        """Raise ValueError naming the field, the value and what is allowed."""
        whole("depth", self.depth, 1, MOST)
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r:.60}; it must be one of {', '.join(RULES)}")
        real("floor", self.floor, 0, 1)
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive is {self.adaptive!r:.60}; it must be True or False")
        whole("window", self.window, 1)
        whole("rest", self.rest, 1)
        whole("longest_rest", self.longest_rest, self.rest)
        if self.draft_cost is not None:
            real("draft_cost", self.draft_cost, 0, 1)
        real("row_cost", self.row_cost, 0, 1)

    def price(self, layers: int) -> float:
        """Cost of one draft in plain steps of a model with `layers` backbone layers.

        Estimated as one layer and the head, against all layers and the head, the head as long as a
        layer. A large head against small layers makes it more: 0.12 of the bytes read, not 0.045,
        for Flash at batch 1. Then give draft_cost.
        """
        module = 2 / (layers + 1) if self.draft_cost is None else self.draft_cost
        return module + self.row_cost


@dataclasses.dataclass(kw_only=True)
class DraftRecord:
    """The drafts of one request, and whether they pay.

    A function of the request's own steps since it started, never of time or of other requests. A
    request that starts over starts a new record.
    """

    drafts: Drafts
    price: float  # see Drafts.price
    steps: int = 0  # verified in this window
    proposed: int = 0
    accepted: int = 0
    resting: int = 0  # tokens still to come without drafts
    pause: int = 0  # length of the last rest; 0 if drafts paid after it

    def next_depth(self, room: int) -> int:
        """Drafts for the next step of a request that may still take `room` tokens.

        A step brings one token more than it has drafts, so at most room - 1 can be of use.
        """
        return 0 if self.resting else max(0, min(self.drafts.depth, room - 1))

    def verified(self, proposed: int, accepted: int) -> None:
        """Take note of one step; a plain one has proposed 0."""
        _check(proposed, accepted)
        if self.resting:
            self.resting = max(0, self.resting - 1 - accepted)
        elif proposed and self.drafts.adaptive:
            self.steps += 1
            self.proposed += proposed
            self.accepted += accepted
            if self.steps == self.drafts.window:
                self._judge()

    def _judge(self) -> None:
        if self.accepted < self.price * self.proposed:
            longer = 2 * self.pause if self.pause else self.drafts.rest
            self.resting = self.pause = min(longer, self.drafts.longest_rest)
        else:
            self.pause = 0
        self.steps = self.proposed = self.accepted = 0


class Acceptance:
    """What became of the drafts of an engine, by their position in the step."""

    def __init__(self, drafts: Drafts, price: float) -> None:
        """See `DraftRecord`."""
        self._drafts = drafts
        self._price = price
        self._recent = self._recent_accepted = 0  # first drafts since the last verdict
        self._warned = False
        self.steps = 0  # with at least one draft
        self.proposed = [0] * drafts.depth
        self.reached = [0] * drafts.depth  # proposed, and all before it accepted
        self.accepted = [0] * drafts.depth

    def verified(self, proposed: int, accepted: int) -> None:
        """Take note of one step of one request; warn once if first drafts stay under the floor."""
        _check(proposed, accepted, most=self._drafts.depth)
        if proposed == 0:
            return
        self.steps += 1
        for i in range(proposed):
            self.proposed[i] += 1
            self.reached[i] += i <= accepted
            self.accepted[i] += i < accepted
        self._recent += 1
        self._recent_accepted += accepted > 0
        if self._recent == ENOUGH:
            if not self._warned and self._recent_accepted < self._drafts.floor * ENOUGH:
                self._warned = True
                log.warning("%s", self._told())
            self._recent = self._recent_accepted = 0

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the drafts proposed at each position, those accepted; 0 where there were none."""
        return tuple(map(_share, self.accepted, self.proposed))

    @property
    def conditional(self) -> tuple[float, ...]:
        """As `shares`, of the drafts before which all others in the step were accepted."""
        return tuple(map(_share, self.accepted, self.reached))

    @property
    def mean_length(self) -> float:
        """Tokens per step that verified drafts; 1 is what a plain step brings."""
        return 1 + _share(sum(self.accepted), self.steps)

    @property
    def paying_depth(self) -> int:
        """Leading positions at which a draft is worth its price; 0 before any was proposed."""
        paying = 0
        while (
            paying < self._drafts.depth
            and self.proposed[paying]
            and self.shares[paying] >= self._price
        ):
            paying += 1
        return paying

    def table(self) -> str:
        """The counts for people, one line per position, and which drafts were worth it."""
        if self.steps == 0:
            return "no drafts were verified yet"
        lines = ["draft  proposed  accepted   share  if reached"]
        rows = zip(self.proposed, self.accepted, self.shares, self.conditional, strict=True)
        for i, (proposed, accepted, share, conditional) in enumerate(rows, 1):
            lines.append(f"{i:5}  {proposed:8}  {accepted:8}  {share:6.1%}  {conditional:10.1%}")
        paying = f"depth {self.paying_depth} does" if self.paying_depth else "none does"
        lines.append(
            f"{self.mean_length:.2f} tokens per step with drafts; a draft pays from a share of "
            f"{self._price:.1%}: {paying}"
        )
        return "\n".join(lines)

    def _told(self) -> str:
        share = self._recent_accepted / ENOUGH
        return (
            f"drafts are hardly ever accepted: {share:.1%} of the last {ENOUGH} first drafts, and "
            f"the floor is {self._drafts.floor:.1%}\n{self.table()}\n"
            f"The tokens are right, but decoding is not faster for it. Most likely the draft "
            f"module's weights (mtp.*) belong to another checkpoint than the backbone's or were "
            f"quantised differently, or its state is wrong. Compare them, or decode without drafts."
        )


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0


def _check(proposed: int, accepted: int, most: int = MOST) -> None:
    if not 0 <= accepted <= proposed <= most:
        raise ValueError(
            f"{accepted} of {proposed} drafts were accepted; it must be 0 <= accepted <= proposed "
            f"<= {most}"
        )
