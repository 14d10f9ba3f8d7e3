"""The loop: who runs when, when it ends, what it costs the others."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from dsv4 import model
from dsv4.batch import Batch, StepOut
from dsv4.context import Ctx
from dsv4.params import Params
from dsv4.state import Pools
from dsv4.tree import leaves, tmap
from runtime.engine import Engine
from runtime.pages import fit
from runtime.request import Limits, Request, Sampling, Status
from tests.counting import CFG, REAL, Model, engine, real, requests, sizes

# What comes out.


def test_tokens_do_not_depend_on_company() -> None:
    """Chunks, budgets, concurrency and blocks: the tokens of a lone run, and its logprobs."""
    made = real(REAL)
    lone = []
    for request in requests(REAL):
        e = Engine(made, fit(REAL, [80], most=80), chunk=80)
        lone += e.generate([request])
    for chunk, slots, budget, block in ((7, 3, None, 4), (3, 5, 9, 16), (64, 2, None, 1)):
        e = Engine(
            made,
            fit(REAL, [80] * slots, most=chunk, page_tokens=16),
            chunk=chunk,
            budget=budget,
            block=block,
        )
        for request, want in zip(e.generate(requests(REAL)), lone, strict=True):
            assert request.output == want.output
            for got, kept in zip(request.scores, want.scores, strict=True):
                assert got.token == pytest.approx(kept.token, rel=1e-10)
                assert [t for t, _ in got.top] == [t for t, _ in kept.top]
        e.audit()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_is_exact(dtype: torch.dtype) -> None:
    """Not one bit of a logprob depends on the company."""
    made = real(REAL, dtype)

    def run(chunk: int, slots: int) -> list[list]:
        e = Engine(
            made, fit(REAL, [80] * slots, most=chunk, page_tokens=16), chunk=chunk, exact=True
        )
        # The width of tables is the engine's: the same for both.
        e._runner._longest = 13
        return [[r.output, r.scores] for r in e.generate(requests(REAL))]

    assert run(7, 5) == run(80, 1)


def test_greedy_is_the_argmax_of_forward() -> None:
    made = real(REAL)
    (request,) = Engine(made, fit(REAL, [80], most=16), chunk=16).generate(
        [Request(prompt=[3, 5, 8, 13], limits=Limits(max_new_tokens=20), logprobs=3)]
    )
    ids = torch.tensor([request.tokens[:-1]])
    with torch.no_grad():
        logs = model.forward(made.params, ids, Ctx(REAL))[0, 3:].log_softmax(-1)
    assert logs.argmax(-1).tolist() == request.output
    for row, score in zip(logs, request.scores, strict=True):
        assert score.token == pytest.approx(float(row.max()), rel=1e-10)
        assert [v for _, v in score.top] == pytest.approx(row.topk(3).values.tolist(), rel=1e-10)


def test_pools_may_be_written_in_place() -> None:
    """A step that overwrites the pools it was given: nobody looks at the old ones."""
    made = real(REAL)

    def step(params: Params, pools: Pools, batch: Batch) -> tuple[StepOut, Pools]:
        out, new = made.step(params, tmap(torch.clone, pools), batch)
        for old in leaves(pools):
            old.fill_(torch.nan)
        return out, new

    def run(m: Model) -> list[list[int]]:
        e = Engine(m, fit(REAL, [80] * 3, most=8), chunk=8)
        return [r.output for r in e.generate(requests(REAL)[:3])]

    assert run(dataclasses.replace(made, step=step)) == run(made)


def test_no_gradients() -> None:
    made = real(REAL)
    params = tmap(lambda t: t.requires_grad_() if t.is_floating_point() else t, made.params)
    e = Engine(dataclasses.replace(made, params=params), fit(REAL, [9], most=8), chunk=8)
    e.generate([Request(prompt=[1, 2], limits=Limits(max_new_tokens=2))])
    assert not any(t.requires_grad for t in leaves(e.pools))


# When it ends.


@pytest.mark.parametrize(
    ("prompt", "limits", "output", "text", "finish"),
    [
        ([0], Limits(max_new_tokens=3), [1, 2, 3], "bcd", "length"),
        ([0], Limits(max_new_tokens=1), [1], "b", "length"),
        ([97], Limits(), [98, 99, 100], "uv", "eos"),
        ([97], Limits(max_new_tokens=4, ignore_eos=True), [98, 99, 100, 101], "uvwx", "length"),
        ([97], Limits(max_new_tokens=3), [98, 99, 100], "uv", "eos"),
        ([0], Limits(stop_token_ids=(3, 5)), [1, 2, 3], "bc", "stop"),
        ([0], Limits(stop=("ef",)), [1, 2, 3, 4, 5], "bcd", "stop"),
        ([0], Limits(stop=("cdx", "de")), [1, 2, 3, 4], "bc", "stop"),
        ([0], Limits(stop=("d",), max_new_tokens=3), [1, 2, 3], "bc", "stop"),
        ([0], Limits(stop=("de",), max_new_tokens=3), [1, 2, 3], "bcd", "length"),
        ([98], Limits(stop=("vw",)), [99, 100], "v", "eos"),
    ],
)
def test_ends(prompt: list[int], limits: Limits, output: list[int], text: str, finish: str) -> None:
    """By stream and by generate: the same tokens, the same text, nothing held back is lost."""
    (request,) = engine().generate([Request(prompt=prompt, limits=limits)])
    assert (request.output, request.text, request.finish) == (output, text, finish)
    e = engine()
    streamed = Request(prompt=prompt, limits=limits)
    events = list(e.stream(streamed))
    assert [t for event in events for t in event.tokens] == output
    assert "".join(event.text for event in events) == text
    assert [event.finish for event in events] == [None] * (len(events) - 1) + [finish]
    assert streamed.status is Status.DONE
    assert e.idle
    e.audit()


def test_the_last_position_is_used() -> None:
    """A prompt as long as the model's limit still gives a token; a shorter one fills it."""
    for n in (64, 60):
        (r,) = engine().generate([Request(prompt=[0] * n, limits=Limits(max_new_tokens=30))])
        assert (len(r.output), r.finish) == (65 - n, "length")


