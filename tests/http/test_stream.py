"""Responses in parts: what a caller gets, and when it counts as gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from disagg.errors import Cancelled
from disagg.http.stream import PART_WRITER, BodyParts, event_bytes, running


class Sent:
    """What was sent. blocks: a caller that reads nothing after so many messages."""

    def __init__(self, blocks: int | None = None) -> None:
        self.messages: list[Message] = []
        self._blocks = blocks

    async def __call__(self, message: Message) -> None:
        if self._blocks is not None and len(self.messages) >= self._blocks:
            await asyncio.Event().wait()
        self.messages.append(message)

    @property
    def bodies(self) -> list[Any]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


class Writer:
    """A PartWriter whose parts are among what was sent."""

    writable = True

    def __init__(self, sent: Sent) -> None:
        self._sent = sent

    def write_part(self, part: bytes) -> None:
        self._sent.messages.append({"type": "http.response.body", "body": part})


def parts(sent: Sent, stall_s: float = 30.0) -> BodyParts:
    return BodyParts({"type": "http"}, sent, "text/plain", stall_s)


def test_an_event_has_its_name_before_its_data() -> None:
    assert (event_bytes(b"{}"), event_bytes(b"{}", "done")) == (b"data: {}\n\n", b"event: done\ndata: {}\n\n")


async def test_the_head_is_sent_with_the_first_part_and_only_once() -> None:
    sent = Sent()
    response = parts(sent)
    assert not response.started
    await response.part(b"one")
    await response.end(b"two")
    assert [message["type"] for message in sent.messages] == ["http.response.start", *["http.response.body"] * 2]
    assert sent.bodies == [b"one", b"two"]
    assert [message.get("more_body") for message in sent.messages[1:]] == [True, False]


async def test_an_empty_part_does_not_start_the_response() -> None:
    sent = Sent()
    await parts(sent).part(b"")
    assert sent.messages == []


@pytest.mark.parametrize("blocks", [0, 1])
async def test_a_caller_that_takes_nothing_for_the_stall_time_counts_as_gone(blocks: int) -> None:
    with pytest.raises(Cancelled, match="read nothing for"):
        await parts(Sent(blocks), 0.001).part(b"one")


async def test_a_quiet_response_is_kept_alive_until_it_ends() -> None:
    sent = Sent()
    response = parts(sent)
    keeping = asyncio.ensure_future(response.keep_alive(lambda: b"-", 0.0, 0.0))
    async with asyncio.timeout(30):
        while len(sent.bodies) < 3:
            await asyncio.sleep(0)
        await response.end(b"last")
        await keeping
    assert set(sent.bodies[:-1]) == {b"-"} and sent.bodies[-1] == b"last"


async def test_a_response_with_parts_of_its_own_is_not_kept_alive() -> None:
    sent = Sent()
    response = parts(sent)
    keeping = asyncio.ensure_future(response.keep_alive(lambda: b"-", 0.0, 0.0))
    async with asyncio.timeout(30):
        for _ in range(20):  # more parts than turns of the loop in which `keep_alive` looks
            await response.part(b"part")
            await asyncio.sleep(0)
        await response.end()
        await keeping
    assert b"-" not in sent.bodies


async def test_a_part_that_is_written_at_once_does_not_overtake_one_that_waits() -> None:
    """The caller takes something again: until the task of the part that waits runs, there is none to write at once."""
    sent, taking = Sent(), asyncio.Event()
    taking.set()

    async def send(message: Message) -> None:
        await taking.wait()
        await sent(message)

    response = BodyParts({"state": {PART_WRITER: Writer(sent)}}, send, "text/plain", 30.0)
    loop, sending = asyncio.get_running_loop(), [asyncio.ensure_future(response.part(b"1"))]

    def write_when_ready() -> None:
        if response.ready:
            response.write(b"4")
        else:
            loop.call_soon(write_when_ready)

    await sending[0]
    taking.clear()
    for part in (b"2", b"3"):
        sending.append(asyncio.ensure_future(response._body(part, more=True)))
        await asyncio.sleep(0)
    taking.set()
    loop.call_soon(write_when_ready)
    await asyncio.wait(sending)
    async with asyncio.timeout(30):
        while len(sent.bodies) < 4:
            await asyncio.sleep(0)
    assert sent.bodies == [b"1", b"2", b"3", b"4"]


async def test_what_runs_beside_the_block_has_ended_when_the_block_has() -> None:
    ended = []

    async def endless(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def fails() -> None:
        raise ValueError

    with pytest.raises(KeyError):
        async with running(endless("one"), endless("two"), fails()) as tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            raise KeyError
    assert sorted(ended) == ["one", "two"]
