"""Every wait of a request has a timeout of its own. The hosts are scripts, the clock jumps over their waits."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping

import pytest

from disagg.api.events import Event
from disagg.errors import DeadlineExceeded, DisaggError, Overloaded
from disagg.inference.attempts.answer import FALLBACK_WARNING
from disagg.inference.policy import RetryPolicy, Timeouts
from tests.inference.scripted import Body, Script, client_of, progress, queued, slot, stuck, waiting, whole

pytestmark = pytest.mark.usefixtures("virtual_time")
Events = AsyncGenerator[Event | DisaggError, None]


async def slow(_: Body) -> Events:
    """Computes for ever, and its engine gets on."""
    beats = 0
    async for event in waiting("computing the prompt"):
        yield progress(event.phase, beats=(beats := beats + 1))


async def slot_without_kv(body: Body) -> Events:
    yield slot(body)
    async for event in waiting("waiting for KV"):
        yield event


def test_the_timeouts_of_a_request() -> None:
    assert dataclasses.asdict(Timeouts()) == {
        "connect": 2.0,
        "queue": 300.0,
        "first_kv": 10.0,
        "silence": 4.0,
        "stall": 10.0,
        "none_up": 10.0,
        "note": 2.0,
        "figures": 5.0,
        "lease": 10.0,
        "slow_transfer": 1.0,
        "blame": 0.2,
        "whole_connect": 5.0,
        "whole_first": 300.0,
        "whole_silence": 30.0,
    }


async def test_connect_a_host_that_accepts_no_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    plain, refusing = loop.create_connection, [0]

    async def create_connection(factory: type[asyncio.Protocol], host: str, port: int) -> object:
        if port in refusing:
            await asyncio.Event().wait()
        return await plain(factory, host, port)

    async with client_of(d1={"generate": whole}, d2={"generate": whole}) as (client, _):
        refusing[0] = client.fleet.hosts["d1"].port
        monkeypatch.setattr(loop, "create_connection", create_connection)
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode")
    assert answer.metrics.decode_server == "d2" and "no server answers" in answer.warnings[0]
    assert 2 <= answer.metrics.ttft_parts.failed_attempts < 3


async def test_queue_a_host_that_does_not_begin_counts_as_busy_and_another_one_answers() -> None:
    hosts: dict[str, Mapping[str, Script]] = {"d1": {"generate": queued}, "d2": {"generate": whole}}
    async with client_of(RetryPolicy(timeouts=Timeouts(queue=8.0)), **hosts) as (client, _):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode")
        assert not client.view.of("d1").obstacle(time.monotonic())
    assert answer.metrics.decode_server == "d2" and 8 <= answer.metrics.ttft_parts.failed_attempts < 10


async def test_first_kv_a_hand_off_whose_kv_never_begins_to_arrive_is_given_up() -> None:
    d1, p1 = {"decode": slot_without_kv, "generate": whole}, {"prefill": slow}
    async with client_of(d1=d1, p1=p1) as (client, hosts):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2)
    assert [path for path, _ in hosts["d1"].asked] == ["/decode", "/decode", "/generate"]
    assert answer.warnings[0].startswith(f"{FALLBACK_WARNING}: no KV has arrived 10 s after its prefill began")


async def test_stall_a_host_whose_engine_finishes_nothing_is_given_up() -> None:
    async with client_of(d1={"generate": stuck}, d2={"generate": whole}) as (client, _):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode")
    assert answer.metrics.decode_server == "d2" and "made no progress for 10 s" in answer.warnings[0]
    assert 10 <= answer.metrics.ttft_parts.failed_attempts < 13


async def test_a_request_ends_by_its_timeout_even_if_its_host_gets_on() -> None:
    async with client_of(d1={"generate": slow}) as (client, _):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="no full answer within 20 s"):
            await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode", timeout=20)
        assert 20 <= time.monotonic() - began < 21


async def test_a_host_that_is_busy_after_it_has_begun_to_answer_is_asked_again_when_it_said() -> None:
    async def busy_once(body: Body) -> Events:
        if asked:
            async for event in whole(body):
                yield event
            return
        asked.append(time.monotonic())
        yield progress("queued")
        overloaded = Overloaded("the KV memory is full")
        overloaded.retry_after_s = 8
        yield overloaded

    asked: list[float] = []
    async with client_of(d1={"generate": busy_once}) as (client, hosts):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode")
    assert len(hosts["d1"].asked) == 2 and answer.metrics.completion_tokens == 2
    assert 6 <= answer.metrics.ttft_parts.failed_attempts <= 11


async def test_a_decode_host_that_answers_500_is_followed_by_another() -> None:
    async def failing(_: Body) -> Events:
        yield DisaggError("internal error in the server")

    async with client_of(d1={"generate": failing}, d2={"generate": whole}) as (client, hosts):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode")
    assert answer.metrics.decode_server == "d2" and len(hosts["d1"].asked) == 1
    assert answer.warnings == ("internal error in the server: asking d2",)
