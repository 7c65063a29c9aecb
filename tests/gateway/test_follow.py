"""`disagg top`'s side of /api/live: from a gateway, or from the hosts themselves."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.errors import DisaggError, ServerUnavailable, Unauthorized
from disagg.gateway.clients.keys import KeyFile
from disagg.gateway.follow import gateway_states, host_states
from disagg.gateway.watch.feed import FeedBounds
from disagg.token import TOKEN_FILE_VARIABLE
from tests.fleets import TOKEN, RunningFleet
from tests.gateway.fake_client import FakeClient
from tests.gateway.test_serve import running
from tests.ports import free_ports


async def test_the_states_of_a_gateway_are_read_until_it_stops() -> None:
    async with (
        running(FakeClient()) as gateway,
        asyncio.timeout(60),
        aclosing(gateway_states(gateway.url, None)) as states,
    ):
        first = await anext(states)
        gateway.server.should_exit = True
        with pytest.raises(ServerUnavailable, match="has stopped"):
            async for _ in states:
                pass
    assert [model.name for model in first.models] == ["m", "other"]


async def test_a_gateway_that_is_not_there_and_an_address_that_is_none_are_errors() -> None:
    for url in (f"http://127.0.0.1:{free_ports(1)[0]}", "http://[broken"):
        with pytest.raises(ServerUnavailable, match="no gateway answers"):
            await anext(gateway_states(url, None))


async def test_a_gateway_with_keys_refuses_to_be_watched_without_one(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    secret = file.add("top")
    async with running(FakeClient(), keys=file.path) as gateway:
        with pytest.raises(Unauthorized, match="needs a key"):
            await anext(gateway_states(gateway.url, None))
        with pytest.raises(Unauthorized, match="refuses the key in DISAGG_API_KEY"):
            await anext(gateway_states(gateway.url, "wrong"))
        async with aclosing(gateway_states(gateway.url, secret)) as states:
            assert (await anext(states)).fleet == "test"


async def test_without_a_gateway_the_hosts_show_their_own_load(
    tiny_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tiny_fleet.folder / "token"))
    async with asyncio.timeout(60), aclosing(host_states(tiny_fleet.fleet)) as states:
        state = await anext(states)
        while {host.state for host in state.hosts} != {"up"}:
            state = await anext(states)
    assert [host.name for host in state.hosts] == ["tiny-prefill", "tiny-decode"]
    assert state.hosts[1].kv_limit > 0 and state.requests == ()


async def test_a_full_gateway_is_asked_again_later() -> None:
    async with running(FakeClient(), feed=FeedBounds(watchers=0)) as gateway:
        with pytest.raises(ServerUnavailable, match="no place for another watcher"):
            await anext(gateway_states(gateway.url, None))


async def test_a_gateway_with_a_certificate_that_is_asked_by_http_is_an_error_that_says_how_to_ask() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(DisaggError, match="not as a gateway of disagg does") as raised:
            await anext(gateway_states(url, None))
    assert raised.value.hint == "name its --url; one with a certificate is asked by https"


async def test_of_a_fleet_that_is_not_started_the_first_state_has_every_host_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (token := tmp_path / "token").write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(token))
    decode, prefill = free_ports(2)
    hosts = {
        "decode": Host("decode", "127.0.0.1", ("decode",), "m", EngineOptions("mlx"), decode),
        "prefill": Host("prefill", "127.0.0.1", ("prefill",), "m", EngineOptions("transformers"), prefill),
    }
    fleet = Fleet("f", tmp_path / "hosts.toml", {"m": Model("m", {}, 4096)}, hosts)
    async with asyncio.timeout(90), aclosing(host_states(fleet, first_s=60.0)) as states:
        state = await anext(states)
    assert [(host.state, host.hint) for host in state.hosts] == [
        ("down", f"disagg start --host {name}") for name in ("decode", "prefill")
    ]
