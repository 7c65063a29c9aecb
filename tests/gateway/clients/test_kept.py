"""Responses that are kept for the requests that follow them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import disagg.gateway.clients.kept
from disagg.errors import RequestError
from disagg.gateway.clients.kept import KeptResponses
from disagg.gateway.clients.keys import KeyFile
from disagg.gateway.dialects.base import GatewayRequest
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient

ASKED = {"model": "m", "input": "What is 6 * 7?", "instructions": "be short"}
USER = {"role": "user", "content": "What is 6 * 7?"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_on_after_the_response_that_it_names(stream: bool) -> None:
    client = FakeClient("42 ")
    async with fake_client.http(fake_client.app(client, keep_responses=2)) as http:
        first = await http.post("/v1/responses", json={**ASKED, "stream": stream})
        body = completed(first.text) if stream else first.json()
        second = await http.post(
            "/v1/responses", json={"model": "m", "input": "And 7 * 7?", "previous_response_id": body["id"]}
        )
        third = await http.post(
            "/responses", json={"model": "m", "input": [USER], "previous_response_id": second.json()["id"]}
        )
    assert body["store"] is True and second.json()["previous_response_id"] == body["id"]
    answered = {"role": "assistant", "content": "42 "}
    seven = {"role": "user", "content": "And 7 * 7?"}
    asked = [one["messages"] for one in client.asked]
    assert asked[0] == [{"role": "system", "content": "be short"}, USER]
    assert asked[1] == [USER, answered, seven], "instructions are those of each request"
    assert asked[2] == [USER, answered, seven, answered, USER]
    assert third.status_code == 200


def completed(text: str) -> dict[str, Any]:
    """The response of the event `response.completed`."""
    lines = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    found: dict[str, Any] = next(one["response"] for one in lines if one["type"] == "response.completed")
    return found


async def test_what_is_not_stored_or_of_another_key_cannot_be_followed(tmp_path: Path) -> None:
    file, client = KeyFile(tmp_path / "keys.json"), FakeClient("42 ")
    mine, others = ({"authorization": f"Bearer {file.add(name)}"} for name in ("mine", "others"))
    async with fake_client.http(fake_client.app(client, file.path, keep_responses=2)) as http:
        unstored = (await http.post("/v1/responses", json={**ASKED, "store": False}, headers=mine)).json()
        stored = (await http.post("/v1/responses", json=ASKED, headers=mine)).json()
        answers = [
            await http.post("/v1/responses", json={**ASKED, "previous_response_id": name}, headers=key)
            for name, key in ((unstored["id"], mine), (stored["id"], others), ([], mine), (stored["id"], mine))
        ]
    assert unstored["store"] is False
    assert [one.status_code for one in answers] == [400, 400, 400, 200]
    assert {one.json()["error"]["param"] for one in answers[:3]} == {"previous_response_id"}


async def test_by_default_nothing_is_kept() -> None:
    async with fake_client.http(fake_client.app(FakeClient("42 "))) as http:
        first = (await http.post("/v1/responses", json={**ASKED, "store": True})).json()
        second = await http.post("/v1/responses", json={**ASKED, "previous_response_id": first["id"]})
    assert first["store"] is False
    assert second.status_code == 400 and "--keep-responses" in second.json()["error"]["message"]


def kept(memory: KeptResponses, key: str, name: str, text: str = "x") -> None:
    memory.keep(GatewayRequest(model="m", prompts=(), options={"cache_salt": key}), {"id": name, "output": [text]})


def found(memory: KeptResponses, key: str, name: str) -> bool:
    try:
        return bool(memory.followed(key, {"previous_response_id": name})["input"])
    except RequestError:
        return False


def test_the_key_that_has_most_loses_its_oldest_response_first() -> None:
    memory = KeptResponses(3)
    kept(memory, "modest", "m1")
    for name in ("g1", "g2", "g3", "g4"):
        kept(memory, "greedy", name)
    assert found(memory, "modest", "m1") and not found(memory, "greedy", "m1")
    assert [found(memory, "greedy", name) for name in ("g1", "g2", "g3", "g4")] == [False, False, True, True]


def test_many_short_responses_of_one_key_take_no_place_of_a_long_one_of_another() -> None:
    memory = KeptResponses(3)
    kept(memory, "modest", "m1", "x" * 1000)
    for name in ("g1", "g2", "g3"):
        kept(memory, "greedy", name)
    assert found(memory, "modest", "m1") and not found(memory, "greedy", "g1")


def test_a_response_over_its_part_of_the_bound_is_not_kept() -> None:
    memory = KeptResponses(100, max_bytes=1600)
    kept(memory, "a", "large", "x" * 100)
    kept(memory, "a", "small", "x" * 90)
    assert found(memory, "a", "small") and not found(memory, "a", "large")


def test_what_is_kept_has_a_bound_in_bytes_and_a_response_of_the_same_name_takes_the_place_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disagg.gateway.clients.kept, "PART", 1)
    memory = KeptResponses(100, max_bytes=100)
    for number in range(20):
        kept(memory, "a", f"r{number % 2}", "x" * 40)
    assert found(memory, "a", "r0") and found(memory, "a", "r1")
    kept(memory, "a", "large", "x" * 200)
    assert not found(memory, "a", "large") and found(memory, "a", "r1")
    kept(memory, "a", "third", "x" * 40)
    assert [found(memory, "a", name) for name in ("r0", "r1", "third")] == [False, True, True]
