"""The engine behind asyncio: concurrency, refusals, cancellation, draining, failure."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence

import pytest
import torch

from dsv4.batch import Batch, StepOut
from dsv4.config import Config
from dsv4.params import Params
from dsv4.state import Pools
from runtime.async_engine import AsyncEngine, Closed, Stream
from runtime.engine import Engine
from runtime.pages import fit
from runtime.request import Event, Limits, Request
from runtime.rules import Overloaded
from tests import tiny

CFG = tiny.short("wc", 0, mtp=0, eos=(100,), max_positions=64)


@dataclasses.dataclass(frozen=True)
class Counter:
    """Wants the token after the last one; can be held up."""

    cfg: Config
    params: Params
    gate: threading.Event
    draft: None = None
    fit: None = None
    fit_draft: None = None

    def step(self, params: Params, pools: Pools, batch: Batch) -> tuple[StepOut, Pools]:
        """As the runtime calls it."""
        self.gate.wait(10)
        following = (batch.tokens[batch.wanted] + 1) % self.cfg.vocab
        logits = torch.nn.functional.one_hot(following, self.cfg.vocab).float() * 9
        return StepOut(logits=logits, hidden=logits, load=torch.zeros(1, 1)), pools


def engine(gate: threading.Event | None = None, **more) -> Engine:
    if gate is None:
        gate = threading.Event()
        gate.set()
    made = Counter(CFG, tiny.params(CFG), gate)
    return Engine(made, fit(CFG, [64] * 4, most=16, page_tokens=8), chunk=8, **more)


def asked(first: int, new: int = 5) -> Request:
    return Request(prompt=[first], limits=Limits(max_new_tokens=new))


def tokens(events: Sequence[Event]) -> list[int]:
    return [t for event in events for t in event.tokens]


def test_many_at_once() -> None:
    """Forty tasks: each gets its own tokens in order, and the engine ends empty."""
    e = engine()

    async def one(serving: AsyncEngine, n: int) -> list[int]:
        return tokens([event async for event in await serving.stream(asked(n))])

    async def main() -> None:
        async with AsyncEngine(e) as serving:
            got = await asyncio.gather(*(one(serving, n) for n in range(40)))
            assert got == [list(range(n + 1, n + 6)) for n in range(40)]
            request = await serving.generate(asked(7))
            assert request.output == [8, 9, 10, 11, 12]

    asyncio.run(main())
    assert e.idle
    e.audit()


def test_refusals_come_from_the_call() -> None:
    gate = threading.Event()

    async def main() -> None:
        async with AsyncEngine(engine(gate, max_waiting=1)) as serving:
            with pytest.raises(ValueError, match="out of range"):
                await serving.stream(Request(prompt=[999]))
            streams = [await serving.stream(asked(1))]
            await asyncio.sleep(0.05)  # its first step hangs
            tasks = [asyncio.create_task(serving.stream(asked(n, 40))) for n in range(9)]
            await asyncio.sleep(0.05)
            gate.set()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [a for a in answers if isinstance(a, Overloaded)]
            assert len(refused) == 5  # three slots are free, and one may wait
            assert "max_waiting is 1" in str(refused[0])
            streams += [a for a in answers if not isinstance(a, BaseException)]
            for stream in streams:
                assert len(tokens([event async for event in stream])) in (5, 40)

    asyncio.run(main())


def test_leaving_a_stream_or_cancelling_its_task_aborts() -> None:
    e = engine()

    async def read(serving: AsyncEngine, request: Request) -> None:
        async for _ in await serving.stream(request):
            await asyncio.sleep(60)

    async def main() -> None:
        async with AsyncEngine(e) as serving:
            left, cancelled = asked(1, 60), asked(2, 60)
            stream = await serving.stream(left)
            await anext(stream)
            await stream.aclose()
            task = asyncio.create_task(read(serving, cancelled))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await serving.drain()
            assert left.finish in ("abort", "length")
            assert cancelled.finish in ("abort", "length")

    asyncio.run(main())
    assert e.idle
    e.audit()


@pytest.mark.parametrize("way", ["dropped", "closed", "cancelled"])
def test_a_stream_that_nobody_began_to_read_aborts(way: str) -> None:
    """A client that goes away before its first event must not hold a slot to the end."""
    e, gate = engine(), threading.Event()
    gate.set()

    async def late(serving: AsyncEngine, request: Request) -> None:
        stream = await serving.stream(request)
        await asyncio.sleep(30)
        await anext(stream)

    async def main() -> None:
        async with AsyncEngine(e) as serving:
            request = asked(1, 60)
            await serving.call(lambda _: gate.clear())
            if way == "cancelled":
                task = asyncio.create_task(late(serving, request))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                stream = await serving.stream(request)
                if way == "closed":
                    await stream.aclose()
                del stream
            gate.set()
            await serving.drain()
            assert request.finish == "abort"
            assert len(request.output) < 60

    e._runner._model = dataclasses.replace(e._runner._model, gate=gate)
    asyncio.run(main())
    assert e.idle
    e.audit()


def test_abort_is_told() -> None:
    gate = threading.Event()

    async def main() -> None:
        async with AsyncEngine(engine(gate)) as serving:
            request = asked(1, 50)
            stream = await serving.stream(request)
            abort = asyncio.create_task(serving.abort(request))
            await asyncio.sleep(0.02)
            gate.set()
            await abort
            events = [event async for event in stream]
            assert events[-1].finish == "abort"
            assert len(tokens(events)) < 50

    asyncio.run(main())


def test_drain_ends_what_was_taken_and_takes_no_more() -> None:
    async def main() -> None:
        async with AsyncEngine(engine()) as serving:
            streams = [await serving.stream(asked(n, 30)) for n in range(6)]
            await serving.drain()
            assert [len(tokens([e async for e in s])) for s in streams] == [30] * 6
            with pytest.raises(Closed, match="drains"):
                await serving.stream(asked(1))
            await asyncio.wait_for(serving.drain(), 5)  # a second time, with nothing left

    asyncio.run(main())


def test_close_aborts_what_runs() -> None:
    e = engine()

    async def main() -> None:
        serving = AsyncEngine(e)
        request = asked(1, 60)
        stream = await serving.stream(request)
        await serving.close()
        events = [event async for event in stream]
        assert events[-1].finish in ("abort", "length")
        with pytest.raises(Closed):
            await serving.stream(asked(1))
        await serving.close()

    asyncio.run(main())
    e.audit()
    assert e.idle


def test_a_fork_has_a_stream_of_its_own() -> None:
    gate = threading.Event()

    async def main() -> None:
        async with AsyncEngine(engine(gate)) as serving:
            request = asked(1, 60)
            stream = await serving.stream(request)
            await asyncio.sleep(0.05)  # its first step hangs, and the fork comes behind it
            fork = asyncio.create_task(serving.fork(request, limits=Limits(max_new_tokens=3)))
            await asyncio.sleep(0.05)
            gate.set()
            child = await fork
            events = [event async for event in child]
            first = events[0].request.prompt[-1]
            assert tokens(events) == [first + 1, first + 2, first + 3]
            await stream.aclose()

    asyncio.run(main())


def test_a_thread_that_fails_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the engine itself: nobody waits for ever, and the cause is named."""
    e, gate = engine(), threading.Event()

    def broken() -> list[Event]:
        gate.wait(10)
        raise AssertionError("a page is owned twice")

    monkeypatch.setattr(e, "step", broken)

    async def main() -> None:
        serving = AsyncEngine(e)
        gate.set()
        try:
            stream = await serving.stream(asked(1))
            with pytest.raises(Closed) as told:
                await anext(stream)
            assert "owned twice" in repr(told.value.__cause__)
        except Closed:  # the thread was faster than the call
            pass
        with pytest.raises(Closed, match="owned twice"):
            await asyncio.wait_for(serving.stream(asked(2)), 5)
        assert serving.error is not None

    asyncio.run(main())


