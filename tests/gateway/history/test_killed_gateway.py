"""A gateway that is killed with SIGKILL under load: what its clients have seen complete is in the history."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.gateway.history.store import Filter, history_path, read
from disagg.token import TOKEN_FILE_VARIABLE
from tests.fleets import RunningFleet, wait_until

CALLERS = 4
COMPLETE = 6  # answers before the gateway is killed
WITHIN_S = 60.0


def serve(fleet: RunningFleet, state: Path) -> tuple[subprocess.Popen[bytes], str]:
    """`disagg serve` with a state folder of its own: the process and its URL."""
    environment = {
        **os.environ,
        TOKEN_FILE_VARIABLE: str(fleet.folder / "token"),
        "XDG_STATE_HOME": str(state),
    }
    log = state / "gateway.log"
    command = [sys.executable, "-m", "disagg", "serve", "--port", "0", "--config", str(fleet.fleet.path)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    wait_until(lambda: process.poll() is not None or "Serving" in log.read_text(), WITHIN_S, "the gateway")
    found = re.search(r"at (http://\S+)/v1", log.read_text())
    assert found is not None, log.read_text()
    return process, found[1]


async def ask(http: httpx.AsyncClient, number: int) -> str | None:
    """One streamed request: its id if the answer is complete, None if it was cut or refused."""
    name = f"request-{number}"
    body = {"model": "tiny", "prompt": f"{number} times", "max_tokens": 12, "stream": True, "ignore_eos": True}
    ended = False
    try:
        async with http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as answer:
            async for line in answer.aiter_lines():
                data = json.loads(line[6:]) if line.startswith("data: {") else {}
                assert "error" not in data
                ended = ended or any(choice["finish_reason"] for choice in data.get("choices", ()))
    except httpx.HTTPError:
        pass
    return name if ended else None


async def kill_under_load(process: subprocess.Popen[bytes], url: str) -> set[str]:
    """Ask until COMPLETE answers are there, then kill the gateway; the ids of all answers that were complete."""
    complete: set[str] = set()
    enough = asyncio.Event()
    numbers = iter(range(10_000))

    async def caller(http: httpx.AsyncClient) -> None:
        while process.poll() is None:
            if (name := await ask(http, next(numbers))) is not None:
                complete.add(name)
            if len(complete) >= COMPLETE:
                enough.set()

    async with asyncio.timeout(WITHIN_S), httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        callers = [asyncio.ensure_future(caller(http)) for _ in range(CALLERS)]
        await enough.wait()
        process.kill()
        process.wait()
        await asyncio.gather(*callers)
    return complete


async def test_every_answer_that_was_complete_is_in_the_history_of_a_killed_gateway(
    tiny_fleet: RunningFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, url = serve(tiny_fleet, tmp_path)
    try:
        complete = await kill_under_load(process, url)
    finally:
        process.kill()
        process.wait()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    entries: list[Any] = list(read(history_path(tiny_fleet.fleet), Filter(limit=1000)))
    assert complete <= {entry.request_id for entry in entries if entry.state == "ok"}
    assert len(complete) >= COMPLETE and all(entry.time <= time.time() for entry in entries)
