"""A request does not spend its time on one host while another could answer. The hosts are scripts, the clock jumps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

import pytest

from disagg.api.events import Event, ShippedEvent
from disagg.api.status import Load
from disagg.errors import DisaggError, Overloaded, RequestError
from disagg.inference.attempts.answer import FALLBACK_WARNING
from disagg.inference.hosts.view import HostView
from disagg.inference.policy import RetryPolicy, Timeouts, longest_wait_s
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
    ("left_s", "in_queue", "first_kv"),
    [(900.0, 300, 10), (600.0, 200, 10), (60.0, 20, 10), (24.0, 8, 8), (9.0, 3, 3), (6.0, 2, 2), (1.0, 2, 2)],
)
def test_a_request_waits_a_third_of_its_time_in_a_queue_and_for_kv_if_another_host_could_take_over(
    left_s: float, in_queue: float, first_kv: float
) -> None:
    assert min(longest_wait_s(left_s), Timeouts().queue) == in_queue
    assert Timeouts().within(left_s) == Timeouts(first_kv=first_kv)


@pytest.mark.parametrize(
    ("left_s", "connect", "silence", "stall", "whole_connect"),
    [(600.0, 200, 200, 200, 200), (60.0, 20, 20, 20, 20), (24.0, 8, 8, 10, 8), (9.0, 3, 4, 10, 5), (1.0, 2, 4, 10, 5)],
)
def test_a_wait_after_which_a_host_counts_as_failed_is_never_shorter_than_by_default(
    left_s: float, connect: float, silence: float, stall: float, whole_connect: float
) -> None:
    long = Timeouts(connect=900.0, silence=900.0, stall=900.0, whole_connect=900.0, whole_silence=900.0)
    cut = replace(long, connect=connect, silence=silence, stall=stall, whole_connect=whole_connect)
    assert long.within(left_s) == replace(cut, first_kv=long.within(left_s).first_kv)


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
    async with client_of(RetryPolicy(timeouts=Timeouts(silence=300.0, stall=300.0)), **hosts) as (client, _):
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


def full(name: str, queue: int = 3) -> Load:
    return Load("ok", boot_id=name, queue=queue, running=1, running_limit=1)


def begins_after(seconds: int, *, beats: int) -> Script:
    """A request waits so long in the queue of a host whose engine finishes so many pieces of work a second."""

    async def begins(body: Body) -> Events:
        for second in range(seconds):
            await asyncio.sleep(1.0)
            yield progress("queued", beats * second)
        async for event in whole(body):
            yield event

    return begins


@clockless
@pytest.mark.parametrize("beats", [1, 0])
async def test_a_place_in_a_queue_is_kept_while_the_other_host_is_full(beats: int) -> None:
    """Also if the engine does nothing meanwhile: all its KV memory may be reserved for prompts that others compute."""
    async with client_of(d1={"generate": begins_after(40, beats=beats)}, d2={"generate": whole}) as (client, hosts):
        hosts["d2"].load = full("d2")
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode", timeout=90)
    assert answer.metrics.decode_server == "d1" and not hosts["d2"].asked


@clockless
async def test_a_queue_that_moves_is_left_for_the_host_that_has_room_not_for_the_next_best_of_before() -> None:
    moves = {"generate": begins_after(80, beats=1)}
    async with client_of(d1=moves, d2=moves, d3={"generate": whole}) as (client, hosts):
        for name, queue in (("d1", 1), ("d2", 2), ("d3", 3)):
            hosts[name].load = full(name, queue)
        await client.connect()
        asyncio.get_running_loop().call_later(10, setattr, hosts["d3"], "load", Load("ok", boot_id="d3"))
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode", timeout=90)
    assert answer.metrics.decode_server == "d3" and hosts["d1"].asked and not hosts["d2"].asked


@clockless
async def test_of_all_requests_in_a_prefill_hosts_queue_one_leaves_for_one_free_place() -> None:
    async def answers_when_a_prompt_was_shipped(body: Body) -> Events:
        yield slot(body)
        for _ in range(60 * 2):
            await asyncio.sleep(0.5)
            yield progress("waiting for KV")
            if hosts["p2"].asked:
                break
        async for event in waiting("receiving KV", seconds=3):
            yield event
        yield tokens(0)
        yield done(body)

    async def ships(_: Body) -> Events:
        hosts["p2"].load = full("p2")
        yield NOTHING_SHIPPED

    p1, p2 = {"prefill": begins_after(80, beats=1)}, {"prefill": ships}
    async with client_of(d1={"decode": answers_when_a_prompt_was_shipped}, p1=p1, p2=p2) as (client, hosts):
        hosts["p2"].load = Load("ok", boot_id="p2", queue=3, running=1, queue_tokens=10_000)
        await client.connect()
        loop = asyncio.get_running_loop()
        requests = [
            asyncio.ensure_future(client.generate("m", tokens=[1, 2], max_tokens=1, timeout=90)) for _ in range(4)
        ]
        loop.call_later(40, setattr, hosts["p2"], "load", Load("ok", boot_id="p2"))
        answers = await asyncio.gather(*requests)
    assert len(hosts["p2"].asked) == 1 and len(hosts["p1"].asked) == 4
    assert {answer.metrics.method for answer in answers} == {"disaggregated"}


@clockless
async def test_a_request_whose_kv_has_arrived_waits_for_its_place_in_the_batch_though_another_host_has_room() -> None:
    async def batch_is_full(body: Body) -> Events:
        yield slot(body)
        async for event in waiting("queued", seconds=40):
            yield event
        for token in range(body["sampling"]["max_tokens"]):
            yield tokens(token)
        yield done(body)

    async def ships(_: Body) -> Events:
        yield NOTHING_SHIPPED

    d1, p1 = {"decode": batch_is_full}, {"prefill": ships}
    async with client_of(d1=d1, d2={"decode": batch_is_full}, p1=p1) as (client, hosts):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, timeout=60)
    assert answer.metrics.decode_server == "d1" and not hosts["d2"].asked


@clockless
async def test_how_long_kv_is_waited_for_is_a_third_of_the_time_that_is_left_when_it_is_ordered() -> None:
    async def slot_is_late(body: Body) -> Events:
        async for event in waiting("queued", seconds=45):
            yield event
        yield slot(body)
        async for event in waiting("waiting for KV"):
            yield event

    async def sends_nothing(_: Body) -> Events:
        async for event in waiting("sending KV"):
            yield event

    d1 = {"decode": slot_is_late, "generate": whole}
    ends = {"prefill": sends_nothing}
    async with client_of(RetryPolicy(prefill_attempts=1), d1=d1, p1=ends, p2=ends) as (client, _):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, timeout=60)
    assert answer.warnings[-1].startswith(f"{FALLBACK_WARNING}: no KV has arrived 5 s after its prefill began")


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
    async with client_of(RetryPolicy(timeouts=Timeouts(figures=300.0)), **hosts) as (client, _):
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


@clockless
async def test_closing_a_client_ends_requests_that_wait_for_a_busy_host() -> None:
    async def busy(_: Body) -> Events:
        error = Overloaded("the queue is full")
        error.retry_after_s = 300
        yield progress("queued")
        yield error

    async with client_of(d1={"generate": busy}) as (client, _):
        stream = client.stream("m", tokens=[1, 2], timeout=600)
        assert (await anext(stream)).note.startswith("waiting: ")
        began = time.monotonic()
        await client.aclose()
        with pytest.raises(RequestError, match="this client is closed"):
            await anext(stream)
        assert time.monotonic() - began < 100
