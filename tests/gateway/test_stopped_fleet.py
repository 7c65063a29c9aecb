"""`disagg serve` in front of a fleet of which no server runs: it says so, and a request is not kept waiting."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.deadlines import wait_until
from tests.fleets import TOKEN, write_hosts
from tests.served_gateway import served_gateway

WITHIN_S = 60.0
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def test_a_stopped_fleet_is_stated_at_the_start_and_its_requests_fail_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = write_hosts(tmp_path, {"tiny": tmp_path / "model"})
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    with served_gateway(path) as gateway:
        wait_until(lambda: "is up yet" in gateway.log.read_text(), WITHIN_S, "the gateway's word on its hosts")
        said = gateway.log.read_text()
        assert f"Dashboard: {gateway.url}/\n" in said and gateway.url.startswith("http://127.0.0.1:")
        assert "No host of any model is up yet: `disagg status` says why, `disagg start` starts what is stopped" in said
        with httpx.Client(trust_env=False, timeout=5) as http:  # it was 10 s until the refusal
            assert http.get(f"{gateway.url}/").status_code == httpx.codes.OK
            answer = http.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert "run `disagg start`" in answer.text