def test_a_loop_that_closed_hurts_nobody_else() -> None:
    """A call whose loop went away while a step ran, and a stream in it: others go on."""
    gate = threading.Event()
    e = engine(gate)
    serving = AsyncEngine(e)

    async def leaves() -> None:
        kept.append(await serving.stream(asked(3, 60)))
        await asyncio.sleep(0.05)  # its first step hangs
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(serving.call(lambda e: e.idle), 0.05)

    kept: list[Stream] = []
    asyncio.run(leaves())
    gate.set()

    async def main() -> None:
        request = await asyncio.wait_for(serving.generate(asked(7)), 10)
        assert request.output == [8, 9, 10, 11, 12]
        await asyncio.wait_for(serving.close(), 10)

    asyncio.run(main())
    assert serving.error is None
    assert kept[0].request.finish == "abort"
    e.audit()


def test_a_request_whose_caller_gave_up_is_aborted() -> None:
    """Timed out while it was handed over, behind a long step."""
    gate = threading.Event()
    late = asked(5, 60)

    async def main() -> None:
        async with AsyncEngine(engine(gate)) as serving:
            stream = await serving.stream(asked(1, 3))
            await asyncio.sleep(0.05)  # its first step hangs
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(serving.generate(late), 0.05)
            gate.set()
            assert len(tokens([event async for event in stream])) == 3
            await asyncio.wait_for(serving.drain(), 10)

    asyncio.run(main())
    assert late.finish in (None, "abort")
    assert len(late.output) < 60


