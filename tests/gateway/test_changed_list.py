"""hosts.toml states other models than it did when the gateway began."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.api.status import Load
from disagg.config import Fleet, GatewaySettings, Host, Model
from disagg.errors import ConfigError
from disagg.gateway.app import build
from disagg.gateway.clients.access import Access
from disagg.gateway.clients.keys import KeyFile, KeyRing
from disagg.gateway.dialects.base import GatewayRequest, Head
from disagg.gateway.health import GatewayHealth
from disagg.gateway.serve import require_only_models_changed
from disagg.gateway.watch.board import Board
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.request import Observers
from tests.deadlines import LONG_S
from tests.gateway import fake_client
from tests.gateway.kept_models import TABLES, fleet_of, keeping, kept

PORTS = {"mac": 1, "dgx": 2, "old": 3}
FRONT = Host("front", "127.0.0.1", ("gateway",), "", fleet_of(PORTS, "a").hosts["mac"].engine, 4)


def with_front(fleet: Fleet, front: Host = FRONT) -> Fleet:
    return replace(fleet, hosts={**fleet.hosts, front.name: front})


def with_host(fleet: Fleet, change: Callable[[Host], Host]) -> Fleet:
    return replace(fleet, hosts={**fleet.hosts, "mac": change(fleet.hosts["mac"])})


CHAT = [{"role": "user", "content": "hello"}]
FLEET = fleet_of(PORTS, "a", "b")


@pytest.mark.parametrize(
    "changed",
    [
        fleet_of(PORTS, "a", "b", "c"),
        fleet_of(PORTS, "a"),
        replace(FLEET, models={**FLEET.models, "a": Model("a", {}, 8192, ("another",))}),
        replace(FLEET, default_model="a"),
    ],
    ids=["longer", "shorter", "alias and context", "default model"],
)
def test_models_may_change_while_it_runs(changed: Fleet) -> None:
    require_only_models_changed(FLEET, changed, None)
    require_only_models_changed(with_front(FLEET), with_front(changed), FRONT)


@pytest.mark.parametrize(
    "changed",
    [
        with_host(FLEET, lambda host: replace(host, port=9)),
        with_host(FLEET, lambda host: replace(host, address="127.0.0.2")),
        with_host(FLEET, lambda host: replace(host, engine=replace(host.engine, max_batch=3))),
        replace(FLEET, hosts={name: host for name, host in FLEET.hosts.items() if name != "old"}),
        replace(FLEET, name="another"),
        replace(FLEET, token_file=Path("/token")),
    ],
    ids=["port", "address", "engine", "no such host", "name", "token"],
)
def test_anything_else_needs_a_restart(changed: Fleet) -> None:
    for before, after, host in ((FLEET, changed, None), (with_front(FLEET), with_front(changed), FRONT)):
        with pytest.raises(ConfigError, match="more has changed than its models") as caught:
            require_only_models_changed(before, after, host)
        assert caught.value.hint == "restart the gateway"


def test_its_own_table_needs_a_restart_too() -> None:
    for changed in (FLEET, with_front(FLEET, replace(FRONT, settings=GatewaySettings(("*",))))):
        with pytest.raises(ConfigError):
            require_only_models_changed(with_front(FLEET), changed, FRONT)


async def test_a_new_model_is_listed_watched_and_counted_and_one_that_is_gone_is_unknown() -> None:
    states = {"ready": {"state": "ready"}, "gone": {"state": "asleep"}}
    async with keeping(states) as (client, hosts):
        watch = GatewayWatch(client)
        access = Access(KeyRing(KeyFile(fake_client.NO_KEYS)), public=False)
        application = build(client, access, GatewayHealth(client), watch)
        async with watch.watching(), fake_client.http(application) as http:

            async def listed() -> dict[str, str]:
                return {one["id"]: one["state"] for one in (await http.get("/v1/models")).json()["data"]}

            assert await listed() == {"ready": "ready", "gone": "asleep", "single": "ready"}
            for name, role in TABLES.items():
                models = (
                    kept("ready", role=role, state="ready", port=9),
                    kept("new", role=role, state="asleep", port=8),
                )
                hosts[name].load = Load("ok", boot_id=name, models=models)
            ports = {name: host.port for name, host in client.fleet.hosts.items()}
            client.replace_fleet(fleet_of(ports, "ready", "new"))
            watch.read_models()
            assert list(await listed()) == ["ready", "new", "single"]
            async with asyncio.timeout(LONG_S):
                while client.view.of("mac/new").kept is None:
                    await asyncio.sleep(0.01)
            assert (await listed())["new"] == "asleep"
            shown = await http.post("/api/show", json={"model": "new-alias"})
            assert shown.status_code == 200
            assert (await http.get("/v1/models/gone")).status_code == 404
            asked = await http.post("/v1/chat/completions", json={"model": "gone", "messages": CHAT})
            assert asked.status_code == 404
            figures = (await http.get("/metrics")).text
            assert 'disagg_requests_running{model_name="new"} 0.0' in figures
            assert 'vllm:generation_tokens_total{model_name="new"} 0.0' in figures
            assert 'vllm:generation_tokens_total{model_name="gone"} 0.0' in figures, "a figure never goes back"
            assert 'disagg_requests_running{model_name="gone"}' not in figures
            state = watch.board.state(watch.hosts(), time.monotonic())
            assert [model.name for model in state.models] == ["ready", "new", "single"]
            assert {host.model for host in state.hosts} == {"ready", "new", "single"}


async def test_who_watches_the_hosts_watches_those_of_the_new_list() -> None:
    async with keeping({"a": {"state": "ready"}}) as (client, _):

        def watched() -> set[str]:
            """A minute from now, when hosts that were used lately no longer count."""
            return {host.name for host in client._driver.refresher.due(time.monotonic() + 60)}

        ports = {name: host.port for name, host in client.fleet.hosts.items()}
        with client.watching():
            assert watched() == {"mac/a", "dgx/a", "old"}
            client.replace_fleet(fleet_of(ports, "b"))
            assert watched() == {"mac/b", "dgx/b", "old"}
        assert watched() == set()


def test_a_request_of_a_model_that_is_taken_off_the_list_goes_on_in_the_live_view() -> None:
    board = Board("test", {"m": 4096})
    asked = GatewayRequest(model="m", prompts=({"prompt": "x"},))
    observed = Observers([board]).accept(Head(asked, "r1", 0.0), "openai-chat", "m", "editor", "key-1")
    board.lists({"other": 2048})
    observed.completed(0, fake_client.completion("one two"))
    assert [model.name for model in board.state((), time.monotonic()).models] == ["other"]
    assert [model.name for model in board.own("key-1").state((), time.monotonic()).models] == ["other"]
    board.lists({"m": 8192})
    (shown,) = board.state((), time.monotonic()).models
    assert (shown.name, shown.context, shown.totals.ok) == ("m", 8192, 1)
