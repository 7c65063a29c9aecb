"""How a client finds out which hosts are up, and that no request fails for a host that is. The clock jumps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from disagg.errors import ServerUnavailable
from disagg.inference.client import AsyncClient
from disagg.inference.hosts import background
from disagg.inference.hosts.breaker import Breaker
from disagg.inference.hosts.view import UNKNOWN, HostView
from tests.inference.scripted import Script, ScriptedHost, scripted, silent, whole

pytestmark = pytest.mark.usefixtures("virtual_time")
Hosts = dict[str, ScriptedHost]
DOWN = UNKNOWN.missed().missed()


@asynccontextmanager
async def client_of(**hosts: Mapping[str, Script]) -> AsyncIterator[tuple[AsyncClient, Hosts]]:
    async with scripted(**hosts) as (fleet, scripts), AsyncClient(fleet, token="t") as client:
        yield client, scripts


async def seconds_of_a_request(client: AsyncClient) -> float:
    began = time.monotonic()
    await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode")
    return time.monotonic() - began


@asynccontextmanager
async def watched(client: AsyncClient, seconds: float) -> AsyncIterator[None]:
    """The block runs after the view has been kept fresh for so long, and it still is."""
    with client.watching():
        await asyncio.sleep(seconds)
        yield


async def test_no_request_fails_because_every_host_is_slow_to_state_its_load() -> None:
    """Each takes longer than the interval, always: they are down for moments only."""
    async with client_of(d1={"generate": whole}, d2={"generate": whole}) as (client, hosts):
        for host in hosts.values():
            host.load_s = 2.5
        async with watched(client, 30):
            waits = [await seconds_of_a_request(client) for _ in range(20)]
    assert max(waits) < 1


async def test_a_host_whose_answer_came_while_this_process_was_stopped_is_up(
    virtual_time: Callable[[float], None],
) -> None:
    async with client_of(d1={"generate": whole}) as (client, hosts):
        hosts["d1"].loaded = lambda: virtual_time(3.0)
        for _ in range(3):
            await client._driver.refresher.read(client.fleet.engine_hosts)
            assert client.view.of("d1").misses == 0


async def test_a_host_that_states_nothing_is_down_after_two_intervals() -> None:
    async with client_of(d1={"load": silent}) as (client, _), watched(client, background.FIRST_S + 1.5):
        assert client.view.of("d1").misses == 1
        await asyncio.sleep(1.0)
        assert client.view.of("d1").obstacle(time.monotonic()) == "down"


async def test_a_silent_host_is_asked_again_when_its_question_is_given_up() -> None:
    async with client_of(d1={"load": silent}, d2={}) as (client, hosts):
        async with watched(client, background.FIRST_S + 2 * (background.PATIENCE_S + background.INTERVAL_S) + 1.0):
            assert len(hosts["d1"].asked) == 3
        assert client.view.of("d2").reachable == "up"


@pytest.mark.parametrize(
    "seen",
    [
        DOWN,
        HostView("up", breaker=Breaker(9, ejections=6, until=1e9)),
        HostView("up", breaker=Breaker(1, 1, 0.0, True)),
    ],
    ids=["down", "failed lately", "found out about by another request"],
)
async def test_a_request_fails_for_want_of_a_host_only_after_it_has_asked_every_host_itself(
    seen: HostView, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(d1={"generate": whole}) as (client, _), watched(client, 1):
        monkeypatch.setattr(client._driver.refresher, "due", lambda _: [])  # the view is out of date
        client.view.hosts["d1"] = seen
        assert 10 <= await seconds_of_a_request(client) < 11


async def test_the_error_of_a_request_without_a_host_states_why_each_was_left_out() -> None:
    async with client_of(d1={"load": silent}) as (client, _), watched(client, 5):
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match=r"no decode host of m is up \(d1: down\)"):
            await seconds_of_a_request(client)
    assert 10 <= time.monotonic() - began < 15


async def test_closing_a_client_ends_its_questions() -> None:
    async with client_of(d1={"load": silent}) as (client, _):
        await client.connect()
        assert client._driver.refresher._asking
        await client.aclose()
        assert not client._driver.refresher._asking
