"""Random bodies: every server answers each with success or a stated refusal, and none with a bug."""

from __future__ import annotations

import json
import random

import httpx
import pytest

from disagg.api.events import ErrorAnswer
from tests.deadlines import wait_until
from tests.faults.bodies import VALID, body
from tests.fleets import RunningFleet

ROUNDS = 150
SEED = 20
ALLOWED = {200, 400, 404, 413, 499, 502, 503, 504}


@pytest.mark.parametrize("host", ["tiny-prefill", "tiny-decode"])
@pytest.mark.parametrize("path", list(VALID))
def test_random_bodies_are_answered_or_refused_with_a_reason(tiny_fleet: RunningFleet, host: str, path: str) -> None:
    chance = random.Random(f"{SEED} {path}")
    before = len(tiny_fleet.log(host))
    with tiny_fleet.http(host) as http:
        for _ in range(ROUNDS):
            sent = body(path, chance)
            with http.stream("POST", path, content=sent, headers={"Content-Type": "application/json"}) as answer:
                assert answer.status_code in ALLOWED, (sent[:500], answer.status_code, answer.read())
                if answer.status_code == httpx.codes.OK:
                    assert next(answer.iter_raw(), b"x"), sent
                else:
                    assert ErrorAnswer.from_bytes(answer.read()).error.message, sent
    assert bugs(tiny_fleet.log(host)[before:]) == []
    wait_until(lambda: idle(tiny_fleet, host), 60, "the server to be idle")


def bugs(log: str) -> list[str]:
    """The lines of a log that tell of a bug: a traceback, or an error that is no DisaggError."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [str(line) for line in lines if "traceback" in str(line).lower() or line.get("level") == "error"]


def idle(fleet: RunningFleet, host: str) -> bool:
    status = fleet.status(host)
    return (status["running"], status["queue"], status["kv_bytes"]) == (0, 0, 0)
