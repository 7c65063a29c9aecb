"""POST /v1/parallel around a client whose answers are made up: items, figures, and failures of one item."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from disagg.api.gateway import MAX_ITEMS, ParallelAnswer, ParallelFigures, ParallelResult
from disagg.errors import ServerUnavailable
from disagg.gateway.clients.keys import KeyFile
from disagg.gateway.parallel import item_id
from disagg.gateway.watch.gateway import GatewayWatch
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient, FakeStream, Step
from tests.gateway.test_app import call, events

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "other", "prompt": "hello"}
PATH = "/v1/parallel"


class ByModel(FakeClient):
    """Answers each model's requests with steps of its own."""

    def __init__(self, **steps: tuple[Step, ...]) -> None:
        super().__init__()
        self._by_model = steps

    def stream(self, **arguments: Any) -> FakeStream:
        self.steps = self._by_model[arguments["model"]]
        return super().stream(**arguments)


@pytest.mark.parametrize(
    ("seconds", "wall", "total", "efficiency"),
    [
        ([2.0, 2.0], 2.0, 4.0, 1.0),
        ([1.0, 4.0], 4.0, 5.0, 0.625),
        ([3.0], 3.0, 3.0, 1.0),
        ([], 0.0, 0, None),
        ([0.0], 0.0, 0, None),
    ],
)
def test_efficiency_is_the_sum_of_the_times_over_wall_times_number(
    seconds: list[float], wall: float, total: float, efficiency: float | None
) -> None:
    assert ParallelFigures.of(seconds) == ParallelFigures(len(seconds), wall, total, efficiency)


async def post(client: FakeClient, *items: Any, stream: bool = False, **headers: str) -> Any:
    """The answer to these items; the events of a stream."""
    async with fake_client.http(fake_client.app(client), **headers) as http:
        answer = await http.post(PATH, json={"requests": items, "stream": stream})
    assert answer.status_code == 200, answer.text
    return events(answer.text) if stream else answer.json()


async def test_each_request_is_answered_as_if_it_had_been_sent_alone() -> None:
    client = ByModel(m=("a ", "chat"), other=("a ", "text"))
    answer = await post(client, {**CHAT, "id": "first", "temperature": 0.5}, {**TEXT, "stream": True})
    first, second = ParallelAnswer.from_json(answer).results
    assert (first.index, first.id, first.status) == (0, "first", 200)
    assert (second.index, second.id, second.status) == (1, None, 200)
    assert first.body["choices"][0]["message"]["content"] == "a chat"  # type: ignore[index]  # no failure: it has a body
    assert second.body["choices"][0]["text"] == "a text"  # type: ignore[index]  # no failure: it has a body
    assert [one.get("temperature") for one in client.asked] == [0.5, 1.0]


async def test_requests_run_at_the_same_time_and_their_figures_say_what_that_was_worth() -> None:
    both = asyncio.Barrier(2)  # each answer goes on once the other has begun
    async with asyncio.timeout(30):
        results = await post(ByModel(m=(both, "x"), other=(both, "x")), CHAT, TEXT)
    figures = ParallelFigures.from_json(results["disagg"])
    assert figures == ParallelFigures.of([one["seconds"] for one in results["results"]])
    assert figures.complete == 2 and figures.wall < figures.sequential_sum


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_leaves_the_others_alone(stream: bool) -> None:
    client = ByModel(m=("fine ", 0.02, "text"), other=("cut ", ServerUnavailable("gone")))
    items = (CHAT, TEXT, {**CHAT, "model": "unknown"}, {**CHAT, "top_p": 2}, {**CHAT, "n": 0})
    answer = await post(client, *items, stream=stream)
    ends = [one for one in answer if "status" in one] if stream else answer["results"]
    results = {one["index"]: ParallelResult.from_json(one) for one in ends}
    assert [results[index].status for index in range(5)] == [200, 503, 404, 400, 400]
    assert [results[index].body["error"]["param"] for index in (2, 3, 4)] == ["model", "top_p", "n"]  # type: ignore[index]  # no failure: it has a body
    assert results[1].body["error"]["code"] == "no_host_available"  # type: ignore[index]  # no failure: it has a body
    figures = answer[-2]["disagg"] if stream else answer["disagg"]
    assert figures["complete"] == 1 and figures["efficiency"] == 1


