"""What one caller can cost the others: a silent connection, a late prompt, a copied request id, too much KV."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from tests import tiny_models
from tests.deadlines import wait_until
from tests.fleets import TOKEN, RunningFleet, running, write_hosts

ROOT = Path(__file__).parents[2]
LONG = {"model": "tiny", "tokens": [9] * 40, "sampling": {"max_tokens": 1500, "ignore_eos": True}}


def idle(fleet: RunningFleet, host: str) -> bool:
    status = fleet.status(host)
    return (status["running"], status["queue"], status["kv_bytes"]) == (0, 0, 0)


def test_a_prompt_does_not_wait_for_an_answer_that_is_generated_on_its_host(tiny_fleet: RunningFleet) -> None:
    with (
        tiny_fleet.http("tiny-prefill") as busy,
        tiny_fleet.http("tiny-prefill") as late,
        busy.stream("POST", "/generate", json=LONG) as first,
    ):
        lines = first.iter_lines()
        assert next(lines) == "event: tokens"
        port = tiny_fleet.fleet.hosts["tiny-decode"].kv_port
        order = {"deliver": {"host": "127.0.0.1", "port": port}, "ticket": "x" * 43}
        refused = late.post("/prefill", json={"model": "tiny", "tokens": [9] * 40, **order})
        assert not idle(tiny_fleet, "tiny-prefill"), "the first one still runs"
    assert refused.json()["error"]["code"] == "TicketRefused", "its turn came: the decode host was asked"
    wait_until(lambda: idle(tiny_fleet, "tiny-prefill"), 60, "the abandoned request to end")


def test_two_requests_under_one_request_id_both_get_their_answer(tiny_fleet: RunningFleet) -> None:
    answers: list[str] = []

    def ask() -> None:
        with tiny_fleet.http("tiny-decode") as http:
            body = {**LONG, "sampling": {"max_tokens": 30, "ignore_eos": True}}
            answers.append(http.post("/generate", json=body, headers={"X-Request-Id": "the-same"}).text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Not the events are counted: the tokens of steps that come together are one event.
    assert [answer.count('"completion_tokens":30,') for answer in answers] == [1] * 4


def test_kv_in_use_is_bounded_for_prompts_computed_here_too(tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model")
    path = write_hosts(tmp_path, {"tiny": model}, decode={"max_kv_bytes": 1 << 20})
    with running(path, "tiny-decode") as fleet:
        with fleet.http("tiny-decode") as http:
            refused = http.post("/generate", json=LONG)
            small = http.post("/generate", json={**LONG, "sampling": {"max_tokens": 2}})
        wait_until(lambda: idle(fleet, "tiny-decode"), 60, "both to end")
    assert refused.status_code == httpx.codes.BAD_REQUEST
    assert refused.json()["error"]["code"] == "KVMemoryExceeded"
    assert str(1 << 20) in refused.json()["error"]["message"]
    assert "event: done" in small.text


def test_ctrl_c_in_the_synchronous_client_ends_the_request_on_its_host(tiny_fleet: RunningFleet) -> None:
    program = (
        f"import disagg\nwith disagg.Client({str(tiny_fleet.fleet.path)!r}, token={TOKEN!r}) as client:\n"
        "    try:\n"
        "        for chunk in client.stream('tiny', 'x = 1', max_tokens=3000, ignore_eos=True):\n"
        "            print('chunk', flush=True)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', flush=True)\n"
        "        input()\n"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "chunk\n"
        user.send_signal(signal.SIGINT)
        while (line := user.stdout.readline()) == "chunk\n":
            pass
        assert line == "interrupted\n", user.stderr and user.stderr.read()
        wait_until(lambda: idle(tiny_fleet, "tiny-decode"), 60, "the request to end while its caller lives on")
        _, error = user.communicate("\n", timeout=60)
    assert error == ""
