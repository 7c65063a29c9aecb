"""Hosts that have a request and send nothing: how soon they are given up, and which one is to blame."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator

import pytest

from disagg.api.events import Event
from disagg.errors import DisaggError, Overloaded
from disagg.inference.attempts.answer import FALLBACK_WARNING
from disagg.inference.client import AsyncClient
from disagg.inference.http.connections import HostRequest
from disagg.inference.policy import Timeouts
from tests.inference.scripted import Body, client_of, scripted, silent, slot, tokens, waiting, whole

pytestmark = pytest.mark.usefixtures("virtual_time")
SILENCE_S = Timeouts().silence
Events = AsyncGenerator[Event | DisaggError, None]


async def slot_then_progress(body: Body) -> Events:
    yield slot(body)
    async for event in waiting("waiting for KV"):
        yield event


async def slot_then_silence(body: Body) -> Events:
    yield slot(body)
    await asyncio.Event().wait()


async def computing(_: Body) -> Events:
    beats = 0
    async for event in waiting("computing the prompt"):
        yield type(event)(phase=event.phase, beats=(beats := beats + 1))


async def busy(_: Body) -> Events:
    yield Overloaded("the queue is full")


async def two_tokens_then_silence(body: Body) -> Events:
    yield tokens(0)
    yield tokens(1)
    await asyncio.Event().wait()


async def test_a_silent_prefill_host_is_given_up_and_the_decode_host_computes_the_prompt() -> None:
    d1 = {"decode": slot_then_progress, "generate": whole}
    async with scripted(d1=d1, p1={"prefill": silent}) as (fleet, _), AsyncClient(fleet, token="t") as client:
        answer = await client.generate("m", tokens=[1, 2], max_tokens=3)
    assert answer.metrics.method == "fallback"
    assert answer.warnings[0].startswith(f"{FALLBACK_WARNING}: p1 ") and "did not answer in time" in answer.warnings[0]
    assert SILENCE_S <= answer.metrics.ttft_parts.failed_attempts < SILENCE_S + 1


async def test_a_host_that_states_only_what_no_client_knows_counts_as_silent() -> None:
    """Bytes alone are no sign that it works: its request would last until the deadline."""
    for strange in (b"event: news\ndata: {}\n\n", b":\n", b"x"):

        async def states(_: Body, strange: bytes = strange) -> AsyncGenerator[bytes, None]:
            while True:
                yield strange
                await asyncio.sleep(1)

        async with client_of(d1={"generate": states}, d2={"generate": whole}) as (client, _):
            answer = await client.generate("m", tokens=[1, 2], max_tokens=3, alone="decode")
        assert answer.metrics.decode_server == "d2"
        assert SILENCE_S <= answer.metrics.ttft_parts.failed_attempts < SILENCE_S + 2


async def test_if_both_hosts_of_a_hand_off_are_silent_the_one_that_was_to_send_the_kv_is_to_blame() -> None:
    """The decode host was starved while it waited for the KV; the prefill host has sent nothing at all."""
    d1 = {"decode": slot_then_silence, "generate": whole}
    async with scripted(d1=d1, p1={"prefill": silent}) as (fleet, _), AsyncClient(fleet, token="t") as client:
        answer = await client.generate("m", tokens=[1, 2], max_tokens=3)
    assert answer.metrics.method == "fallback" and answer.metrics.decode_server == "d1"
    assert answer.warnings[0].startswith(f"{FALLBACK_WARNING}: p1 ")


async def test_a_silent_decode_host_is_to_blame_if_the_prefill_host_still_sends_events() -> None:
    d1, p1 = {"decode": slot_then_silence, "generate": whole}, {"prefill": computing, "generate": whole}
    async with scripted(d1=d1, p1=p1) as (fleet, _), AsyncClient(fleet, token="t") as client:
        answer = await client.generate("m", tokens=[1, 2], max_tokens=3)
    assert answer.metrics.method == "prefill-alone"
    assert answer.warnings[0].startswith("d1 ") and "did not answer in time" in answer.warnings[0]


async def test_a_host_that_falls_silent_in_mid_answer_is_given_up_in_seconds() -> None:
    d1, d2 = {"generate": two_tokens_then_silence}, {"generate": whole}
    async with scripted(d1=d1, d2=d2) as (fleet, hosts), AsyncClient(fleet, token="t", start=0) as client:
        began = time.monotonic()
        answer = await client.generate("m", tokens=[1, 2], max_tokens=4, alone="decode")
        assert SILENCE_S <= time.monotonic() - began < SILENCE_S + 1
    assert [token.id for token in answer.tokens] == [0, 1, 2, 3]
    assert hosts["d2"].asked[0][1]["answer_tokens"] == [0, 1] and "did not answer in time" in answer.warnings[0]


async def test_only_the_first_request_pays_for_a_silent_host() -> None:
    """Every request would begin there if its failure were not remembered."""
    d1, d2, waits = {"generate": silent}, {"generate": whole}, []
    async with scripted(d1=d1, d2=d2) as (fleet, _), AsyncClient(fleet, token="t", start=0) as client:
        for _ in range(5):
            answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode")
            waits.append(answer.metrics.ttft_parts.failed_attempts)
    assert waits[0] >= SILENCE_S and waits[1:] == [0, 0, 0, 0]


async def test_a_busy_prefill_host_is_waited_for_and_nothing_is_recomputed() -> None:
    d1 = {"decode": slot_then_progress, "generate": whole}
    async with scripted(d1=d1, p1={"prefill": busy}) as (fleet, hosts), AsyncClient(fleet, token="t") as client:
        stream, notes = client.stream("m", tokens=[1, 2], max_tokens=3, timeout=8), []
        with pytest.raises(Overloaded, match="busy until the request's deadline: the queue is full"):
            async for chunk in stream:
                notes.append(chunk.note)
    assert notes == ["waiting: p1 is busy: the queue is full"]
    assert {path for path, _ in hosts["d1"].asked} == {"/decode"}


async def test_a_request_that_waits_keeps_nothing_of_its_refused_attempts() -> None:
    """The body of each is the whole prompt."""
    kept: list[int] = []

    async def refuses(body: Body) -> Events:
        requests = [one for one in gc.get_objects() if type(one) is HostRequest]  # isinstance would ask proxies
        kept.append(sum(one.path == "/generate" and one.host is fleet.hosts["d1"] for one in requests))
        if len(kept) < 4:
            yield Overloaded("the queue is full")
            return
        async for event in whole(body):
            yield event

    async with scripted(d1={"generate": refuses}) as (fleet, _), AsyncClient(fleet, token="t") as client:
        gc.disable()
        try:
            await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode")
        finally:
            gc.enable()
    assert kept == [1, 1, 1, 1]
