"""Streams: what they hold when an answer ends, is cancelled, fails or is dropped. No server runs here."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from disagg.errors import Cancelled, RequestError, ServerUnavailable
from disagg.inference.stream import AsyncStream, Stream
from disagg.inference.types import Chunk, Completion
from tests.cli.answers import completion
from tests.deadlines import wait_until

Deliver = Callable[[Chunk], None]


class Answering:
    """Delivers "a" and "b", then waits for `go`, delivers "c" and completes or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.go = asyncio.Event()
        self.ended = False

    async def __call__(self, deliver: Deliver) -> Completion:
        try:
            deliver(Chunk("a", ()))
            deliver(Chunk("b", ()))
            await self.go.wait()
            if self.error is not None:
                raise self.error
            deliver(Chunk("c", ()))
            return completion("m", text="abc")
        finally:
            self.ended = True


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


async def test_a_stream_gives_chunks_only_and_then_has_the_completion() -> None:
    answering = Answering()
    answering.go.set()
    async with AsyncStream(answering) as stream:
        assert [chunk.text async for chunk in stream] == ["a", "b", "c"]
    assert stream.completion.text == stream.text == "abc"
    assert [chunk async for chunk in stream] == []


async def test_an_answer_is_read_while_nobody_reads_the_stream() -> None:
    async with AsyncStream(Answering()) as stream:
        await asyncio.sleep(0)
        assert stream.text == "ab"


async def test_a_cancelled_stream_keeps_its_text_and_has_no_completion() -> None:
    answering = Answering()
    async with AsyncStream(answering) as stream:
        assert (await anext(stream)).text == "a"
    assert answering.ended and stream.text == "ab"
    with pytest.raises(RequestError, match="not complete"):
        _ = stream.completion


async def test_a_failed_stream_gives_what_arrived_and_then_its_error() -> None:
    answering = Answering(ServerUnavailable("gone"))
    answering.go.set()
    texts = []
    async with AsyncStream(answering) as stream:
        with pytest.raises(ServerUnavailable, match="gone"):
            async for chunk in stream:
                texts.append(chunk.text)
    assert texts == ["a", "b"]
    with pytest.raises(RequestError, match="not complete"):
        _ = stream.completion


@pytest.mark.parametrize("error", [None, ServerUnavailable("gone")])
async def test_what_waits_in_a_stream_is_taken_at_once_and_its_end_comes_afterwards(error: Exception | None) -> None:
    answering = Answering(error)
    async with AsyncStream(answering) as stream:
        assert (await anext(stream)).text == "a"
        assert [chunk.text for chunk in stream.waiting()] == ["b"]
        assert stream.waiting() == []
        answering.go.set()
        await asyncio.wait((stream._task,))
        assert [chunk.text for chunk in stream.waiting()] == ([] if error else ["c"])
        assert stream.waiting() == []
        with pytest.raises(type(error) if error else StopAsyncIteration):
            await anext(stream)
    assert stream.text == ("ab" if error else "abc")


async def test_cancelling_the_task_that_reads_a_stream_cancels_its_request() -> None:
    answering = Answering()

    async def read() -> None:
        async for _ in AsyncStream(answering):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait((reading,))
    await asyncio.sleep(0.01)
    assert answering.ended


async def test_of_two_readers_the_one_that_is_cancelled_does_not_cancel_the_other() -> None:
    stream = AsyncStream(Answering())
    assert [(await anext(stream)).text for _ in "ab"] == ["a", "b"]
    cancelled, other = (asyncio.ensure_future(anext(stream)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait((cancelled, other), timeout=60)
    assert cancelled.cancelled()
    with pytest.raises(Cancelled, match="the request was cancelled"):
        other.result()


async def test_a_stream_that_is_dropped_unread_cancels_its_request() -> None:
    answering = Answering()
    stream = AsyncStream(answering)
    await asyncio.sleep(0.01)
    assert not answering.ended
    del stream
    gc.collect()
    await asyncio.sleep(0.01)
    assert answering.ended


def test_a_synchronous_stream_is_the_same(portal: BlockingPortal) -> None:
    answering = Answering()
    with Stream(portal, answering) as stream:
        assert [next(stream).text, next(stream).text] == ["a", "b"]
        portal.call(answering.go.set)
        assert [chunk.text for chunk in stream] == ["c"]
    assert stream.completion.text == "abc"


def test_a_synchronous_stream_that_is_closed_or_dropped_cancels_its_request(portal: BlockingPortal) -> None:
    closed, dropped = Answering(), Answering()
    with Stream(portal, closed) as stream:
        next(stream)
    other = Stream(portal, dropped)
    next(other)
    del other
    gc.collect()
    wait_until(lambda: closed.ended and dropped.ended, 60, "both requests to be cancelled")
    assert stream.text == "ab" and list(stream) == []


def test_ctrl_c_between_the_arrival_of_a_chunk_and_its_return_cancels_the_request(
    portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Python handles a signal that came while this thread waited for the interpreter's lock."""

    def interrupted(*arguments: object) -> Chunk:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "_chunk", interrupted)
    answering = Answering()
    with Stream(portal, answering) as stream:
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        wait_until(lambda: answering.ended, 10, "the request to end")


def test_a_chunk_has_the_time_of_its_arrival_not_of_its_reading(portal: BlockingPortal) -> None:
    async def perform(deliver: Deliver) -> Completion:
        deliver(Chunk("a", (), time.monotonic()))
        return completion("m", text="a")

    stream = Stream(portal, perform)
    wait_until(lambda: stream.text == "a", 60, "the chunk to arrive")
    now = time.monotonic()
    assert next(stream).arrived < now
