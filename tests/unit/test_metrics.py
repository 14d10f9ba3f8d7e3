"""Counters against runs counted by hand, and the names that vLLM's dashboards ask for."""

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsv4.state import Pools
from runtime.engine import Engine
from runtime.metrics import Metrics
from runtime.pages import fit
from runtime.request import Limits, Request
from tests import counting as fake
from tests import tiny

BASE = {"model_name": "m", "engine": "0"}


def read(metrics: Metrics) -> dict[tuple, float]:
    """Every sample by its name and its labels besides those of the engine, in order."""
    out = {}
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples:
            assert BASE.items() <= sample.labels.items()
            rest = {k: v for k, v in sample.labels.items() if k not in BASE}
            out[sample.name, *[rest[k] for k in sorted(rest)]] = sample.value
    return out


def test_a_run_counted_by_hand() -> None:
    """Prompts of 10 and 3 in chunks of 8, 4 tokens each: steps of 8+3, 2+1, 2, 2 and 1 rows."""
    metrics = Metrics("m")
    e = fake.engine(watch=metrics, budget=16)
    made = [Request(prompt=[0] * n, limits=Limits(max_new_tokens=4)) for n in (10, 3)]
    assert read(metrics)["vllm:num_requests_waiting",] == 0
    for request in made:
        e.add(request)
    assert read(metrics)["vllm:num_requests_waiting",] == 2
    e.step()
    got = read(metrics)
    assert (got["vllm:num_requests_running",], got["vllm:num_requests_waiting",]) == (2, 0)
    # Pages of 8 tokens, 33 of them (one is spare); each of the two holds one.
    pages = {s: got["dsv4:pool_pages", "history", s] for s in ("owned", "cached", "free")}
    assert pages == {"owned": 2, "cached": 0, "free": 31}
    assert got["dsv4:pool_pages", "slots", "owned"] == 2
    window = [got["dsv4:pool_pages", "window", s] for s in ("owned", "cached", "free")]
    assert window[0] == 2
    usage = max(2 / 33, 2 / sum(window))
    assert got["vllm:kv_cache_usage_perc",] == pytest.approx(usage)
    e.drain()
    got = read(metrics)
    assert got["vllm:prompt_tokens_total",] == 13
    assert got["vllm:generation_tokens_total",] == 8
    assert got["vllm:iteration_tokens_total_count",] == 5
    assert got["vllm:iteration_tokens_total_sum",] == 8 + 3 + 2 + 1 + 2 + 2 + 1
    assert got["vllm:iteration_tokens_total_bucket", "1.0"] == 1
    assert got["vllm:iteration_tokens_total_bucket", "8.0"] == 4
    assert got["vllm:request_success_total", "length"] == 2
    assert got["vllm:request_success_total", "abort"] == 0
    assert got["vllm:inter_token_latency_seconds_count",] == 6
    first_s = sum(r.first_s - r.added_s for r in made)
    assert got["vllm:time_to_first_token_seconds_count",] == 2
    assert got["vllm:time_to_first_token_seconds_sum",] == pytest.approx(first_s)
    for name, a, b in (
        ("e2e_request_latency", "added_s", "finished_s"),
        ("request_queue_time", "added_s", "admitted_s"),
        ("request_prefill_time", "admitted_s", "first_s"),
        ("request_decode_time", "first_s", "finished_s"),
        ("request_inference_time", "admitted_s", "finished_s"),
    ):
        want_s = sum(getattr(r, b) - getattr(r, a) for r in made)
        assert got[f"vllm:{name}_seconds_count",] == 2
        assert got[f"vllm:{name}_seconds_sum",] == pytest.approx(want_s)
    assert got["vllm:request_time_per_output_token_seconds_count",] == 2
    assert got["vllm:num_requests_running",] == 0
    # One full page of the longer one stays in the cache, none of the shorter.
    assert got["dsv4:pool_pages", "history", "owned"] == 0
    assert got["dsv4:pool_pages", "history", "cached"] == 1
    assert got["dsv4:prefix_hit_unit_tokens",] == 8
    assert not any("spec_decode" in name for name, *_ in got)


def test_prefix_hits_are_tokens() -> None:
    """20 tokens queried twice; the second time two pages of 8 are there."""
    metrics = Metrics("m")
    e = fake.engine(watch=metrics)
    for _ in range(2):
        e.generate([Request(prompt=[0] * 20, limits=Limits(max_new_tokens=2))])
    e.generate([Request(prompt=[0] * 20, limits=Limits(max_new_tokens=2), cache=False)])
    got = read(metrics)
    assert got["vllm:prefix_cache_queries_total",] == 40
    assert got["vllm:prefix_cache_hits_total",] == 16
    assert got["vllm:prompt_tokens_total",] == 60


def test_bytes_are_those_of_the_pools() -> None:
    """By pool and state they add up to the tensors, without page 0 and slot 0."""
    metrics = Metrics("m")
    cfg = tiny.short(mtp=0, max_positions=200)
    sizes = fit(cfg, [80] * 2, most=16)
    e = Engine(fake.real(cfg), sizes, chunk=16, watch=metrics)
    e.add(Request(prompt=[1] * 40, limits=Limits(max_new_tokens=3)))
    e.step()
    got = read(metrics)
    total = sum(v for (name, *_), v in got.items() if name == "dsv4:pool_bytes")
    assert total == sum(_without_padding(e.pools, sizes))
    kinds = {kind for name, *rest in got for kind in rest[:1] if name == "dsv4:pool_bytes"}
    assert kinds == {"window", "overlap", "compressed", "index keys", "open inputs"}


