"""The 57 steps of one request: number, lanes and name. Source: the project's sequence57 spec.

The first lane of a step is the one that does it in a single process, where there is no device lane
and no second process to hand over to.
"""

from types import MappingProxyType
from typing import NamedTuple

LANES = MappingProxyType(
    {
        "C": "client",
        "T": "tokenizer and front end",
        "E": "engine core",
        "B": "scheduler",
        "K": "page manager",
        "W": "worker",
        "R": "model runner",
        "M": "model",
        "P": "parallel state",
        "N": "device",
    }
)


class Step(NamedTuple):
    """One of the 57, or `FORWARD`."""

    number: int
    lanes: str  # in the order in which they take part
    name: str

    @property
    def lane(self) -> str:
        """The lane that does it in a single process."""
        return self.lanes[0]

    @property
    def label(self) -> str:
        """Its number for people."""
        return str(self.number) if self.number != FORWARD else "21-33"


FORWARD = 0  # steps 21 to 33 where they cannot be told apart, or as a whole

_ROWS = (
    Step(FORWARD, "M", "forward as a whole"),
    Step(1, "WN", "device and communication library come up"),
    Step(2, "EWP", "processes and the world group are started"),
    Step(3, "WE", "model is recognised: the registry"),
    Step(4, "WRM", "weights are loaded"),
    Step(5, "P", "groups of cards"),
    Step(6, "WRN", "pre-compile and graph capture"),
    Step(7, "WR", "first expert placement"),
    Step(8, "WK", "pools are allocated"),
    Step(9, "EC", "ready"),
    Step(10, "CT", "request arrives"),
    Step(11, "T", "text to tokens"),
    Step(12, "T", "image pre-processing"),
    Step(13, "TE", "in the engine's queue"),
    Step(14, "B", "scheduling decision"),
    Step(15, "BK", "prefix lookup"),
    Step(16, "K", "hit: pages are reused"),
    Step(17, "B", "miss: chunking"),
    Step(18, "KB", "pages allocated, table written"),
    Step(19, "EW", "plan is dispatched"),
    Step(20, "R", "inputs are prepared"),
    Step(21, "MN", "mHC pre, norm"),
    Step(22, "MP", "SP gather"),
    Step(23, "MN", "Q/KV projections, rope, window write"),
    Step(24, "MN", "compressor: state and compressed rows"),
    Step(25, "MN", "indexer: keys, queries, top-k"),
    Step(26, "MN", "attention on chosen blocks"),
    Step(27, "MP", "inverse rope and head swap"),
    Step(28, "MP", "output projection and SP scatter"),
    Step(29, "MN", "mHC post, second mHC pre, norm"),
    Step(30, "M", "router"),
    Step(31, "MPN", "MoE: dispatch, FFN, combine"),
    Step(32, "M", "shared expert, mHC post, end of layer"),
    Step(33, "MP", "final norm, logits"),
    Step(34, "R", "masks, temperature, filters"),
    Step(35, "R", "sampling"),
    Step(36, "RM", "draft module is primed"),
    Step(37, "RW", "result leaves the device"),
    Step(38, "EK", "engine books the step"),
    Step(39, "T", "detokenise"),
    Step(40, "C", "first token at the client"),
    Step(41, "E", "stop check"),
    Step(42, "B", "decode batch is planned"),
    Step(43, "K", "pages for 1 token and its drafts"),
    Step(44, "EW", "decode batch is dispatched"),
    Step(45, "RN", "decode inputs, captured graph"),
    Step(46, "RM", "draft module proposes"),
    Step(47, "M", "target forward: 21-33 as a whole"),
    Step(48, "R", "verification"),
    Step(49, "RK", "state is committed or rolled back"),
    Step(50, "ETC", "increment is handed on"),
    Step(51, "E", "end reached"),
    Step(52, "K", "pages released"),
    Step(53, "RP", "expert heat"),
    Step(54, "RPN", "replan and move experts"),
    Step(55, "KP", "KV moves between instances"),
    Step(56, "E", "metrics"),
    Step(57, "CEW", "health probe"),
)

STEPS = MappingProxyType({step.number: step for step in _ROWS})

# Of the steps that a timeline is about, what a single process with the eager backend has not.
NOT_HERE = MappingProxyType(
    {
        5: "one rank: every group is this process",
        6: "eager: nothing is compiled or captured",
        7: "one rank: every expert is in its place",
        22: "one rank holds all rows",
        27: "the head swap: one rank holds all heads (rope is undone here)",
        28: "the scatter: one rank keeps all rows (the projection is here)",
        45: "the graph: eager has none (inputs are prepared here)",
    }
)

# What the steps of a prompt are called where a request decodes. `FORWARD` is 47 as a whole.
_DECODE = MappingProxyType({FORWARD: 47, 14: 42, 17: 42, 18: 43, 19: 44, 20: 45, 36: 46, 38: 49})


def as_decode(number: int, drafts: int) -> int:
    """The number of a part of a step for a request that decodes and had `drafts` to verify."""
    if number == 35 and drafts:
        return 48
    return _DECODE.get(number, number)


FORWARD_STEPS = frozenset({FORWARD, *range(21, 34)})
