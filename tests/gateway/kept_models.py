"""A fleet whose hosts have several models, with scripted keepers on real sockets, and the gateway in front of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from disagg.api.keeper import KeptModel, LoadEvent, ModelFacts, ModelsAnswer, PullEvent
from disagg.api.names import Role
from disagg.api.status import Load
from disagg.config import EngineOptions, Fleet, Host, KeeperSettings, Model
from disagg.errors import DisaggError
from disagg.gateway.app import build
from disagg.gateway.clients.access import Access
from disagg.gateway.clients.keys import KeyFile, KeyRing
from disagg.gateway.health import GatewayHealth
from disagg.inference.client import AsyncClient
from tests.gateway import fake_client
from tests.inference.scripted import Body, Script, ScriptedHost

FACTS = ModelFacts(
    size_bytes=3_000_000_000, parameters=1_500_000_000, form="bfloat16", architecture="qwen3", context=40960, tools=True
)
TABLES: Mapping[str, Role] = {"mac": "decode", "dgx": "prefill"}


def kept(model: str, *, role: Role, state: str, **fields: Any) -> KeptModel:
    stated = {"model": model, "state": state, "kv_port": 8 if role == "decode" else None, **fields}
    return KeptModel.from_json(stated)


async def loads(body: Body) -> AsyncGenerator[Any]:
    for state in ("loading", "ready"):
        yield LoadEvent.from_json({"model": body["model"], "state": state, "port": 9, "kv_port": 8, "left_s": 2.0})


async def pulls(body: Body) -> AsyncGenerator[Any]:
    yield PullEvent(status="reading the list")
    for done in (10, 100):
        yield PullEvent(status="pulling model.safetensors", digest="ab12", total=100, completed=done)


async def answers(body: Body) -> AsyncGenerator[Any]:
    yield ModelsAnswer().to_bytes()


def fails(error: DisaggError) -> Script:
    async def script(body: Body) -> AsyncGenerator[Any]:
        yield error

    return script


CHANGES = {
    "models/load": loads,
    "models/pull": pulls,
    **{f"models/{deed}": answers for deed in ("unload", "pin", "keep", "delete")},
}


def fleet_of(ports: Mapping[str, int], *models: str) -> Fleet:
    """The models that the tables have, and one more, `single`, of a host with one."""
    keeping = KeeperSettings(ports=range(8100, 8132))
    options = EngineOptions("simulated")
    hosts = {
        name: Host(name, "127.0.0.1", (role,), "", options, ports[name], models=models, keeping=keeping)
        for name, role in TABLES.items()
    }
    hosts["old"] = Host("old", "127.0.0.1", ("decode",), "single", options, ports["old"], kv_port=7)
    named = {name: Model(name, {}, 4096, (f"{name}-alias",)) for name in (*models, "single")}
    return Fleet("kept", Path("hosts.toml"), named, hosts)


@asynccontextmanager
async def keeping(
    states: Mapping[str, Mapping[str, Any]], scripts: Mapping[str, Script] = CHANGES
) -> AsyncIterator[tuple[AsyncClient, dict[str, ScriptedHost]]]:
    """A client that has looked at the hosts, and the hosts. states: fields of each model, as both keepers state it; all
    that are ready have one process, the host `old`."""
    async with AsyncExitStack() as stack:
        hosts = {name: ScriptedHost(scripts, Load("ok", boot_id=name)) for name in (*TABLES, "old")}
        ports = {name: await stack.enter_async_context(host.listening("t")) for name, host in hosts.items()}
        for name, role in TABLES.items():
            models = tuple(kept(model, role=role, port=ports["old"], **fields) for model, fields in states.items())
            hosts[name].load = Load("ok", boot_id=name, models=models)
        client = await stack.enter_async_context(AsyncClient(fleet_of(ports, *states), token="t"))
        await client.connect()
        yield client, hosts


@asynccontextmanager
async def gateway(
    client: AsyncClient, keys: Path = fake_client.NO_KEYS, secret: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the gateway in front of these hosts."""
    application = build(client, Access(KeyRing(KeyFile(keys)), public=False), GatewayHealth(client))
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    async with fake_client.http(application, **headers) as http:
        yield http


def asked(host: ScriptedHost) -> list[tuple[str, Any]]:
    """The changes that a keeper was asked for, by their last word."""
    return [(path.removeprefix("/models/"), body) for path, body in host.asked]
