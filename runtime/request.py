"""What a caller asks for, and how far it has come. Host data only.

`Sampling` and `Limits` are frozen and refuse nonsense by field, value and range. A `Request` is
written by `Scheduler` alone once it has been added.
"""

import dataclasses
import enum
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dsv4.config import Config
from runtime.drafts import DraftRecord
from runtime.pages import Held
from runtime.parcel import Parcel
from runtime.prefix import CacheReport, Chain
from runtime.ranges import real, whole
from runtime.text import Decode, TextStream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. The seed fixes them whatever else runs at the same time."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming the field, the value and what is allowed."""
        real("temperature", self.temperature, 0, math.inf)
        whole("top_k", self.top_k, 0, 2**31 - 1)
        real("top_p", self.top_p, 0, 1, above=True)
        real("min_p", self.min_p, 0, 1)
        whole("seed", self.seed, 0, 2**63 - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When generation ends. The model's EOS, stop ids and stop strings are not part of the text."""

    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError naming the field, the value and what is allowed."""
        whole("max_new_tokens", self.max_new_tokens, 1)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must be a tuple of non-empty strings")
        for token in self.stop_token_ids:
            whole("stop_token_ids", token, 0)


class Status(enum.Enum):
    """Where a request stands."""

    NEW = "new"  # not added to an engine
    WAITING = "waiting"  # for a slot and pages, the first time or after a preemption
    RUNNING = "running"
    DONE = "done"


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the model at one generated token, before temperature and filters."""

    token: float
    top: tuple[tuple[int, float], ...]  # the likeliest (token id, value), descending


class Sampled(NamedTuple):
    """One token that a step produced for a request."""

    token: int
    logprobs: Logprobs | None = None
    finite: bool = True  # whether its logits were numbers to choose from


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Drafts of a request's next tokens."""

    tokens: tuple[int, ...]
    q: Tensor | None = None  # [drafts, V] what each was drawn from, for the rule "ratio"

    def first(self, count: int) -> "Proposal":
        """The first `count` of them, at least one."""
        return Proposal(self.tokens[:count], None if self.q is None else self.q[:count])


class Event(NamedTuple):
    """What one step brought one request."""

    request: "Request"
    tokens: tuple[int, ...]
    text: str  # that can be shown now; "" without a detokenizer
    logprobs: tuple[Logprobs, ...]  # one per token, or empty if not asked for
    finish: str | None  # "eos", "stop", "length", "abort" or "error" in the last event


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """One prompt and what is generated from it."""

    prompt: Sequence[int]  # token ids
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    logprobs: int | None = None  # None: none; n: of the chosen token and of the n likeliest
    priority: int = 0  # lower runs first; equal ones in order of arrival
    salt: str = ""  # prefixes are shared only between requests with the same salt
    extra: tuple[str, ...] = ()  # likewise: what else the state depends on, an adapter for example
    cache: bool = True  # whether it may use and leave cached prefixes
    drafting: bool = True  # whether drafts may be made for it

    id: int = -1  # given by the engine
    status: Status = Status.NEW
    tokens: list[int] = dataclasses.field(default_factory=list)  # prompt and output
    room: int = 0  # tokens it may come to hold state of
    held: Held | None = None
    chain: Chain | None = None  # page keys; None without a prefix cache
    report: CacheReport | None = None  # what the prefix cache brought at first admission
    parcel: Parcel | None = None  # state to begin with, from another engine
    proposal: Proposal | None = None  # drafts of the next tokens
    drafted: DraftRecord | None = None  # what became of its drafts; None: none are made
    preemptions: int = 0
    text: str = ""  # shown so far
    stream: TextStream | None = None
    scores: list[Logprobs] = dataclasses.field(default_factory=list)  # one per output token
    finish: str | None = None
    error: Exception | None = None  # why finish is "error"; it ended this request alone
    added_s: float = 0.0  # time.perf_counter at add, first admission, first token and end
    admitted_s: float = 0.0
    first_s: float = 0.0
    finished_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for an empty prompt or a bad count of logprobs."""
        if len(self.prompt) == 0:
            raise ValueError("the prompt is empty; it must have at least one token")
        if self.logprobs is not None:
            whole("logprobs", self.logprobs, 0)
        whole("priority", self.priority, -(2**31), 2**31 - 1)
        self._check_types()
        for token in self.prompt:
            if isinstance(token, bool | float | str) or not hasattr(token, "__index__"):
                raise ValueError(f"the prompt holds {token!r:.60}; token ids are whole numbers")
        # Copies: what the caller does to its list later changes nothing here.
        self.prompt = tuple(operator.index(t) for t in self.prompt)
        self.tokens = list(self.prompt)
        self.scores = []  # not that of a request this one was made from

    def _check_types(self) -> None:
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling is {self.sampling!r:.60}; it must be a Sampling(...)")
        if not isinstance(self.limits, Limits):
            raise ValueError(f"limits is {self.limits!r:.60}; it must be a Limits(...)")
        if not isinstance(self.salt, str):
            raise ValueError(f'salt is {self.salt!r:.60}; it must be a string, "" for none')
        if not isinstance(self.extra, tuple) or not all(isinstance(e, str) for e in self.extra):
            raise ValueError(f"extra is {self.extra!r:.60}; it must be a tuple of strings")
        for name in ("cache", "drafting"):
            if not isinstance(getattr(self, name), bool):
                value = getattr(self, name)
                raise ValueError(f"{name} is {value!r:.60}; it must be True or False")
        if self.parcel is not None and not isinstance(self.parcel, Parcel):
            raise ValueError(f"parcel is {self.parcel!r:.60}; it must come from Engine.export")

    @property
    def computed(self) -> int:
        """Leading tokens whose state is in the pools."""
        return self.held.length if self.held is not None else 0

    @property
    def output(self) -> list[int]:
        """The generated token ids, a final EOS or stop token included."""
        return self.tokens[len(self.prompt) :]

    def follow(self, sampling: Sampling | None, limits: Limits | None) -> "Request":
        """A new request that begins with all tokens of this one, and asks for the same or this."""
        return Request(
            prompt=self.tokens,
            sampling=sampling or self.sampling,
            limits=limits or self.limits,
            logprobs=self.logprobs,
            priority=self.priority,
            salt=self.salt,
            extra=self.extra,
            cache=self.cache,
            drafting=self.drafting,
        )

    def moved(self, parcel: Parcel) -> "Request":
        """A new request that goes on exactly where this one stands, for another engine.

        `parcel` is what `Engine.export` gave for this request. Its output begins here.
        """
        left = self.limits.max_new_tokens - len(self.output)
        child = self.follow(None, dataclasses.replace(self.limits, max_new_tokens=left))
        child.parcel = parcel
        return child

    def check(self, cfg: Config) -> None:
        """Raise ValueError for what this model can never serve."""
        if self.status is not Status.NEW:
            raise ValueError(f"request {self.id} was added before; make a new one")
        listed = (
            ("token id", self.tokens),
            ("stop token id", self.limits.stop_token_ids),
        )
        for name, tokens in listed:
            for token in tokens:
                if not 0 <= token < cfg.vocab:
                    raise ValueError(
                        f"{name} {token} is out of range; the vocabulary has ids 0 to "
                        f"{cfg.vocab - 1}"
                    )
        if len(self.tokens) > cfg.max_positions:
            raise ValueError(
                f"the prompt has {len(self.tokens)} tokens; the model's limit "
                f"(max_position_embeddings) is {cfg.max_positions}"
            )
        if self.logprobs is not None and self.logprobs > cfg.vocab:
            raise ValueError(f"logprobs is {self.logprobs}; the vocabulary has {cfg.vocab} entries")

    def longest(self, cfg: Config) -> int:
        """Tokens whose state the request can come to need. The last token's never is."""
        return min(len(self.prompt) + self.limits.max_new_tokens - 1, cfg.max_positions)

    def open_text(self, decode: Decode | None) -> None:
        """Start the text. Raises ValueError for stop strings without a detokenizer."""
        if decode is not None:
            self.stream = TextStream(decode, self.limits.stop)
        elif self.limits.stop:
            raise ValueError(
                f"stop is {self.limits.stop!r}; stop strings need a tokenizer, which this engine "
                f"does not have: use stop_token_ids"
            )

    def append(self, sampled: Sampled, cfg: Config) -> str:
        """Take one generated token; sets `finish` if it is the last. Returns text to show."""
        token, limits = sampled.token, self.limits
        if not sampled.finite:
            raise ValueError(
                f"the logits after {len(self.tokens)} tokens are not finite: the parameters hold "
                f"NaN or infinity, or the dtype is too narrow for them"
            )
        self.tokens.append(token)
        if sampled.logprobs is not None:
            self.scores.append(sampled.logprobs)
        if token in limits.stop_token_ids:
            self.finish = "stop"
        elif token in cfg.eos and not limits.ignore_eos:
            self.finish = "eos"
        elif len(self.tokens) > self.room:
            self.finish = "length"
        return self._show(self.stream, token) if self.stream is not None else ""

    def _show(self, stream: TextStream, token: int) -> str:
        """The text that a token brings, and a stop string in it."""
        shown, stop = "", None
        if self.finish in (None, "length"):  # other last tokens are not part of the text
            shown, stop = stream.push(token)
        if stop is None and self.finish is not None:
            rest, stop = stream.close()
            shown += rest
        if stop is not None:
            self.finish = "stop"
        self.text += shown
        return shown
