"""A request does not spend its time on one host while another could answer. The hosts are scripts, the clock jumps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict

import pytest

from disagg.api.events import Event, ShippedEvent
from disagg.api.status import Load
from disagg.errors import DisaggError, Overloaded
from disagg.inference.attempts.answer import FALLBACK_WARNING
from disagg.inference.hosts.view import HostView
from disagg.inference.policy import Timeouts, patience_s
from tests.inference.scripted import (
    Body,
    Script,
    client_of,
    done,
    progress,
    queued,
    silent,
    slot,
    stuck,
    tokens,
    waiting,
    whole,
)

clockless = pytest.mark.usefixtures("virtual_time")
Events = AsyncGenerator[Event | DisaggError, None]
NOTHING_SHIPPED = ShippedEvent(
    prompt_tokens=2,
    computed_tokens=1,
    held_tokens=0,
    kv_bytes=1,
    kv_wire="as-is",
    tokenise_s=0.0,
    queue_s=0.0,
    compute_s=0.0,
    hidden_transfer_s=0.0,
    exposed_transfer_s=0.0,
)


@pytest.mark.parametrize(
    ("left_s", "in_queue", "connect", "first_kv", "silence", "stall", "whole_first", "whole_silence"),
    [
        (900.0, 300, 2, 10, 4, 10, 300, 30),
        (600.0, 200, 2, 10, 4, 10, 200, 30),
        (60.0, 20, 2, 10, 4, 10, 20, 20),
        (24.0, 8, 2, 8, 4, 8, 8, 8),
        (9.0, 3, 2, 3, 3, 3, 3, 3),
        (6.0, 2, 2, 2, 2, 2, 2, 2),
        (1.0, 2, 2, 2, 2, 2, 2, 2),
    ],
)
def test_the_waits_for_one_host_are_a_third_of_the_time_that_is_left_if_another_could_take_over(
    left_s: float,
    in_queue: float,
    connect: float,
    first_kv: float,
    silence: float,
    stall: float,
    whole_first: float,
    whole_silence: float,
) -> None:
    assert min(patience_s(left_s), Timeouts().queue) == in_queue
    assert asdict(Timeouts().within(left_s)) == asdict(
        Timeouts(
            connect=connect,
            first_kv=first_kv,
            silence=silence,
            stall=stall,
            whole_connect=min(5.0, in_queue),
            whole_first=whole_first,
            whole_silence=whole_silence,
        )
    )


@pytest.mark.parametrize(
    ("load", "room"),
    [
        (None, True),
        (Load("ok", boot_id="b", running=1, running_limit=2), True),
        (Load("ok", boot_id="b", running=2, running_limit=2), False),
        (Load("ok", boot_id="b", queue=2, running_limit=2), False),
        (Load("ok", boot_id="b", running_limit=2, kv_bytes=96, kv_limit=100), False),
    ],
)
def test_a_host_has_room_if_it_would_begin_with_a_request_at_once(load: Load | None, room: bool) -> None:
    assert HostView(load=load).has_room is room


@clockless
@pytest.mark.parametrize("first", [queued, silent, stuck])
async def test_a_decode_host_that_does_not_get_on_is_left_while_another_can_still_answer(first: Script) -> None:
    hosts: dict[str, Mapping[str, Script]] = {"d1": {"generate": first}, "d2": {"generate": whole}}
    async with client_of(Timeouts(silence=300.0, stall=300.0), **hosts) as (client, _):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode", timeout=60)
    assert answer.metrics.decode_server == "d2" and answer.metrics.ttft_parts.failed_attempts >= 19


@clockless
async def test_a_prefill_host_that_states_for_ever_that_the_prompt_waits_is_left_for_another() -> None:
    async def answering_the_second(body: Body) -> Events:
        yield slot(body)
        while not hosts["p2"].asked:
            await asyncio.sleep(1.0)
            yield progress("waiting for KV")
        for token in range(body["sampling"]["max_tokens"]):
            yield tokens(token)
        yield done(body)

    async def ships(_: Body) -> Events:
        yield NOTHING_SHIPPED

    d1, p1, p2 = {"decode": answering_the_second}, {"prefill": queued}, {"prefill": ships}
    async with client_of(d1=d1, p1=p1, p2=p2) as (client, hosts):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, timeout=60)
    assert answer.metrics.method == "disaggregated" and answer.metrics.prefill_server == "p2"
    assert answer.metrics.ttft_parts.failed_attempts >= 20


@clockless
async def test_a_place_in_a_queue_that_moves_is_kept_while_the_other_host_is_full() -> None:
    async def begins_late(body: Body) -> Events:
        for beats in range(40):
            await asyncio.sleep(1.0)
            yield progress("queued", beats)
        async for event in whole(body):
            yield event

    async with client_of(d1={"generate": begins_late}, d2={"generate": whole}) as (client, hosts):
        hosts["d2"].load = Load("ok", boot_id="d2", queue=3, running=1, running_limit=1)
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode", timeout=90)
    assert answer.metrics.decode_server == "d1" and not hosts["d2"].asked


@clockless
async def test_a_host_that_comes_back_while_a_request_waits_in_a_queue_gets_it() -> None:
    async with client_of(d1={"generate": queued}, d2={"generate": whole}) as (client, hosts):
        hosts["d2"].load = Load("loading", boot_id="d2")
        asyncio.get_running_loop().call_later(30, setattr, hosts["d2"], "load", Load("ok", boot_id="d2"))
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode", timeout=60)
    assert answer.metrics.decode_server == "d2" and answer.metrics.ttft_parts.failed_attempts >= 30


@clockless
@pytest.mark.parametrize("phase", ["waiting for KV", "receiving KV"])
async def test_a_decode_host_that_waits_for_kv_which_was_sent_long_ago_is_left(phase: str) -> None:
    """The prefill host is so quick that it states no phase before its figures."""

    async def waits(body: Body) -> Events:
        yield slot(body)
        async for event in waiting(phase):
            yield event

    async def ships(_: Body) -> Events:
        yield NOTHING_SHIPPED

    async with client_of(d1={"decode": waits, "generate": whole}, p1={"prefill": ships}) as (client, _):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, timeout=60)
    assert answer.metrics.method == "fallback"
    assert answer.warnings[0].startswith(f"{FALLBACK_WARNING}: the KV has not arrived 10 s after it was sent")


@clockless
async def test_an_answer_that_is_complete_does_not_fail_because_the_prefill_hosts_figures_are_late() -> None:
    async def answers(body: Body) -> Events:
        yield slot(body)
        yield tokens(0)
        yield done(body)

    async def still_sending(_: Body) -> Events:
        async for event in waiting("sending KV"):
            yield event

    hosts: dict[str, Mapping[str, Script]] = {"d1": {"decode": answers}, "p1": {"prefill": still_sending}}
    async with client_of(Timeouts(figures=300.0), **hosts) as (client, _):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=1, timeout=60)
    assert answer.metrics.method == "disaggregated" and "the figures of p1 are missing" in answer.warnings[0]


@clockless
async def test_a_host_whose_retry_after_is_longer_than_the_request_is_asked_again_in_time() -> None:
    async def busy_at_first(body: Body) -> Events:
        if time.monotonic() < began + 5:
            overloaded = Overloaded("the queue is full")
            overloaded.retry_after_s = 90
            yield progress("queued")
            yield overloaded
            return
        async for event in whole(body):
            yield event

    began = time.monotonic()
    async with client_of(d1={"generate": busy_at_first}) as (client, _):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode", timeout=60)
    assert answer.metrics.completion_tokens == 2
