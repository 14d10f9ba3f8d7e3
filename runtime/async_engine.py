"""An `Engine` in a thread of its own, for asyncio.

    async with AsyncEngine(engine) as serving:
        async for event in await serving.stream(Request(prompt=(0, 17, 42))):
            event.text

The thread alone touches the engine: calls are handed to it and run between two steps. Any number
of tasks and event loops may use one `AsyncEngine`.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

from runtime.engine import Engine
from runtime.request import Event, Request

log = logging.getLogger(__name__)
T = TypeVar("T")


class Closed(RuntimeError):
    """The engine takes no more requests: it was closed, drained, or its thread has failed."""


def _post(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *values: Any) -> bool:
    """Call something in a loop, from the engine's thread; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(what, *values)
    except RuntimeError:
        return False
    return True


class _Inbox:
    """Events of one request on their way to the loop that waits for them."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self._loop = request, loop
        self.events: asyncio.Queue[Event | BaseException] = asyncio.Queue()

    def put(self, event: Event | BaseException) -> bool:
        """From the engine's thread. False if its loop was closed: nobody waits any more."""
        return _post(self._loop, self.events.put_nowait, event)


class Stream:
    """Events of one request until it ends. One that is closed or dropped before aborts it."""

    def __init__(self, inbox: _Inbox, abort: Callable[[], object]) -> None:
        """`abort` returns at once, and may be called from any thread."""
        self._inbox, self._abort = inbox, abort
        self._ended = False
        self.request = inbox.request

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    async def __anext__(self) -> Event:
        """The next event; after the last, raises what ended the request with an error."""
        if self._ended:
            raise StopAsyncIteration
        event = await self._inbox.events.get()
        if isinstance(event, BaseException):
            self._ended = True
            raise Closed("the engine has stopped") from event
        if event.finish is not None:
            self._ended = True
            if event.finish == "error" and event.request.error is not None:
                raise event.request.error
        return event

    async def aclose(self) -> None:
        """Abort the request if it has not ended."""
        self._leave()

    def __del__(self) -> None:
        """A client that went away must not hold its slot to the end."""
        self._leave()

    def _leave(self) -> None:
        if not self._ended:
            self._ended = True
            self._abort()


