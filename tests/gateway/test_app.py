"""The gateway's HTTP around a client whose answers are made up: errors, keys, cut streams, disconnects."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Message, Send

from disagg.errors import (
    CapabilityMissing,
    ContextLengthExceeded,
    DeadlineExceeded,
    HandoffError,
    Overloaded,
    RequestError,
    SchemaTooComplex,
    ServerUnavailable,
    Unauthorized,
)
from disagg.gateway.answer import ResponseTimes
from disagg.gateway.clients.keys import KeyFile
from disagg.gateway.document import calls
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.inference.client import AsyncClient
from disagg.inference.hosts.view import UNKNOWN
from disagg.inference.types import Stage
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
STREAMED = {**CHAT, "stream": True}


def events(text: str) -> list[Any]:
    """The data of server-sent events; comments are left out."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_stream_that_fails_ends_with_an_error_and_never_with_done() -> None:
    client = FakeClient("some ", "text ", ServerUnavailable("Decode server unavailable - request failed"))
    async with fake_client.http(fake_client.app(client)) as http:
        response = await http.post("/v1/chat/completions", json=STREAMED)
    *chunks, last = events(response.text)
    assert response.status_code == 200
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None]
    assert last["error"]["code"] == "no_host_available" and "Decode server unavailable" in last["error"]["message"]


async def test_a_bug_in_the_middle_of_a_stream_is_an_error_event_too(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_client.http(fake_client.app(FakeClient("text ", KeyError("secret")))) as http:
        response = await http.post("/v1/chat/completions", json=STREAMED)
    assert events(response.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "internal_error" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (ContextLengthExceeded("too long"), 400, "context_length_exceeded", {}),
        (SchemaTooComplex("too deep"), 400, "schema_too_complex", {"x-should-retry": "false"}),
        (Overloaded("busy"), 429, "rate_limit_exceeded", {"retry-after": "1"}),
        (ServerUnavailable("none up"), 503, "no_host_available", {"retry-after": "5", "x-should-retry": "false"}),
        (Unauthorized("the fleet's token"), 503, "no_host_available", {"x-should-retry": "false"}),
        (CapabilityMissing("no token ids"), 400, "not_supported", {}),
        (DeadlineExceeded("late"), 504, "timeout", {"x-should-retry": "false"}),
        (HandoffError("cut"), 500, "internal_error", {"x-should-retry": "false"}),
    ],
)
async def test_an_error_before_the_first_token_has_its_status_streamed_or_not(
    error: Exception, status: int, code: str, headers: dict[str, str], stream: bool
) -> None:
    async with fake_client.http(fake_client.app(FakeClient(error))) as http:
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert headers.items() <= dict(response.headers).items()


async def test_a_quiet_stream_is_kept_alive_by_comments() -> None:
    times = ResponseTimes(first=0.01, keep_alive=0.01)
    async with fake_client.http(fake_client.app(FakeClient(0.2, "late "), times=times)) as http:
        response = await http.post("/v1/chat/completions", json=STREAMED)
    assert response.text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert events(response.text)[-1] == "[DONE]"


