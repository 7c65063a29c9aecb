"""GET /health of a gateway: 200 only if it can answer a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import httpx
import pytest

from disagg.api.status import Health, Load, ServerState
from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.errors import ServerUnavailable
from disagg.gateway.app import build
from disagg.gateway.clients.access import Access
from disagg.gateway.clients.keys import KeyFile, KeyRing
from disagg.gateway.health import GatewayHealth, Member, live_models
from disagg.inference.client import AsyncClient
from disagg.inference.hosts.view import FleetView
from disagg.token import Tokens
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient

Reply = ServerState | Literal["none", "failed"]

DECODE = Host("m-decode", "127.0.0.1", ("decode",), "m", EngineOptions("mlx"), 1)
PREFILL = Host("m-prefill", "127.0.0.1", ("prefill",), "m", EngineOptions("transformers"), 2)
FLEET = Fleet("test", Path("hosts.toml"), {"m": Model("m", {}, 64)}, {one.name: one for one in (DECODE, PREFILL)})


def seen(**replies: Reply) -> FleetView:
    """The view after each host's last reply; "none": it did not answer, "failed": a request to it has just failed."""
    view = FleetView()
    for name, reply in replies.items():
        host = name.replace("_", "-")
        view.answered(host, Load("ok" if reply == "none" or reply == "failed" else reply, boot_id="1"))  # noqa: PLR1714 - so narrows mypy the type
        for _ in range(2 * (reply == "none")):
            view.missed(host)
        for _ in range(10 * (reply == "failed")):
            view.began(host, 1)
            view.ended(host, 1, view.of(host).breaker.failed(ServerUnavailable("gone"), 0.0, 0.0, 0.0))
    return view


@pytest.mark.parametrize(
    ("view", "live"),
    [
        (FleetView(), []),
        (seen(m_decode="ok"), ["m"]),
        (seen(m_decode="loading"), []),
        (seen(m_decode="stalled", m_prefill="loading"), []),
        (seen(m_decode="none", m_prefill="ok"), ["m"]),
        (seen(m_decode="none", m_prefill="none"), []),
        (seen(m_decode="failed"), []),
    ],
)
def test_a_model_is_live_if_a_request_would_get_a_host(view: FleetView, live: list[str]) -> None:
    assert live_models(FLEET, view, now=0.0) == live


def test_a_model_that_no_decode_host_serves_is_never_live() -> None:
    alone = replace(FLEET, hosts={PREFILL.name: PREFILL})
    assert live_models(alone, seen(m_prefill="ok"), now=0.0) == []


async def test_health_is_503_while_the_hosts_start_and_once_all_are_gone() -> None:
    client = FakeClient()
    host = client.fleet.hosts["m-decode"].name
    client.view = FleetView()
    async with fake_client.http(fake_client.app(client)) as http:
        starting = await http.get("/health")
        client.view.answered(host, Load("ok", boot_id="1"))
        serving = await http.get("/health")
        client.view.answered(host, Load("stalled", boot_id="1"))
        gone = await http.get("/health")
    answers = [(one.status_code, one.json()) for one in (starting, serving, gone)]
    assert answers == [(503, {"status": "loading"}), (200, {"status": "ok"}), (503, {"status": "no_host"})]


async def test_a_gateway_of_a_fleet_shows_its_whole_health_to_the_fleet_alone(tmp_path: Path) -> None:
    client = cast(AsyncClient, FakeClient())
    front = Host("front", "127.0.0.1", ("gateway",), "", EngineOptions("none"), 3)
    member = Member(front, Tokens("the-token-of-this-fleet"))
    access = Access(KeyRing(KeyFile(tmp_path / "keys.json")), public=True)
    async with fake_client.http(build(client, access, GatewayHealth(client, member))) as http:
        bare = await http.get("/health")
        wrong = await http.get("/health", headers={"Authorization": "Bearer wrong"})
        whole = await http.get("/health", headers={"Authorization": f"Bearer {member.tokens.current}"})
        models = await http.get("/v1/models", headers={"Authorization": f"Bearer {member.tokens.current}"})
    assert bare.json() == wrong.json() == {"status": "ok"}
    health = Health.from_bytes(whole.content)
    assert (health.role, health.host, health.model) == ("gateway", "front", "")
    assert models.status_code == httpx.codes.UNAUTHORIZED, "the fleet's token is no client's key"
