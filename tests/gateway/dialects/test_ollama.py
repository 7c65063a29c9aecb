"""Ollama's dialect as pure functions, and its calls over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.errors import RequestError, ServerUnavailable
from disagg.gateway.dialects.ollama import Chat, Generate
from disagg.version import VERSION
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient

MESSAGES = [{"role": "user", "content": "hello"}]
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_tokens": 4096, "fit_context": True}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (None, DEFAULTS),
        ({"temperature": 0, "num_predict": -1, "num_ctx": 8192, "num_gpu": 1}, {**DEFAULTS, "temperature": 0}),
        ({"num_predict": 7}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_tokens": 7}),
        ({"repeat_penalty": 1.1, "seed": 3}, {**DEFAULTS, "repetition_penalty": 1.1, "seed": 3}),
        ({"stop": ["a"], "min_p": 0.1, "mirostat": 0}, {**DEFAULTS, "stop": ("a",), "min_p": 0.1}),
    ],
)
def test_options_are_translated(given: Any, options: dict[str, Any]) -> None:
    request = Chat().read({"model": "m", "messages": MESSAGES, "options": given})
    assert request.options == options
    assert request.stream


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}),
        (
            {"prompt": "x", "system": "be short", "keep_alive": "5m"},
            {"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "x"}]},
        ),
        ({"prompt": "x", "raw": True}, {"prompt": "x"}),
    ],
)
def test_a_prompt_is_a_user_s_message_unless_it_is_raw(body: dict[str, Any], prompt: dict[str, Any]) -> None:
    assert Generate().read({"model": "m", **body}).prompts == (prompt,)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{}]}, "tools"),
        ({"format": "json"}, "format"),
        ({"think": True}, "think"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"top_k": "many"}}, "top_k"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        Chat().read({"model": "m", "messages": MESSAGES, **fields})
    assert caught.value.message.partition(": ")[0] == named


async def test_a_stream_is_lines_of_which_the_last_has_the_figures() -> None:
    async with fake_client.http(fake_client.app(FakeClient("one ", "two"))) as http:
        chat = await http.post("/api/chat", json={"model": "m", "messages": MESSAGES})
        text = await http.post("/api/generate", json={"model": "m", "prompt": "x"})
    assert chat.headers["content-type"] == "application/x-ndjson"
    *lines, last = [json.loads(line) for line in chat.text.splitlines()]
    assert [line["message"]["content"] for line in lines] == ["one ", "two"]
    assert not any(line["done"] for line in lines)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert (last["prompt_eval_count"], last["eval_count"], last["eval_duration"]) == (5, 2, 100_000_000)
    assert [json.loads(line)["response"] for line in text.text.splitlines()] == ["one ", "two", ""]


async def test_a_whole_answer_is_one_object() -> None:
    async with fake_client.http(fake_client.app(FakeClient("one ", "two"))) as http:
        answer = await http.post("/api/generate", json={"model": "m", "prompt": "x", "stream": False})
    body = answer.json()
    assert (body["response"], body["done"], body["created_at"][-1]) == ("one two", True, "Z")


async def test_errors_are_a_text_and_end_a_cut_stream() -> None:
    failing = FakeClient("one ", ServerUnavailable("Decode server unavailable"))
    async with fake_client.http(fake_client.app(failing)) as http:
        unknown = await http.post("/api/chat", json={"model": "gpt", "messages": MESSAGES})
        cut = await http.post("/api/chat", json={"model": "m", "messages": MESSAGES})
    assert unknown.status_code == 404 and 'no model "gpt"' in unknown.json()["error"]
    assert "Decode server unavailable" in json.loads(cut.text.splitlines()[-1])["error"]


async def test_models_and_version_are_listed() -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        tags, version = await http.get("/api/tags"), await http.get("/api/version")
    assert [one["model"] for one in tags.json()["models"]] == ["m", "other"]
    assert version.json() == {"version": VERSION}
