"""A gateway that hosts.toml names is started, watched and stopped like any server. The fleet is local and simulated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from disagg.config import Fleet, load
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll
from tests.deadlines import wait_until
from tests.ports import free_ports
from tests.simulated import write_simulated

START_S = 120.0
DOWN_S = 60.0
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    path = write_simulated(tmp_path)
    with path.open("a") as file:
        file.write(
            f'[hosts.front]\naddress = "127.0.0.1"\nroles = ["gateway"]\nport = {free_ports(1)[0]}\n'
            'connector = "local"\nservice = "process"\ntls_self_signed = true\n'
        )
    return load(path)


@pytest.fixture
def servers(fleet: Fleet, tmp_path: Path) -> Iterator[FleetServers]:
    servers = FleetServers(fleet, State.of(fleet, tmp_path / "state"))
    try:
        yield servers
    finally:
        servers.stop()


def test_it_starts_with_its_fleet_and_serves_until_the_last_host_is_gone(fleet: Fleet, servers: FleetServers) -> None:
    results = servers.start(timeout_s=START_S)
    assert {result.host: result.outcome for result in results} == dict.fromkeys(fleet.hosts, "started"), results
    url = fleet.hosts["front"].url
    assert url.startswith("https://")
    with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=30) as http:
        parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        named = {"X-Request-Id": "trace-me", "traceparent": parent}
        answer = http.post("/v1/chat/completions", json=CHAT, headers=named)
        assert answer.status_code == httpx.codes.OK, answer.text
        assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("trace-me", parent)
        for host in ("m-prefill", "m-decode"):
            assert '"request_id": "trace-me.' in servers.state.log_file(host).read_text()
        assert http.get("/health").status_code == httpx.codes.OK

        def front() -> tuple[str, str]:
            status = poll(fleet, servers.state.tokens.current, servers.state, ["front"])[0]
            return status.state, status.hint

        assert front()[0] == "healthy"
        servers.stop(["m-prefill", "m-decode"])
        wait_until(lambda: http.get("/health").json() == {"status": "no_host"}, DOWN_S, "the hosts to be missed")
        assert front() == ("failed", "disagg start")
    assert [result.outcome for result in servers.stop(["front"])] == ["stopped"]
    assert '"event": "request_ended"' in servers.state.log_file("front").read_text()
