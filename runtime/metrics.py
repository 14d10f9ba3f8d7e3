"""Counters of one engine in Prometheus' text format, under vLLM's names where vLLM has them.

    metrics = Metrics("deepseek-v4")
    engine = Engine(model, sizes, watch=metrics)
    metrics.text()

Names, labels and bucket bounds are those of vLLM 0.32's `v1/metrics/loggers.py` and
`v1/spec_decode/metrics.py`. What vLLM has no name for is called `dsv4:`. As everywhere in
Prometheus, counters are written with `_total` behind their names.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.drafts import Acceptance
from runtime.plan import Plan, Ran
from runtime.request import Event, Request
from runtime.watch import Load

_FIRST_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# What ended a request, in vLLM's words: it has none for EOS.
_REASONS = (("eos", "stop"), ("stop", "stop"), ("length", "length"), ("abort", "abort"),
            ("error", "error"))  # fmt: skip

_LABELS = ("model_name", "engine")


class Metrics:
    """A watcher (`watch.py`) of one engine. `text` may be called at any time."""

    def __init__(self, model_name: str, engine: int = 0) -> None:
        """Labels of every series, as in vLLM; `engine` numbers the engines of one deployment."""
        self.registry = CollectorRegistry()  # its own: nothing is shared between two engines
        self._values = (model_name, str(engine))
        self._opened = False
        self._live: dict[int, Request] = {}
        self._token_s: dict[int, float] = {}  # when each request got its newest token
        self._prompt = self._counter("vllm:prompt_tokens", "Number of prefill tokens processed.")
        self._generated = self._counter(
            "vllm:generation_tokens", "Number of generation tokens processed."
        )
        self._queries = self._counter(
            "vllm:prefix_cache_queries",
            "Prefix cache queries, in terms of number of queried tokens.",
        )
        self._hits = self._counter(
            "vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens."
        )
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._success = {ours: success.labels(*self._values, told) for ours, told in _REASONS}
        self._failed = self._counter("dsv4:failed_steps", "Steps that broke off with an error.")
        self._step_tokens = self._histogram(
            "vllm:iteration_tokens_total",
            "Histogram of number of tokens per engine_step.",
            _STEP_TOKENS,
        )
        self._first = self._seconds("time_to_first_token", "time to first token", _FIRST_S)
        self._between = self._seconds("inter_token_latency", "inter-token latency", _TOKEN_S)
        self._per_token = self._seconds(
            "request_time_per_output_token", "time_per_output_token_seconds per request", _TOKEN_S
        )
        self._whole = self._seconds("e2e_request_latency", "e2e request latency", _REQUEST_S)
        self._queued, self._inference, self._prefill, self._decode = (
            self._seconds(f"request_{name}_time", f"time spent in {phase} phase", _REQUEST_S)
            for name, phase in (
                ("queue", "WAITING"),
                ("inference", "RUNNING"),
                ("prefill", "PREFILL"),
                ("decode", "DECODE"),
            )
        )

    def _counter(self, name: str, told: str) -> Counter:
        return Counter(name, told, _LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, told: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, told, _LABELS, buckets=buckets, registry=self.registry)
        return made.labels(*self._values)

    def _seconds(self, name: str, told: str, buckets: Sequence[float]) -> Histogram:
        return self._histogram(f"vllm:{name}_seconds", f"Histogram of {told} in seconds.", buckets)

    def text(self) -> str:
        """All series as they stand now, in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def opened(self, look: Callable[[], Load]) -> None:
        """See `Watch`. Raises ValueError if this watches another engine already."""
        if self._opened:
            raise ValueError("these metrics watch another engine already; make one per engine")
        self._opened = True
        self.registry.register(_Standing(look, self._values))

    def added(self, request: Request) -> None:
        """See `Watch`."""
        self._live[request.id] = request

    def began(self, stage: str) -> None:
        """See `Watch`. Nothing here depends on stages."""

    def stepped(self, plan: Plan, ran: Sequence[Ran], events: Sequence[Event]) -> None:
        """See `Watch`."""
        now_s = time.perf_counter()
        self._admitted(plan)
        self._step_tokens.observe(plan.tokens)
        for event in events:
            if event.tokens:
                self._generated.inc(len(event.tokens))
                self._got_tokens(event.request, now_s)

    def _got_tokens(self, request: Request, now_s: float) -> None:
        # As in vLLM: a step that brings several tokens is one interval, and a prompt counts when
        # its first token comes, with all its tokens, found in the cache or computed.
        before_s = self._token_s.get(request.id)
        if before_s is None:
            self._prompt.inc(len(request.prompt))
            self._first.observe(request.first_s - request.added_s)
        else:
            self._between.observe(now_s - before_s)
        self._token_s[request.id] = now_s

    def _admitted(self, plan: Plan) -> None:
        """Count what admitted requests found. A resumed request has been counted before."""
        for request in [self._live[i] for i in plan.admitted if i in self._live]:
            report = request.report
            if report is None or report.reason in ("disabled", "imported"):
                continue
            if not request.preemptions:
                self._queries.inc(report.tokens)
                self._hits.inc(report.hit)

    def failed(self, plan: Plan, error: BaseException) -> None:
        """See `Watch`. An interrupt is no failure."""
        self._admitted(plan)
        if isinstance(error, Exception):
            self._failed.inc()

    def ended(self, request: Request) -> None:
        """See `Watch`. Intervals that a request never came to are not observed."""
        self._live.pop(request.id, None)
        self._token_s.pop(request.id, None)
        self._success[request.finish or "error"].inc()
        end_s = request.finished_s
        self._whole.observe(end_s - request.added_s)
        if request.admitted_s:
            self._queued.observe(request.admitted_s - request.added_s)
            self._inference.observe(end_s - request.admitted_s)
        if request.first_s:
            self._prefill.observe(request.first_s - request.admitted_s)
            self._decode.observe(end_s - request.first_s)
            if len(request.output) > 1:
                self._per_token.observe((end_s - request.first_s) / (len(request.output) - 1))