def _without_padding(pools: Pools, sizes) -> list[int]:
    out = []
    for layer in pools.layers:
        for entries in (layer.compressed, layer.keys):
            if entries is not None:
                groups = ((entries.rows, sizes.history_pages), (entries.ring, sizes.slots))
                out += [t.nbytes * (n - 1) // n for t, n in groups]
                if entries.header is not None:
                    out.append(
                        entries.header.nbytes * (sizes.window_pages - 1) // sizes.window_pages
                    )
        out.append(layer.window.nbytes * (sizes.window_pages - 1) // sizes.window_pages)
    return out


def test_preemptions_aborts_and_failures() -> None:
    inner = fake.counter(fake.CFG)
    calls: list[int] = []

    def step(params, pools, batch):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return inner.step(params, pools, batch)

    metrics = Metrics("m")
    model = fake.Model(fake.CFG, inner.params, step)
    pools = dataclasses.replace(fit(fake.CFG, [24], most=16, page_tokens=8), slots=3)
    e = Engine(model, pools, chunk=8, watch=metrics)
    made = [
        e.add(Request(prompt=[n] * 7, limits=Limits(max_new_tokens=18, ignore_eos=True)))
        for n in (0, 50)
    ]
    aborted = e.add(Request(prompt=[1], limits=Limits(max_new_tokens=5)))
    e.abort(aborted)
    e.abort(aborted)  # told once
    e.drain()
    got = read(metrics)
    assert got["vllm:num_preemptions_total",] == sum(r.preemptions for r in made) > 0
    assert got["dsv4:failed_steps_total",] == 1
    assert got["vllm:request_success_total", "abort"] == 1
    assert got["vllm:request_success_total", "length"] == 2
    assert got["vllm:e2e_request_latency_seconds_count",] == 3
    assert got["vllm:request_queue_time_seconds_count",] == 2
    assert got["vllm:generation_tokens_total",] == 36
    assert got["vllm:prefix_cache_queries_total",] == 14  # resumed ones are not counted again


def test_two_engines_share_nothing() -> None:
    one, two = Metrics("m"), Metrics("m")
    limits = Limits(max_new_tokens=2)
    e = fake.engine(watch=one)
    other = fake.engine(watch=[two])
    e.generate([Request(prompt=[1], limits=limits)])
    assert read(one)["vllm:generation_tokens_total",] == 2
    assert read(two)["vllm:generation_tokens_total",] == 0
    other.generate([Request(prompt=[1], limits=limits) for _ in range(2)])
    assert read(one)["vllm:generation_tokens_total",] == 2
    assert read(two)["vllm:generation_tokens_total",] == 4
    with pytest.raises(ValueError, match="watch another engine"):
        fake.engine(watch=one)


def test_vllms_names() -> None:
    """The source's names of vLLM 0.32; Prometheus adds _total to counters."""
    metrics = Metrics("m")
    fake.engine(watch=metrics)
    families = {f.name: f.type for f in text_string_to_metric_families(metrics.text())}
    want = {
        "num_requests_running": "gauge",
        "num_requests_waiting": "gauge",
        "kv_cache_usage_perc": "gauge",
        "prefix_cache_queries": "counter",
        "prefix_cache_hits": "counter",
        "num_preemptions": "counter",
        "prompt_tokens": "counter",
        "generation_tokens": "counter",
        "request_success": "counter",
        "iteration_tokens_total": "histogram",
        "time_to_first_token_seconds": "histogram",
        "inter_token_latency_seconds": "histogram",
        "request_time_per_output_token_seconds": "histogram",
        "e2e_request_latency_seconds": "histogram",
        "request_queue_time_seconds": "histogram",
        "request_inference_time_seconds": "histogram",
        "request_prefill_time_seconds": "histogram",
        "request_decode_time_seconds": "histogram",
    }
    assert {f"vllm:{n}": kind for n, kind in want.items()}.items() <= families.items()


def test_a_watcher_that_fails_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Metrics):
        def added(self, request: Request) -> None:
            raise RuntimeError("no room for notes")

    broken, fine = Broken("m"), Metrics("m")
    e = fake.engine(watch=(broken, fine))
    (r,) = e.generate([Request(prompt=[1], limits=Limits(max_new_tokens=3))])
    assert r.output == [2, 3, 4]
    assert "it watches no more" in caplog.text
    assert read(fine)["vllm:generation_tokens_total",] == 3
    assert read(broken)["vllm:generation_tokens_total",] == 0


def test_an_abort_inside_a_step_is_told_once() -> None:
    metrics, asked = Metrics("m"), []

    def decode(ids) -> str:
        if 4 in ids:
            e.abort(asked[0])
        return fake.letters(ids)

    e = fake.engine(watch=metrics, decode=decode)
    asked.append(e.add(Request(prompt=[1], limits=Limits(max_new_tokens=9))))
    e.drain()
    assert read(metrics)["vllm:request_success_total", "abort"] == 1
    e.audit()
