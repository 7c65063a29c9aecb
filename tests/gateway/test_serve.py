"""The gateway's process on a socket: bounds on connections, and how it ends. No fleet is needed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest

from disagg.errors import PortInUse, ServerUnavailable
from disagg.gateway import serve
from disagg.gateway.watch.feed import FeedBounds
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.history import Filter, read
from disagg.gateway.watch.recorder import Recorder
from disagg.http.protocol import ConnectionBounds
from disagg.http.server import BoundedServer, listen
from disagg.inference.client import AsyncClient
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient, FakeStream

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


class Running:
    """A gateway that serves on a socket of this process."""

    def __init__(self, server: BoundedServer, port: int, task: asyncio.Task[None]) -> None:
        self.server, self.port, self.task = server, port, task
        self.url = f"http://127.0.0.1:{port}"


@asynccontextmanager
async def running(
    client: FakeClient,
    bounds: ConnectionBounds = serve.BOUNDS,
    keys: Path = fake_client.NO_KEYS,
    feed: FeedBounds = FeedBounds(),  # noqa: B008 - frozen
    drain_s: int = serve.DRAIN_S,
) -> AsyncIterator[Running]:
    listener = listen("127.0.0.1", 0, serve.HINTS)
    watch = GatewayWatch(cast(AsyncClient, client), feed=feed)
    application = fake_client.app(client, keys, watch)
    server = serve.GatewayServer(application, bounds=bounds, stopping=watch.feed.stop, drain_s=drain_s)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield Running(server, listener.getsockname()[1], task)
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 30)
        listener.close()


def new_http() -> httpx.AsyncClient:
    """Without the certificates of the whole web."""
    return httpx.AsyncClient(trust_env=False, verify=False, timeout=60)


async def test_a_connection_that_sends_no_request_is_closed() -> None:
    async with running(FakeClient(), replace(serve.BOUNDS, head_s=0.1)) as gateway:
        for start in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: "):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(start)
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()


async def test_idle_connections_make_room_for_new_ones() -> None:
    crowd = ConnectionBounds(connections=6, unproven=4, unproven_per_address=4, new_s=0.0)
    async with running(FakeClient("one "), crowd) as gateway, new_http() as http:
        idle = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(12)]
        answer = await http.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        assert answer.text.endswith("data: [DONE]\n\n")
        reader, _ = idle[0]
        assert await asyncio.wait_for(reader.read(), 30) == b""
        for _, writer in idle:
            writer.close()


async def test_a_caller_without_a_place_is_refused_and_health_is_still_answered() -> None:
    full = ConnectionBounds(connections=1)
    async with (
        running(FakeClient("one ", 60.0), full) as gateway,
        new_http() as http,
        new_http() as late,
        new_http() as router,
        http.stream("POST", f"{gateway.url}/v1/chat/completions", json=CHAT) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        refused = await late.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        health = await router.get(f"{gateway.url}/health")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
    assert refused.headers["retry-after"] == "1" and "x-request-id" in refused.headers
    assert health.status_code == 200


async def test_a_slow_answer_is_not_taken_for_a_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, ahead_s = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + ahead_s)
    client = FakeClient(serve.BOUNDS.head_s + 1, "late ")
    async with running(client) as gateway, new_http() as http:
        for requests in (1, 2):
            answer = asyncio.ensure_future(http.post(f"{gateway.url}/v1/chat/completions", json=CHAT))
            while len(client.streams) < requests:
                await asyncio.sleep(0.01)
            ahead_s += serve.BOUNDS.head_s + 2  # the timer of the head, if it still runs, is due before the fake's
            assert (await answer).text.endswith("data: [DONE]\n\n")


async def test_a_gateway_that_stops_lets_running_answers_finish() -> None:
    client = FakeClient("one ", 0.4, "two")
    async with running(client) as gateway, new_http() as http:
        async with http.stream("POST", f"{gateway.url}/v1/chat/completions", json=CHAT) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            gateway.server.should_exit = True
            rest = [line async for line in lines if line]
        await asyncio.wait_for(gateway.task, 30)
    assert rest[-1] == "data: [DONE]"


async def test_a_gateway_that_cannot_wait_any_longer_ends_answers_with_an_error() -> None:
    client = FakeClient("one ", 60.0)
    async with running(client, drain_s=0) as gateway, new_http() as http:
        async with http.stream("POST", f"{gateway.url}/v1/chat/completions", json=CHAT) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            gateway.server.should_exit = True
            rest = [line async for line in lines if line]
        await asyncio.wait_for(gateway.task, 30)
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "gateway_stopped"
    assert client.streams[0].closed


async def test_the_history_has_the_answers_that_the_gateways_stop_cut(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeStream, "close_s", 0.05)  # as a real one, which waits for its hosts' connections to close
    client, path = FakeClient("one ", 60.0), tmp_path / "history.db"
    watch = GatewayWatch(cast(AsyncClient, client), Recorder(path))
    listener = listen("127.0.0.1", 0, serve.HINTS)
    server = serve.GatewayServer(fake_client.app(client, watch=watch), stopping=watch.feed.stop, drain_s=0)

    async def ask() -> None:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
        async with new_http() as http, http.stream("POST", url, json=CHAT) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            server.should_exit = True
            async for _line in lines:
                pass

    asking = asyncio.ensure_future(ask())
    async with watch.watching():
        await asyncio.wait_for(server.serve(sockets=[listener]), 30)
    assert [entry.state for entry in read(path, Filter())] == ["cancelled"]
    asking.cancel()
    await asyncio.wait((asking,))
    listener.close()


async def test_the_official_client_does_not_repeat_what_was_already_retried_here() -> None:
    import openai  # a second, which other processes of a run do without

    client = FakeClient(ServerUnavailable("none up"))
    async with running(client) as gateway, openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused") as sdk:
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    assert (caught.value.status_code, caught.value.code) == (503, "no_host_available")
    assert len(client.asked) == 1


async def test_the_official_client_raises_an_error_at_the_end_of_a_cut_stream() -> None:
    import openai  # a second, which other processes of a run do without

    client = FakeClient("one ", ServerUnavailable("Decode server unavailable"))
    async with running(client) as gateway, openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused") as sdk:
        stream = await sdk.completions.create(model="m", prompt="x", stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="Decode server unavailable"):
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
    assert texts == ["one "]


def test_a_port_that_is_in_use_is_named() -> None:
    listener = listen("127.0.0.1", 0, serve.HINTS)
    with listener, pytest.raises(PortInUse, match="in use"):
        listen("127.0.0.1", listener.getsockname()[1], serve.HINTS)