class AsyncEngine:
    """Steps an engine as long as it has work, and sleeps while it has none."""

    def __init__(self, engine: Engine) -> None:
        """Start the thread. Nobody else may use `engine` from now on."""
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._inboxes: dict[int, _Inbox] = {}
        self._idle: list[Callable[[], object]] = []  # to be called when nothing is left
        self._after: list[Callable[[], object]] = []  # to be called when the thread ends
        self._refusal: str | None = None  # why nothing more is taken
        self._stop = False
        self._left = False  # the thread answers no more calls
        # Of `_left` and the end of `_calls`. A stream may be collected while its thread holds it.
        self._lock = threading.RLock()
        self._step_began_s: float | None = None
        self.error: BaseException | None = None  # what ended the thread
        self._thread = threading.Thread(target=self._run, name="dsv4 engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    @property
    def step_s(self) -> float:
        """How long the step that now runs has been running, in seconds; 0 between steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    async def stream(self, request: Request) -> "Stream":
        """Add a request; its events until it ends: `async for event in await stream(request)`.

        Refusals come from this call: ValueError, `Overloaded`, or `Closed`. The iterator raises
        what ended the request with an error. To drop it, or to close it, is to abort.
        """
        return await self._open(lambda: self._engine.add(request))

    async def fork(self, request: Request, **changes: Any) -> "Stream":
        """`Engine.fork`, and the events of the new request; each holds it as `event.request`."""
        return await self._open(lambda: self._engine.fork(request, **changes))

    async def _open(self, make: Callable[[], Request]) -> "Stream":
        loop = asyncio.get_running_loop()

        def add() -> Stream:
            if self._refusal is not None:
                raise Closed(self._refusal)
            request = make()
            inbox = self._inboxes[request.id] = _Inbox(request, loop)
            return Stream(inbox, lambda: self._put(lambda: self._abort(request)))

        # Where this call is cancelled, nobody gets the stream, and it ends as one that is dropped.
        return await self._call(add)

    async def generate(self, request: Request) -> Request:
        """Run a request to its end; the same request. Raises as `stream`."""
        async for _ in await self.stream(request):
            pass
        return request

    async def abort(self, request: Request) -> None:
        """End a request; its iterator ends with an event whose finish is "abort"."""
        await self._call(lambda: self._abort(request))

    async def call(self, what: Callable[[Engine], T]) -> T:
        """Do anything with the engine between two steps: fork, export, cache_report, ..."""
        return await self._call(lambda: what(self._engine))

    async def drain(self) -> None:
        """Take no more requests and wait until those that were taken have ended."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def register() -> None:
            self._refusal = self._refusal or "the engine drains: it takes no more requests"
            self._idle.append(lambda: _post(loop, done.set))

        await self._call(register)
        await done.wait()

    async def close(self) -> None:
        """Abort what is left and end the thread."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def stop() -> None:
            self._after.append(lambda: _post(loop, done.set))
            self._refusal, self._stop = self._refusal or "the engine is closed", True

        if self._put(stop):
            await done.wait()

    # In the thread.

    async def _call(self, what: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if answer.done():  # cancelled meanwhile: a stream that is dropped here aborts
                return
            if isinstance(error, StopIteration):  # no future can hold one
                answer.set_exception(RuntimeError(repr(error)))
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)

        def run() -> None:
            try:
                value, error = what(), None
            except BaseException as caught:  # theirs, not the thread's
                value, error = None, caught
            _post(loop, settle, value, error)

        if not self._put(run):
            raise Closed(self._refusal or "the engine is closed") from self.error
        return await answer

    def _put(self, run: Callable[[], None]) -> bool:
        """Hand a call to the thread; False if it answers no more."""
        with self._lock:
            if not self._left:
                self._calls.put(run)
            return not self._left

    def _abort(self, request: Request) -> None:
        if request.finish is None:
            self._engine.abort(request)
            self._tell(Event(request, (), "", (), "abort"))

    def _run(self) -> None:
        try:
            while not self._stop:
                self._take(wait=self._engine.idle)
                self._step_began_s = time.monotonic()
                events = self._engine.step()
                self._step_began_s = None
                for event in events:
                    self._tell(event)
                self._end()
                if self._engine.idle:
                    for told in self._idle:
                        told()
                    self._idle.clear()
        except BaseException as error:  # ours: a request's own errors end that request alone
            log.exception("the engine's thread has failed")
            self.error = error
            self._refusal = f"the engine's thread has failed: {error!r}"
        finally:
            self._leave()

    def _take(self, *, wait: bool) -> None:
        """Run the calls that came in; wait for one where there is nothing else to do."""
        if wait and not self._idle:
            self._calls.get()()
        while not self._calls.empty():
            self._calls.get()()

    def _tell(self, event: Event) -> None:
        inbox = self._inboxes.get(event.request.id)
        if inbox is None:
            return
        heard = inbox.put(event)
        if event.finish is not None or not heard:
            del self._inboxes[event.request.id]
        if not heard and event.request.finish is None:
            log.warning("the event loop of request %d is closed: aborted", event.request.id)
            self._engine.abort(event.request)

    def _end(self) -> None:
        """End the streams of requests that ended without an event, by an abort in a call."""
        for inbox in tuple(self._inboxes.values()):
            if inbox.request.finish is not None:
                self._tell(Event(inbox.request, (), "", (), inbox.request.finish))

    def _leave(self) -> None:
        """Leave nobody waiting: neither those with requests nor those whose call came too late."""
        self._step_began_s = None
        self._refusal = self._refusal or "the engine is closed"
        with self._lock:
            self._left = True
        while not self._calls.empty():
            self._calls.get()()
        for inbox in tuple(self._inboxes.values()):
            if self.error is not None:
                inbox.put(self.error)
            else:
                self._abort(inbox.request)
        for told in (*self._idle, *self._after):
            told()