def test_text_needs_no_tokenizer() -> None:
    (r,) = engine(decode=None).generate([Request(prompt=[0], limits=Limits(max_new_tokens=3))])
    assert (r.output, r.text) == ([1, 2, 3], "")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine(decode=None).add(Request(prompt=[0], limits=Limits(stop=("x",))))


def test_logprobs_on_request_only() -> None:
    asked = [None, 0, 2]
    made = engine().generate(
        [Request(prompt=[n], limits=Limits(max_new_tokens=2), logprobs=n) for n in (0, 2)]
        + [Request(prompt=[9], limits=Limits(max_new_tokens=2))]
    )
    assert [[len(s.top) for s in r.scores] for r in made] == [[0, 0], [2, 2], []]
    assert made[1].scores[0].top[0][0] == made[1].output[0]
    assert asked[0] is made[2].logprobs


# What is refused.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request(prompt=[]), "prompt is empty"),
        (lambda: Request(prompt=[1, 160]), "token id 160 is out of range; .* 0 to 159"),
        (lambda: Request(prompt=[-1]), "token id -1 is out of range"),
        (
            lambda: Request(prompt=[1], limits=Limits(stop_token_ids=(160,))),
            "stop token id 160 is out of range",
        ),
        (lambda: Request(prompt=[1] * 65), r"65 tokens; .*max_position_embeddings\) is 64"),
        (lambda: Request(prompt=[1], logprobs=161), "logprobs is 161"),
        (lambda: Request(prompt=[1], logprobs=-1), "logprobs is -1"),
        (
            lambda: Request(prompt=[1] * 30, limits=Limits(max_new_tokens=20)),
            "49 tokens, which need 7 history pages of 8 tokens; the pool has 6",
        ),
        (lambda: [1, 2], r"is of type list; give a Request\(prompt=...\)"),
        (lambda: Request(prompt=[1], salt=None), "salt is None"),  # pyright: ignore
        (lambda: Request(prompt=[1], extra="ab"), "extra is 'ab'"),  # pyright: ignore
        (lambda: Request(prompt=[1], sampling=None), "sampling is None"),  # pyright: ignore
        (lambda: Request(prompt=[1], limits=5), "limits is 5"),  # pyright: ignore
        (lambda: Request(prompt=[1], cache=1), "cache is 1"),  # pyright: ignore
        (lambda: Request(prompt=[1], parcel=b""), "parcel is b''"),  # pyright: ignore
        (lambda: Limits(stop=["a"]), "stop is"),  # pyright: ignore
        (lambda: Limits(max_new_tokens=0), "max_new_tokens is 0"),
        (lambda: Limits(stop=("",)), "stop is"),
        (lambda: Limits(stop="ab"), "stop is 'ab'"),  # pyright: ignore[reportArgumentType]
        (lambda: Sampling(temperature=-0.1), "temperature is -0.1"),
        (lambda: Sampling(temperature=float("nan")), "temperature is nan"),
        (lambda: Sampling(temperature=float("inf")), "temperature is inf"),
        (lambda: Sampling(top_k=-1), "top_k is -1"),
        (lambda: Sampling(top_k=1.5), "top_k is 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: Sampling(top_p=0), "top_p is 0"),
        (lambda: Sampling(top_p=1.1), "top_p is 1.1"),
        (lambda: Sampling(min_p=-1), "min_p is -1"),
        (lambda: Sampling(seed=-1), "seed is -1"),
        (lambda: Sampling(seed=2**63), "seed is 9223372036854775808"),
    ],
)
def test_refusals(make: Callable, message: str) -> None:
    e = engine(pools=sizes(48, 1))
    with pytest.raises(ValueError, match=message):
        e.add(make())
    assert e.idle