def test_calls_may_abort_drain_and_raise_anything() -> None:
    def fails(error: BaseException):
        def call(_: Engine) -> None:
            raise error

        return call

    gate = threading.Event()

    async def main() -> None:
        async with AsyncEngine(engine(gate)) as serving:
            aborted = await serving.stream(asked(1, 60))
            await asyncio.sleep(0.05)  # its first step hangs, and the call comes behind it
            call = asyncio.create_task(serving.call(lambda e: e.abort(aborted.request)))
            await asyncio.sleep(0.05)
            gate.set()
            await call
            assert [event.finish async for event in aborted][-1] == "abort"
            drained = await serving.stream(asked(9, 30))
            await serving.call(lambda e: len(e.drain()))
            assert [event.finish async for event in drained][-1] == "length"
            for error, kind in ((StopIteration(), RuntimeError), (KeyError("x"), KeyError)):
                with pytest.raises(kind):
                    await asyncio.wait_for(serving.call(fails(error)), 5)
            with pytest.raises(asyncio.CancelledError):
                await serving.call(fails(asyncio.CancelledError()))
            assert (await serving.generate(asked(7))).output == [8, 9, 10, 11, 12]

    asyncio.run(main())


def test_closing_behind_a_hanging_step_can_be_given_up() -> None:
    gate = threading.Event()

    async def main() -> AsyncEngine:
        serving = AsyncEngine(engine(gate))
        stream = await serving.stream(asked(1))
        await asyncio.sleep(0.05)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(serving.close(), 0.05)
        await stream.aclose()
        return serving

    serving = asyncio.run(main())
    assert not gate.is_set()
    gate.set()
    serving._thread.join(10)
    assert not serving._thread.is_alive()


def test_a_stream_may_be_collected_inside_a_call() -> None:
    """The garbage collector runs where it likes, also in the thread that hands over a call."""
    serving = AsyncEngine(engine())

    def inside() -> None:
        with serving._lock:
            serving._put(lambda: None)

    thread = threading.Thread(target=inside, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    asyncio.run(serving.close())


def test_a_step_that_hangs_is_seen() -> None:
    gate = threading.Event()

    async def main() -> None:
        async with AsyncEngine(engine(gate)) as serving:
            assert serving.step_s == 0
            stream = await serving.stream(asked(1))
            await asyncio.sleep(0.1)
            assert serving.step_s > 0.05
            gate.set()
            assert len(tokens([e async for e in stream])) == 5
            await asyncio.sleep(0.05)
            assert serving.step_s == 0

    asyncio.run(main())