async def test_an_error_after_a_comment_is_an_event() -> None:
    application = fake_client.app(FakeClient(0.1, Overloaded("busy")), times=ResponseTimes(first=0.01))
    async with fake_client.http(application) as http:
        response = await http.post("/v1/chat/completions", json=STREAMED)
    assert [event["error"]["code"] for event in events(response.text)] == ["rate_limit_exceeded"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_disconnects_ends_its_request(stream: bool) -> None:
    client = FakeClient("text ", 60.0)
    running = asyncio.ensure_future(call(fake_client.app(client), {**CHAT, "stream": stream}, disconnect_after_s=0.05))
    await asyncio.wait_for(running, 30)
    assert [one.closed for one in client.streams] == [True]


async def test_a_gateway_that_is_stopped_says_that_the_answer_is_cut() -> None:
    client = FakeClient("text ", 60.0)
    sent: list[Message] = []
    running = asyncio.ensure_future(call(fake_client.app(client), STREAMED, sent=sent))
    while len(sent) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait((running,), timeout=30)
    assert running.exception() is None, "uvicorn would log it"
    assert events(sent[-1]["body"].decode())[-1]["error"]["code"] == "gateway_stopped"
    assert client.streams[0].closed


async def test_a_response_that_a_stop_cuts_before_it_has_begun_has_a_status_of_its_own() -> None:
    client = FakeClient(60.0)
    sent: list[Message] = []
    running = asyncio.ensure_future(call(fake_client.app(client), CHAT, sent=sent))
    while not client.streams:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait((running,), timeout=30)
    assert (running.exception(), sent[0]["status"]) == (None, 503)
    assert json.loads(sent[1]["body"])["error"]["code"] == "gateway_stopped"


@pytest.mark.parametrize("error", [ServerUnavailable("gone"), RuntimeError("a bug")])
async def test_one_of_several_answers_that_fails_ends_them_all(error: Exception) -> None:
    client = FakeClient("text ", 0.01, error)
    async with fake_client.http(fake_client.app(client)) as http, asyncio.timeout(60):
        response = await http.post("/v1/chat/completions", json={**STREAMED, "n": 3})
    assert "error" in events(response.text)[-1]
    assert [one.closed for one in client.streams] == [True] * 3


async def test_several_answers_to_a_prompt_are_asked_for_once_the_first_has_begun() -> None:
    client = FakeClient(0.05, "text")
    async with fake_client.http(fake_client.app(client)) as http, asyncio.timeout(60):
        asking = asyncio.ensure_future(http.post("/v1/chat/completions", json={**CHAT, "n": 3}))
        while not client.asked:
            await asyncio.sleep(0)
        assert [one.get("hold_prompt") for one in client.asked] == [True]
        body = (await asking).json()
    assert [one.get("hold_prompt") for one in client.asked] == [True, None, None]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["text"] * 3


async def test_requests_over_the_bound_are_refused_at_once() -> None:
    client = FakeClient("text ", 0.2)
    async with fake_client.http(fake_client.app(client, answers=1)) as http:
        first = asyncio.ensure_future(http.post("/v1/chat/completions", json=CHAT))
        while not client.asked:
            await asyncio.sleep(0.01)
        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert (await first).status_code == 200
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"


async def test_each_answer_of_a_request_counts_for_the_bound() -> None:
    client = FakeClient("text ")
    async with fake_client.http(fake_client.app(client, answers=3)) as http:
        several = [(await http.post("/v1/chat/completions", json={**CHAT, "n": n})).status_code for n in (4, 3, 3, 2)]
    assert several == [429, 200, 200, 200], "their places are given back"
    together = {"requests": [{**CHAT, "n": 2}, {**CHAT, "n": 2}, CHAT]}
    async with fake_client.http(fake_client.app(client, answers=3)) as http:
        results = (await http.post("/v1/parallel", json=together)).json()["results"]
    assert [one["status"] for one in results] == [200, 429, 200]


async def test_a_count_of_tokens_takes_a_place_until_it_ends_or_its_caller_leaves() -> None:
    client = FakeClient(600.0)
    watch = GatewayWatch(cast(AsyncClient, client))
    application = fake_client.app(client, watch=watch, answers=1)
    counting, leave = "/v1/messages/count_tokens", asyncio.Event()
    leaving = asyncio.ensure_future(call(application, CHAT, path=counting, leave=leave))
    async with fake_client.http(application) as http, asyncio.timeout(60):
        while not client.asked:
            await asyncio.sleep(0)
        refused = await http.post(counting, json=CHAT)
        leave.set()
        await leaving
        client.steps = ()
        assert (await http.post(counting, json=CHAT)).json() == {"input_tokens": 42}
    assert refused.status_code == 429
    assert 'code="rate_limit_exceeded"' in watch.metrics().decode()


async def test_the_youngest_waiting_answer_of_the_largest_key_yields_its_place_to_another_key(
    tmp_path: Path,
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    greedy, modest = (f"Bearer {file.add(name)}" for name in ("greedy", "modest"))
    client = FakeClient("begun ", barrier := asyncio.Barrier(5))
    client.stages = [Stage("queue", "disaggregated", "m-prefill", "m-decode")]
    application = fake_client.app(client, file.path, answers=4)
    async with fake_client.http(application) as http, asyncio.timeout(60):
        begun = asyncio.ensure_future(http.post("/v1/chat/completions", json=CHAT, headers={"authorization": greedy}))
        while barrier.n_waiting < 1:
            await asyncio.sleep(0)
        client.steps = (barrier, "late ")
        items = {"requests": [{**CHAT, "id": name} for name in "abc"]}
        together = asyncio.ensure_future(http.post("/v1/parallel", json=items, headers={"authorization": greedy}))
        while barrier.n_waiting < 4:
            await asyncio.sleep(0)
        client.steps = ("quick ",)
        answer = await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": modest})
        again = await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": greedy})
        await asyncio.gather(barrier.wait(), barrier.wait())
        results = (await together).json()["results"]
        assert (await begun).status_code == 200, "nothing that has begun is lost"
    assert answer.status_code == 200
    assert [one["status"] for one in results] == [200, 200, 429]
    assert "gave the place of this request" in results[2]["body"]["error"]["message"]
    assert (again.status_code, again.json()["error"]["code"]) == (429, "rate_limit_exceeded"), "one place is kept free"
    assert [stream.closed for stream in client.streams] == [True] * 5


async def test_a_key_has_so_many_answers_at_a_time_and_an_edit_applies_to_the_next_request(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    secret = file.add("editor", parallel=2, weight=7)
    client = FakeClient("text ")
    items = {"requests": [CHAT, {**CHAT, "n": 2}, CHAT, {**CHAT, "n": 3}]}
    async with fake_client.http(fake_client.app(client, file.path), authorization=f"Bearer {secret}") as http:
        results = (await http.post("/v1/parallel", json=items)).json()["results"]
        file.edit("editor", parallel=6, weight=8)
        more = (await http.post("/v1/parallel", json=items)).json()["results"]
    assert [one["status"] for one in results] == [200, 429, 200, 400]
    assert "the key editor may have 2 answers at a time" in results[1]["body"]["error"]["message"]
    assert results[3]["body"]["error"]["message"].startswith("n: 3 answers, and the key editor may have 2 at a time")
    assert [one["status"] for one in more] == [200, 200, 200, 429]
    [key] = file.read()
    assert [asked["share"]["weight"] for asked in client.asked] == [7] * 2 + [8] * 4
    assert {(asked["share"]["key"], asked["cache_salt"]) for asked in client.asked} == {(key.id, key.id)}


async def test_a_key_opens_its_models_within_its_limits_until_it_is_revoked(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    secret = file.add("editor", models=["m"], requests_per_minute=2)
    client = FakeClient("text ")
    async with fake_client.http(fake_client.app(client, file.path), authorization=f"Bearer {secret}") as http:
        models = await http.get("/v1/models")
        other = await http.post("/v1/chat/completions", json={**CHAT, "model": "other"})
        unknown = await http.post("/v1/chat/completions", json={**CHAT, "model": "othe"})
        answers = [await http.post("/v1/chat/completions", json=CHAT) for _ in range(3)]
        file.revoke("editor")
        revoked = await http.get("/v1/models")
        without = await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": ""})
        health = await http.get("/health")
    assert [one["id"] for one in models.json()["data"]] == ["m"]
    assert (other.status_code, other.json()["error"]["code"]) == (403, "model_not_allowed")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "alias-of-m" in unknown.text and "other" not in unknown.text, "a key sees its own models only"
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 30
    assert (revoked.status_code, revoked.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (without.status_code, health.status_code) == (401, 200)


@pytest.mark.parametrize("end", ["complete", "failed", "cancelled"])
async def test_prompt_and_answer_are_charged_however_the_request_ends(end: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    secret = file.add("editor", tokens_per_minute=7)
    client = FakeClient("one two ", *([ServerUnavailable("gone")] if end == "failed" else [0.05]))
    application = fake_client.app(client, file.path)
    if end == "cancelled":
        client.steps = ("one two ", 60.0)
        await call(application, STREAMED, until=b"two", authorization=f"Bearer {secret}")
    async with fake_client.http(application, authorization=f"Bearer {secret}") as http:
        if end != "cancelled":
            await http.post("/v1/chat/completions", json=CHAT)
        refused = await http.post("/v1/chat/completions", json=CHAT)
    assert refused.status_code == 429 and "7 tokens per minute" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] in ("8", "9"), "5 of the prompt and 2 of the answer are used up"


async def test_keys_share_no_held_kv(tmp_path: Path) -> None:
    file, client = KeyFile(tmp_path / "keys.json"), FakeClient("text ")
    application = fake_client.app(client, file.path)
    for name in ("editor", "chat", "editor"):
        secret = file.add(name)
        async with fake_client.http(application, authorization=f"Bearer {secret}") as http:
            await http.post("/v1/chat/completions", json=CHAT)
        file.revoke(name)
    assert len({asked["cache_salt"] for asked in client.asked}) == 3


async def test_an_option_out_of_bounds_is_named() -> None:
    async with fake_client.http(fake_client.app(FakeClient("text "))) as http:
        response = await http.post("/v1/chat/completions", json={**CHAT, "top_p": 2})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_p")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff", b'"' * 9, b"[" * 40_000])
async def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        response = await http.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_with_too_many_lists_is_a_400_that_names_the_bound() -> None:
    async with fake_client.http(fake_client.app(FakeClient("one "))) as http:
        answers = [
            await http.post("/v1/completions", json={"model": "m", "prompt": "[" * openings})
            for openings in (49_999, 50_000)
        ]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert answers[1].json()["error"]["message"].startswith("the request body has over 50000 of the characters [ and {")


async def test_a_body_over_the_limit_is_a_413_and_other_methods_a_405() -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        large = await http.post("/v1/chat/completions", content=b" " * ((1 << 20) + 1))
        wrong = await http.get("/v1/chat/completions")
    assert (large.status_code, wrong.status_code) == (413, 405)
    assert "error" in wrong.json()


async def call(
    application: ASGIApp,
    body: dict[str, Any],
    disconnect_after_s: float = 60.0,
    sent: list[Message] | None = None,
    until: bytes = b"",
    send_to: Send | None = None,
    path: str = "/v1/chat/completions",
    leave: asyncio.Event | None = None,
    **headers: str,
) -> None:
    """One request without an HTTP client, whose caller disconnects after some time, once it has received `until`, or
    once `leave` is set."""
    arrived = leave or asyncio.Event()
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"host", b"localhost"), *((name.encode(), value.encode()) for name, value in headers.items())],
        "query_string": b"",
    }
    received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Message:
        if received:
            return received.pop()
        with suppress(TimeoutError):
            await asyncio.wait_for(arrived.wait(), disconnect_after_s)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if sent is not None:
            sent.append(message)
        if until and until in message.get("body", b""):
            arrived.set()

    await application(scope, receive, send_to or send)