def test_refused_settings() -> None:
    for more, message in (
        ({"chunk": 0}, "chunk is 0"),
        ({"block": 0}, "block is 0"),
        ({"budget": 3}, "budget is 3 tokens per step; 4 requests"),
        ({"drafts": 3}, r"drafts is 3; give runtime.drafts.Drafts\(depth"),
        ({"pools": 3}, "sizes is of type int; give PoolSizes"),
    ):
        with pytest.raises(ValueError, match=message):
            engine(**more)


def test_generate_feeds_a_queue_that_is_full() -> None:
    """`max_waiting` is for others: a list of any length runs to its end."""
    e = engine(max_waiting=1)
    made = [Request(prompt=[n], limits=Limits(max_new_tokens=2)) for n in range(20)]
    assert [r.output for r in e.generate(made)] == [[n + 1, n + 2] for n in range(20)]


def test_one_refusal_leaves_nothing_behind() -> None:
    e = engine()
    good = Request(prompt=[1])
    with pytest.raises(ValueError, match="out of range"):
        e.generate([good, Request(prompt=[999])])
    assert e.idle
    assert good.status is Status.NEW
    e.generate([good])
    with pytest.raises(ValueError, match="added before"):
        e.add(good)


# Who runs when.


def test_decodes_go_first_and_prompts_share_the_rest() -> None:
    """A long prompt never stops those who generate; no step exceeds its budget."""
    seen: list[Batch] = []
    e = engine(seen, chunk=6, budget=10)
    e.add(Request(prompt=[0], limits=Limits(max_new_tokens=30)))
    e.step()
    for _ in range(2):
        e.add(Request(prompt=[5] * 20, limits=Limits(max_new_tokens=2)))
    while len(seen) < 6:
        assert any(event.request.id == 0 for event in e.step())
    counts = [(b.lengths - b.starts)[1:].tolist() for b in seen]
    assert counts == [[1], [1, 6, 3], [1, 6, 3], [1, 6, 3], [1, 2, 6], [1, 1, 5]]
    # Only the ends of prompts have their logits computed.
    assert [len(b.wanted) for b in seen] == [1, 1, 1, 1, 2, 3]
    assert {b.blocks.shape[1] for b in seen} == {1, 16}


def test_blocks_of_one_in_decode_steps() -> None:
    seen: list[Batch] = []
    engine(seen, block=4).generate([Request(prompt=[0] * 10, limits=Limits(max_new_tokens=3))])
    assert [b.blocks.shape[1] for b in seen] == [4, 4, 1, 1]
    meter = engine(block=4)
    meter.generate([Request(prompt=[0] * 10, limits=Limits(max_new_tokens=3))])
    m = meter.meter
    assert (m.prefill_steps, m.prefill_tokens) == (2, 10)
    assert (m.decode_steps, m.decode_tokens) == (2, 2)


def test_busy_pools_make_requests_wait() -> None:
    """Nine requests on pools for two: in order, each complete, nothing lost."""
    e = engine(pools=sizes(24, 2))
    made = [Request(prompt=[n] * 10, limits=Limits(max_new_tokens=14)) for n in range(9)]
    for request in made:
        e.add(request)
    ended: list[int] = []
    most = 0
    while not e.idle:
        ended += [event.request.id for event in e.step() if event.finish]
        most = max(most, sum(r.status is Status.RUNNING for r in made))
        e.audit()
    assert ended == list(range(9))
    assert most == 2
    for n, request in enumerate(made):
        assert request.output == list(range(n + 1, n + 15))


def test_a_long_request_fits_few_window_pages() -> None:
    """Window pages are recycled: 60 tokens run in the pages of window and chunk."""
    need = fit(CFG, [60], most=8, page_tokens=8)
    assert need.window_pages - 1 == 3
    e = engine(pools=dataclasses.replace(need, slots=3))
    (r,) = e.generate([Request(prompt=[0] * 40, limits=Limits(max_new_tokens=21))])
    assert len(r.output) == 21