class _Standing(Collector):
    """What an engine knows itself, asked for when the text is written."""

    def __init__(self, look: Callable[[], Load], values: tuple[str, str]) -> None:
        self._look, self._values = look, values

    def collect(self) -> Iterator[Metric]:
        """The series as they stand now."""
        load = self._look()
        pages = [load.pools["history"], load.pools["window"]]
        yield self._gauge("vllm:num_requests_running", "Number of requests running.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Number of requests waiting.", load.waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "KV-cache usage of the fuller of history and window pages. 1 means 100 percent usage.",
            max(pool.share for pool in pages),
        )
        yield self._count(
            "vllm:num_preemptions",
            "Cumulative number of preemption from the engine.",
            load.preemptions,
        )
        yield self._gauge(
            "dsv4:prefix_hit_unit_tokens",
            "Prefix cache hits are multiples of this.",
            load.unit_tokens,
        )
        yield from self._pools(load)
        if load.acceptance is not None:
            yield from self._drafts(load.acceptance)

    def _gauge(self, name: str, told: str, value: float) -> Metric:
        made = GaugeMetricFamily(name, told, labels=_LABELS)
        made.add_metric(self._values, value)
        return made

    def _count(self, name: str, told: str, value: float) -> Metric:
        made = CounterMetricFamily(name, told, labels=_LABELS)
        made.add_metric(self._values, value)
        return made

    def _pools(self, load: Load) -> Iterator[Metric]:
        pages = GaugeMetricFamily(
            "dsv4:pool_pages",
            "Pages of a pool (slots of the pool of slots) by state, without the padding page.",
            labels=(*_LABELS, "pool", "state"),
        )
        size = GaugeMetricFamily(
            "dsv4:pool_bytes",
            "Bytes of the same pages, by what is kept in them.",
            labels=(*_LABELS, "pool", "kind", "state"),
        )
        for name, use in load.pools.items():
            for state in ("owned", "cached", "free"):
                count = getattr(use, state)
                pages.add_metric((*self._values, name, state), count)
                for kind, unit in use.unit_bytes.items():
                    size.add_metric((*self._values, name, kind, state), count * unit)
        yield from (pages, size)

    def _drafts(self, told: Acceptance) -> Iterator[Metric]:
        proposed, accepted = sum(told.proposed), sum(told.accepted)
        name = "vllm:spec_decode_num_"
        yield self._count(f"{name}drafts", "Number of spec decoding drafts.", told.steps)
        yield self._count(f"{name}draft_tokens", "Number of draft tokens.", proposed)
        yield self._count(f"{name}accepted_tokens", "Number of accepted tokens.", accepted)
        labels = (*_LABELS, "position")
        count = CounterMetricFamily(
            f"{name}accepted_tokens_per_pos", "Accepted tokens per draft position.", labels=labels
        )
        share = GaugeMetricFamily(
            "dsv4:draft_acceptance",
            "Of the drafts proposed at this position so far, the share that was accepted.",
            labels=labels,
        )
        for i, (n, part) in enumerate(zip(told.accepted, told.shares, strict=True)):
            count.add_metric((*self._values, str(i)), n)
            share.add_metric((*self._values, str(i)), part)
        yield from (count, share)
        yield self._gauge(
            "dsv4:draft_mean_length_tokens",
            "Tokens per step that verified drafts, so far; 1 is what a plain step brings.",
            told.mean_length,
        )
