"""Counting the tokens of a prompt: which host is asked, and what follows if it does not answer."""

from __future__ import annotations

import time
from typing import Any

import pytest

from disagg.api.requests import GenerateBody
from disagg.api.status import CountAnswer, Load
from disagg.config import Host
from disagg.errors import DisaggError, ModelError, Overloaded, ProtocolError, RequestError, ServerSilent
from disagg.inference.attempts.driver import Driver, GenerationRequest
from disagg.inference.attempts.question import HOST_S, count
from disagg.inference.hosts.route import Candidates
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.token import Tokens
from tests.inference.scripted import described_host

D1, D2, P1 = (described_host(name, 1) for name in ("d1", "d2", "p1"))
BUSY, SILENT, WRONG = Overloaded("busy"), ServerSilent("silent"), RequestError("messages: wrong")
BROKEN, FOREIGN = ModelError("the engine failed"), ProtocolError("no answer of disagg")


@pytest.mark.parametrize(
    ("failing", "loads", "asked", "result"),
    [
        ({}, {}, ["d1"], 7),
        ({"d1": BUSY}, {}, ["d1", "d2"], 7),
        ({"d1": SILENT, "d2": BUSY}, {}, ["d1", "d2", "p1"], 7),
        ({"d1": BUSY, "d2": BUSY, "p1": SILENT}, {}, ["d1", "d2", "p1"], SILENT),
        ({"d1": WRONG}, {}, ["d1"], WRONG),
        ({"d1": BROKEN, "d2": FOREIGN}, {}, ["d1", "d2", "p1"], 7),
        ({"d1": BUSY, "d2": BUSY, "p1": BROKEN}, {}, ["d1", "d2", "p1"], BROKEN),
        ({}, {"d1": Load("draining", boot_id="1")}, ["d2"], 7),
        ({}, {"d1": Load("ok", boot_id="1", queue=3)}, ["d2"], 7),
    ],
)
async def test_hosts_are_asked_in_turn_until_one_answers(
    monkeypatch: pytest.MonkeyPatch,
    failing: dict[str, DisaggError],
    loads: dict[str, Load],
    asked: list[str],
    result: int | DisaggError,
) -> None:
    seen = []

    async def post(
        _http: object, host: Host, path: str, _body: object, *, timeout: float, sent: object, most: int
    ) -> dict[str, Any]:
        assert (path, timeout > 0) == ("/count", True)
        seen.append(host.name)
        if host.name in failing:
            raise failing[host.name]
        return CountAnswer(7).to_json()

    monkeypatch.setattr(host_calls, "post", post)
    driver = Driver(Connections(Tokens("a-token")))
    for name, load in loads.items():
        driver.view.answered(name, load)
    request = GenerationRequest(Candidates("m", (D1, D2), (P1,), None), GenerateBody(model="m", prompt="x"), 0.0)
    if isinstance(result, int):
        assert (await count(driver, request)).prompt_tokens == result
    else:
        with pytest.raises(type(result)):
            await count(driver, request)
    assert seen == asked
    await driver.close()


async def test_a_silent_host_leaves_time_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    async def post(
        _http: object, host: Host, _path: str, _body: object, *, timeout: float, sent: object, most: int
    ) -> dict[str, Any]:
        given[host.name] = timeout
        raise SILENT

    monkeypatch.setattr(host_calls, "post", post)
    driver = Driver(Connections(Tokens("a-token")))
    body = GenerateBody(model="m", prompt="x", deadline_s=30.0)
    with pytest.raises(ServerSilent):
        await count(driver, GenerationRequest(Candidates("m", (D1, D2), (P1,), None), body, time.monotonic()))
    assert 0 < given["d1"] <= 10 and 0 < given["d2"] <= 10 and given["p1"] == HOST_S
    await driver.close()