async def test_a_malformed_host_is_refused_and_not_a_bug() -> None:
    async with fake_client.http(fake_client.app(FakeClient()), host="[") as http:
        refused = await http.get("/v1/models")
        unknown = await http.get("/nowhere")
    assert (refused.status_code, unknown.status_code) == (401, 404)


async def test_nothing_is_sent_after_the_end_of_a_stream() -> None:
    """A comment that becomes due while the end is being sent."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if not message.get("more_body", True):
            for _ in range(20):
                await asyncio.sleep(0)

    times = ResponseTimes(first=0.0, keep_alive=0.0)
    await call(fake_client.app(FakeClient("text "), times=times), STREAMED, send_to=send)
    assert [message.get("more_body", True) for message in sent].index(False) == len(sent) - 1


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RequestError("top_p: wrong"), "400", "top_p: wrong"),
        (ContextLengthExceeded("too long", "shorten it"), "context_length_exceeded", "too long (shorten it)"),
        (
            RequestError("stop[0]: expected str of length <= 256 (got 'a private) word')", "shorten it"),
            "400",
            "stop[0]: expected str of length <= 256",
        ),
    ],
)
async def test_a_failed_request_is_logged_as_failed_with_its_error_and_none_of_its_text(
    error: RequestError, code: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "disagg.gateway")
    async with fake_client.http(fake_client.app(FakeClient(error))) as http:
        answer = await http.post("/v1/chat/completions", json=CHAT)
    [ended] = [record for record in caplog.records if record.message == "request_ended"]
    fields = getattr(ended, "fields")  # noqa: B009 - set by `extra`
    assert (fields["state"], fields["error_code"], fields["error"]) == ("failed", code, text)
    assert answer.json()["error"]["message"] == str(error), "its caller gets the whole message"


async def test_a_method_that_a_path_does_not_have_is_answered_with_those_that_it_has() -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        refused = await http.get("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["message"] == "GET /v1/chat/completions is not served: use POST"


@pytest.mark.parametrize(
    ("method", "path", "form"),
    [
        ("POST", "/api/pull", "ollama"),
        ("DELETE", "/api/delete", "ollama"),
        ("GET", "/api/chat", "ollama"),
        ("POST", "/v1/messages/batches", "anthropic"),
        ("GET", "/messages", "anthropic"),
        ("GET", "/api/history?limit=0", "openai"),
        ("POST", "/v1/embeddings", "openai"),
    ],
)
async def test_what_is_not_served_is_refused_in_the_form_of_its_api(method: str, path: str, form: str) -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        answer = await http.request(method, path)
    error = answer.json()["error"]
    assert 400 <= answer.status_code < 500
    known = {
        "ollama": isinstance(error, str),
        "anthropic": answer.json().get("type") == "error",
        "openai": "code" in error,
    }
    assert [name for name, fits in known.items() if fits] == [form]


async def test_an_unknown_model_is_the_default_one_for_keys_that_may_use_it(tmp_path: Path) -> None:
    file, client = KeyFile(tmp_path / "keys.json"), FakeClient("text ")
    client.fleet = replace(client.fleet, default_model="m")
    mine, others = file.add("mine"), file.add("others", models=["other"])
    body = {**CHAT, "model": "claude-sonnet-9"}
    async with fake_client.http(fake_client.app(client, file.path)) as http:
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-api-key": mine})
        refused = await http.post("/v1/chat/completions", json=body, headers={"x-api-key": others})
        known = await http.post("/v1/chat/completions", json={**body, "model": "other"}, headers={"x-api-key": mine})
        listed = await http.get("/v1/models/claude-sonnet-9", headers={"x-api-key": mine})
    assert (answer.status_code, answer.json()["model"], client.asked[0]["model"]) == (200, "m", "m")
    assert answer.json()["choices"][0]["disagg"]["warnings"] == [
        'model: no model is named "claude-sonnet-9", and m answers, by default_model'
    ]
    assert (refused.status_code, listed.status_code) == (404, 404)
    assert (known.json()["model"], client.asked[1]["model"]) == ("other", "other")


async def test_a_request_that_names_no_model_is_for_the_default_one_if_there_is_one() -> None:
    client = FakeClient("text ")
    nameless = {name: value for name, value in CHAT.items() if name != "model"}
    together = {"requests": [nameless, {**nameless, "model": "other"}]}
    async with fake_client.http(fake_client.app(client)) as http:
        refused = await http.post("/v1/chat/completions", json=nameless)
        client.fleet = replace(client.fleet, default_model="m")
        answers = [await http.post("/v1/chat/completions", json={**nameless, **more}) for more in ({}, {"model": None})]
        several = (await http.post("/v1/parallel", json=together)).json()["results"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert [answer.json()["model"] for answer in answers] == ["m", "m"]
    assert [one["body"]["model"] for one in several] == ["m", "other"]


@pytest.mark.parametrize(("path", "lowered"), [("/v1/chat/completions", True), ("/v1/completions", False)])
async def test_an_answer_longer_than_the_context_leaves_is_lowered_with_a_warning(path: str, lowered: bool) -> None:
    client = FakeClient("text ")
    async with fake_client.http(fake_client.app(client)) as http:
        answer = await http.post(path, json={**CHAT, "prompt": "x", "max_tokens": 32_768})
        fits = await http.post(path, json={**CHAT, "prompt": "x", "max_tokens": 4091})
    warnings = [one.json()["choices"][0]["disagg"]["warnings"] for one in (answer, fits)]
    text = "max_tokens: 32768 was lowered to 4091, which the context of 4096 leaves"
    assert warnings == [[text] if lowered else [], []]
    assert client.asked[0].get("fit_context", False) is lowered, "hosts refuse what they may not lower"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_answer_has_the_fingerprint_of_the_host_that_gave_it(path: str) -> None:
    client = FakeClient("text ")
    async with fake_client.http(fake_client.app(client)) as http:
        whole = (await http.post(path, json={**CHAT, "prompt": "x"})).json()
        *chunks, _ = events((await http.post(path, json={**STREAMED, "prompt": "x"})).text)
        client.view.hosts["m-decode"] = UNKNOWN
        unknown = (await http.post(path, json={**CHAT, "prompt": "x"})).json()
    assert {one["system_fingerprint"] for one in (whole, *chunks)} == {"fp_c0ffee"}
    assert unknown["system_fingerprint"] is None


async def test_without_a_key_a_gateway_that_has_keys_answers_only_what_it_declares(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.add("app")
    async with fake_client.http(fake_client.app(FakeClient(), file.path)) as http:
        for operation in calls():
            path = operation.path.replace("{model}", "m")
            answer = await http.request(operation.method, path, json=CHAT if operation.method == "POST" else None)
            assert (answer.status_code != 401) == operation.public, path


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "a \\u escape in it is no character"),
        (b'{"model": "' + b"m" * 100 + b'\xff"}', "byte 111 is not UTF-8"),
        (b'{"model": "m"', "truncated"),
    ],
    ids=["half a character", "no UTF-8", "cut"],
)
async def test_a_body_that_is_not_json_is_refused_with_what_is_wrong_with_it(body: bytes, reason: str) -> None:
    async with fake_client.http(fake_client.app(FakeClient("text "))) as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