async def test_a_stream_names_the_request_of_every_chunk_and_ends_each_before_its_own_end() -> None:
    client = ByModel(m=("a ", 0.01, "b ", 0.01, "c"), other=("x ", 0.01, "y"))
    chat = {**CHAT, "id": 'say "a"', "stream_options": {"include_usage": True}}
    answer = await post(client, chat, TEXT, stream=True)
    assert answer[-1] == "[DONE]" and set(answer[-2]) == {"disagg"}
    assert {one["id"] for one in answer[:-2]} == {'say "a"', None}
    texts = {0: "", 1: ""}
    for one in answer[:-2]:
        for choice in one.get("body", {}).get("choices", ()):
            texts[one["index"]] += choice["delta"].get("content", "") if one["index"] == 0 else choice["text"]
    assert texts == {0: "a b c", 1: "x y"}
    of_chat = [one for one in answer[:-2] if one["index"] == 0]
    assert of_chat[-1]["status"] == 200 and "body" not in of_chat[-1]
    assert of_chat[-2]["body"]["usage"]["completion_tokens"] == 3
    assert of_chat[-3]["body"]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "requests", "missing"),
        ({"requests": []}, "requests", "length"),
        ({"requests": [CHAT] * (MAX_ITEMS + 1)}, "requests", "length"),
        ({"requests": [{**CHAT, "id": "a"}, {**TEXT, "id": "a"}]}, "requests", "same id"),
        ({"requests": ["text"]}, "requests[0]", "object"),
        ({"requests": [{"model": "m"}]}, "requests[0].messages", "either"),
        ({"requests": [{**CHAT, "prompt": "x"}]}, "requests[0].messages", "either"),
        ({"requests": [{**CHAT, "n": 0}, {**CHAT, "n": 0}]}, "requests[0].n", "expected"),
        ({"requests": [{**CHAT, "id": "x" * 65}]}, "requests[0].id", "64"),
        ({"requests": [{**CHAT, "id": 1}]}, "requests[0].id", "64"),
    ],
)
async def test_a_body_without_a_request_that_can_be_read_is_a_400(
    body: dict[str, Any], param: str, message: str
) -> None:
    client = FakeClient("text ")
    async with fake_client.http(fake_client.app(client)) as http:
        answer = await http.post(PATH, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"] and not client.asked


async def test_every_request_counts_for_its_key_and_needs_its_model(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    secret = file.add("editor", models=["m"], requests_per_minute=2)
    async with fake_client.http(fake_client.app(FakeClient("x "), file.path)) as http:
        key = {"Authorization": f"Bearer {secret}"}
        answer = await http.post(PATH, json={"requests": [CHAT, TEXT, CHAT, CHAT]}, headers=key)
        without = await http.post(PATH, json={"requests": [CHAT]})
    assert [one["status"] for one in answer.json()["results"]] == [200, 403, 200, 429]
    assert without.status_code == 401


async def test_every_request_counts_for_the_bound_of_requests_at_a_time() -> None:
    application = fake_client.app(FakeClient("x "), answers=2)
    async with fake_client.http(application) as http:
        answer = await http.post(PATH, json={"requests": [CHAT, CHAT, CHAT]})
        assert [one["status"] for one in answer.json()["results"]] == [200, 200, 429]
        for _ in range(3):
            answer = await http.post(PATH, json={"requests": [CHAT, CHAT]})
            assert [one["status"] for one in answer.json()["results"]] == [200, 200], "their places are given back"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_disconnects_ends_all_requests(stream: bool) -> None:
    client = FakeClient("text ", 60.0)
    watch = GatewayWatch(client)  # type: ignore[arg-type]  # a fake
    body = {"requests": [CHAT, CHAT], "stream": stream}
    running = call(fake_client.app(client, watch=watch), body, disconnect_after_s=0.05, path=PATH)
    await asyncio.wait_for(running, 30)
    assert [one.closed for one in client.streams] == [True, True]
    assert watch.board.requests("m") == (0, 0)
    assert b"disagg_requests_cancelled_total" in watch.metrics()


async def test_every_request_is_in_the_history_and_the_metrics_as_if_it_had_been_sent_alone() -> None:
    client = ByModel(m=("x ",), other=(ServerUnavailable("gone"),))
    watch = GatewayWatch(client)  # type: ignore[arg-type]  # a fake
    async with fake_client.http(fake_client.app(client, watch=watch)) as http:
        await http.post(PATH, json={"requests": [CHAT, TEXT]}, headers={"X-Request-Id": "mine"})
    last = watch.board.state((), time.monotonic()).last
    assert {(one.request_id, one.api, one.model, one.state) for one in last} == {
        ("mine.0", "chat", "m", "ok"),
        ("mine.1", "completions", "other", "failed"),
    }
    assert b'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0' in watch.metrics()


async def test_a_request_that_is_complete_is_no_longer_running_while_others_are() -> None:
    client = ByModel(m=("x",), other=("y ", 60.0))
    watch = GatewayWatch(client)  # type: ignore[arg-type]  # a fake
    sent: list[Message] = []
    application = fake_client.app(client, watch=watch)
    body = {"requests": [CHAT, TEXT], "stream": True}
    running = asyncio.ensure_future(call(application, body, sent=sent, path=PATH))
    async with asyncio.timeout(30):
        while not any(b'"status":200' in message.get("body", b"") for message in sent):
            await asyncio.sleep(0.01)
    assert [one.model for one in watch.board.state((), time.monotonic()).requests] == ["other"]
    running.cancel()
    await asyncio.wait((running,), timeout=30)
    assert events(sent[-1]["body"].decode())[-1]["error"]["code"] == "gateway_stopped"


def test_the_id_of_an_item_is_never_longer_than_ids_may_be() -> None:
    assert item_id("abc", 0) == "abc.0"
    assert item_id("x" * 64, 31) == "x" * 61 + ".31"
