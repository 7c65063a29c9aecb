"""How many of a client's requests are at one host, and whose turn it is. The hosts are scripts, the clock jumps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack

import pytest

from disagg.api.events import Event
from disagg.api.requests import Share
from disagg.api.status import Load
from disagg.errors import DisaggError, Overloaded
from disagg.inference.hosts.breaker import CLOSED
from disagg.inference.hosts.places import HostPlace, HostPlaces
from disagg.inference.hosts.route import RouteRequest, rank
from tests.inference.hosts.test_route import candidates, load, seen
from tests.inference.scripted import Body, client_of, described_host, progress, whole

clockless = pytest.mark.usefixtures("virtual_time")
Events = AsyncGenerator[Event | DisaggError, None]
A, B, C = Share("a"), Share("b"), Share("c")
HOST = described_host("d1", 1)
FOUR = Load("ok", boot_id="b", running_limit=4 - HOST.queue_size)
PLACES = 1 + HOST.queue_size
"""Of a scripted host."""


def enter(places: HostPlaces, share: Share, count: int = 1) -> list[HostPlace]:
    return [places.enter(HOST, FOUR, share, 100, now=0.0) for _ in range(count)]


def test_a_key_over_its_share_has_no_more_requests_at_a_host_than_that_has_places() -> None:
    places = HostPlaces()
    enter(places, A, 4)
    with pytest.raises(Overloaded, match="d1 has no place for more than 4 requests of this client"):
        enter(places, A)
    enter(places, B, 2)
    with pytest.raises(Overloaded):
        enter(places, B)


def test_a_place_that_is_left_wakes_the_key_that_has_fewest_and_of_one_key_the_first_comer() -> None:
    places, woken, stack = HostPlaces(), list[str](), ExitStack()
    of_a, of_b = enter(places, A, 3), enter(places, B)

    def held_back(name: str, share: Share, since: float, *hosts: str) -> None:
        stack.enter_context(places.waiting(hosts, share, since, lambda: woken.append(name)))

    held_back("late", A, 2.0, "d1")
    held_back("elsewhere", A, 0.0, "d2")
    held_back("early", A, 1.0, "d1", "d2")
    held_back("other", B, 3.0, "d1")
    places.leave(of_a[0], now=0.0)
    assert woken == ["other"]
    enter(places, B)
    places.leave(of_b[0], now=0.0)
    assert woken == ["other", "early"], "b has one, and left one free that a may take"
    places.leave(of_b[0], now=0.0)
    assert len(woken) == 2, "a second end of the same request changes nothing"
    stack.close()


def test_who_no_longer_waits_is_not_woken() -> None:
    places, woken = HostPlaces(), list[int]()
    [place] = enter(places, A)
    with places.waiting(["d1"], A, 0.0, lambda: woken.append(1)):
        pass
    places.leave(place, now=0.0)
    assert woken == []


def test_the_prompts_of_another_key_are_not_ahead_of_those_of_a_key_without_any() -> None:
    view, hosts = seen(p1=load(queue_tokens=8000, prefill_tokens_s=1000.0), d1=load()), candidates("d1")
    view.places.enter(hosts.prefill[0], None, A, 8000, now=0.0)

    def queue_s(share: Share) -> float:
        return rank(view, RouteRequest(hosts, 1000, 100, share=share), now=0.0, start=0).prefill[0].costs["queue"]

    assert (queue_s(A), queue_s(B)) == (8.0, 0.0)
    view.places.enter(hosts.prefill[0], None, B, 1000, now=0.0)
    assert (queue_s(A), queue_s(B), queue_s(C)) == (8.0, 2.0, 0.0)


@clockless
async def test_of_more_requests_than_places_each_gets_its_turn_and_none_is_refused_by_the_host() -> None:
    running, most, answered = 0, 0, list[str]()

    async def generate(body: Body) -> Events:
        nonlocal running, most
        running += 1
        most = max(most, running)
        yield progress("queued")
        await asyncio.sleep(1.0)
        running -= 1
        answered.append(body["share"]["key"])
        async for event in whole(body):
            yield event

    async with client_of(d1={"generate": generate}) as (client, hosts):

        async def ask(key: str) -> None:
            await client.generate("m", tokens=[1, 2], max_tokens=1, alone="decode", share={"key": key}, timeout=600)

        await client.connect()  # its load states its places
        greedy = [asyncio.ensure_future(ask("greedy")) for _ in range(3 * PLACES)]
        while len(hosts["d1"].asked) < PLACES:
            await asyncio.sleep(0.01)
        await asyncio.gather(*(ask(f"modest {number}") for number in range(3)))
        assert sum(task.done() for task in greedy) < 2 * PLACES, "they do not wait behind those that are held back"
        await asyncio.gather(*greedy)
        assert client.view.of("d1").outstanding == 0
    assert most <= PLACES + 3 and len(answered) == len(hosts["d1"].asked) == 3 * PLACES + 3


@clockless
async def test_a_request_whose_place_is_yielded_in_the_queue_waits_and_asks_again_and_the_host_has_not_failed() -> None:
    asked = 0

    async def generate(body: Body) -> Events:
        nonlocal asked
        asked += 1
        yield progress("queued")
        if asked <= 2:
            error = Overloaded("d1 gave the place of this request to a key that has fewer", "try again in a moment")
            error.retry_after_s = 3
            yield error
            return
        async for event in whole(body):
            yield event

    async with client_of(d1={"generate": generate}) as (client, _):
        answer = await client.generate("m", tokens=[1, 2], max_tokens=2, alone="decode", timeout=60)
        assert client.view.of("d1").breaker == CLOSED
    assert asked == 3 and len(answer.tokens) == 2
    assert [one for one in answer.warnings if "gave the place" in one] == [
        "waiting: d1 is busy: d1 gave the place of this request to a key that has fewer"
    ]
    assert answer.metrics.ttft >= 2 * 3 * 0.75


@clockless
async def test_a_request_whose_place_is_yielded_again_and_again_ends_by_its_deadline() -> None:
    async def generate(_: Body) -> Events:
        yield progress("queued")
        yield Overloaded("d1 gave the place of this request to a key that has fewer", "try again in a moment")

    async with client_of(d1={"generate": generate}) as (client, _):
        with pytest.raises(Overloaded, match="every host was busy until the request's deadline: d1 gave the place"):
            await client.generate("m", tokens=[1, 2], alone="decode", timeout=20)
