"""`disagg serve` in front of a fleet of which no server runs: it says so, and a request is not kept waiting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx

from disagg.token import TOKEN_FILE_VARIABLE
from tests.fleets import TOKEN, wait_until, write_hosts

WITHIN_S = 60.0
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def test_a_stopped_fleet_is_stated_at_the_start_and_its_requests_fail_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = write_hosts(tmp_path, {"tiny": tmp_path / "model"})
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    command = [sys.executable, "-m", "disagg", "serve", "--port", "0", "--config", str(path)]
    state = {TOKEN_FILE_VARIABLE: str(tmp_path / "token"), "XDG_STATE_HOME": str(tmp_path / "state")}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=output, env={**os.environ, **state})
    try:
        wait_until(lambda: process.poll() is not None or "is up yet" in log.read_text(), WITHIN_S, "the gateway")
        said = log.read_text()
        found = re.search(r"at (http://127.0.0.1:\d+)/v1", said)
        assert found is not None and f"Dashboard: {found[1]}/\n" in said
        assert "No host of any model is up yet: `disagg status` says why, `disagg start` starts what is stopped" in said
        with httpx.Client(trust_env=False, timeout=5) as http:  # it was 10 s until the refusal
            assert http.get(f"{found[1]}/").status_code == httpx.codes.OK
            answer = http.post(f"{found[1]}/v1/chat/completions", json=CHAT)
        assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert "run `disagg start`" in answer.text
    finally:
        process.terminate()
        assert process.wait(WITHIN_S) == 0
