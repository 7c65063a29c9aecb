"""Ollama's dialect as pure functions, and its calls over HTTP."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from disagg.api.requests import ToolCall
from disagg.errors import RequestError, ServerUnavailable
from disagg.gateway.dialects.base import AnswerPiece, Finished, Head
from disagg.gateway.dialects.ollama import Chat, Generate
from disagg.inference.hosts.view import UNKNOWN
from disagg.version import VERSION
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient, completion, tokens_of

MESSAGES = [{"role": "user", "content": "hello"}]
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_tokens": 4096, "fit_context": True}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (None, DEFAULTS),
        ({"temperature": 0, "num_predict": -1, "num_ctx": 8192, "num_gpu": 1}, {**DEFAULTS, "temperature": 0}),
        ({"num_predict": 7}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_tokens": 7, "fit_context": True}),
        ({"repeat_penalty": 1.1, "seed": 3}, {**DEFAULTS, "repetition_penalty": 1.1, "seed": 3}),
        ({"stop": ["a"], "min_p": 0.1, "mirostat": 0}, {**DEFAULTS, "stop": ("a",), "min_p": 0.1}),
        (
            {"presence_penalty": 0.5, "frequency_penalty": -1},
            {**DEFAULTS, "presence_penalty": 0.5, "frequency_penalty": -1},
        ),
    ],
)
def test_options_are_translated(given: Any, options: dict[str, Any]) -> None:
    request = Chat().read({"model": "m", "messages": MESSAGES, "options": given})
    assert request.options == options
    assert request.stream


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"name": "f", "description": "", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"tools": [TOOL]}, {"tools": [FLAT]}),
        ({"format": "json"}, {"json_schema": {"type": "object"}}),
        ({"format": {"type": "array"}}, {"json_schema": {"type": "array"}}),
        ({"format": "json", "tools": [TOOL]}, {"json_schema": {"type": "object"}, "tools": [FLAT]}),
        ({"format": "", "tools": [], "think": None}, {}),
        ({"think": True}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        (
            {"think": "low"},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}},
        ),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
    ],
)
def test_fields_become_options(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert Chat().read({"model": "m", "messages": MESSAGES, **fields}).options == {**DEFAULTS, **options}


def test_messages_have_reasoning_calls_and_their_results() -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"id": "c2", "function": {"name": "g"}}]
    given = [
        {"role": "assistant", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_name": "f"},
        {"role": "tool", "content": "5", "tool_name": "g", "tool_call_id": "c2"},
    ]
    called = [{"name": "f", "arguments": {"a": 1}, "id": ""}, {"name": "g", "arguments": {}, "id": "c2"}]
    assert Chat().read({"model": "m", "messages": given}).prompts == (
        {
            "messages": [
                {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": called},
                {"role": "tool", "content": "4", "name": "f"},
                {"role": "tool", "content": "5", "name": "g", "tool_call_id": "c2"},
            ]
        },
    )


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


def test_a_chat_goes_on_with_a_last_message_of_the_assistant_that_has_a_text() -> None:
    def option(**last: Any) -> Any:
        messages = [*MESSAGES, {"role": "assistant", **last}]
        return Chat().read({"model": "m", "messages": messages}).options.get("continue_final_message")

    assert option(content="It is") is True
    assert option(content="") is option(content="x", tool_calls=[{"function": {"name": "f"}}]) is None


def test_a_suffix_makes_a_gap() -> None:
    request = Generate().read({"model": "m", "prompt": "def f(", "suffix": ")"})
    assert request.prompts == ({"prompt": "def f("},) and request.options["suffix"] == ")"
    assert "suffix" not in Generate().read({"model": "m", "prompt": "x", "suffix": ""}).options
    with pytest.raises(RequestError, match=r"^system: not together with suffix"):
        Generate().read({"model": "m", "prompt": "x", "suffix": "y", "system": "z"})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"format": "xml"}, "format"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"top_k": "many"}}, "top_k"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
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
    digests = {one["model"]: one["digest"] for one in tags.json()["models"]}
    assert [*digests] == ["m", "alias-of-m", "other"]
    assert digests["m"] == digests["alias-of-m"] != digests["other"] and {len(one) for one in digests.values()} == {64}
    assert version.json()["disagg"] == VERSION
    assert tuple(map(int, version.json()["version"].split("."))) >= (0, 13, 4), "what Codex --oss asks for"


async def test_a_name_with_the_tag_latest_is_the_name_without_it() -> None:
    client = FakeClient("one ")
    async with fake_client.http(fake_client.app(client)) as http:
        answer = await http.post("/api/chat", json={"model": "m:latest", "messages": MESSAGES, "stream": False})
        shown = await http.post("/api/show", json={"model": "alias-of-m:latest"})
        unknown = await http.post("/api/show", json={"model": "gpt:latest"})
        tagged = await http.post("/api/show", json={"model": "m:7b"})
    assert [one.status_code for one in (answer, shown, unknown, tagged)] == [200, 200, 404, 404]
    assert client.asked[0]["model"] == "m"


CALL = ToolCall("f", {"a": 1}, "c1")
PIECES = (
    AnswerPiece(0, "", (), reasoning="hm"),
    AnswerPiece(0, "", ()),
    AnswerPiece(0, "So.", (), tool_calls=(CALL,)),
)
DONE = completion("So.", finish_reason="tool_calls", reasoning="hm", tool_calls=(CALL,))
WRITTEN = [{"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}]


@pytest.mark.parametrize("think", [None, True, False])
def test_reasoning_is_apart_from_the_text_unless_it_is_turned_off(think: bool | None) -> None:
    request = Chat().read({"model": "m", "messages": MESSAGES, "think": think})
    writer = Chat().writer(Head(request, "id", 0.0))
    parts = [*map(writer.piece, PIECES), writer.finished(Finished(0, DONE)), writer.end([DONE])]
    messages = [json.loads(line)["message"] for line in Chat.framing.join(chain(*parts)).splitlines()]
    reasoning = [] if think is False else [{"role": "assistant", "content": "", "thinking": "hm"}]
    assert messages == [
        *reasoning,
        {"role": "assistant", "content": "So.", "tool_calls": WRITTEN},
        {"role": "assistant", "content": ""},
    ]
    whole = json.loads(json.dumps(writer.whole([DONE])))
    thought = {} if think is False else {"thinking": "hm"}
    assert whole["message"] == {"role": "assistant", "content": "So.", **thought, "tool_calls": WRITTEN}
    assert whole["done_reason"] == "stop"


def test_log_probabilities_come_with_their_text() -> None:
    request = Chat().read({"model": "m", "messages": MESSAGES, "logprobs": True})
    objects = Chat().writer(Head(request, "id", 0.0)).piece(AnswerPiece(0, "one", tokens_of("one")))
    (line,) = Chat.framing.join(objects).splitlines()
    assert [one["logprob"] for one in json.loads(line)["logprobs"]] == [-0.5]


@pytest.mark.parametrize(("path", "stream"), [("/api/chat", True), ("/api/generate", False), ("/api/generate", True)])
async def test_without_a_prompt_a_model_counts_as_loaded_at_once(path: str, stream: bool) -> None:
    client = FakeClient("one ")
    async with fake_client.http(fake_client.app(client)) as http:
        answer = await http.post(path, json={"model": "m", "stream": stream})
        unknown = await http.post(path, json={"model": "gpt"})
    assert (answer.status_code, answer.json()["done"], answer.json()["done_reason"]) == (200, True, "load")
    assert unknown.status_code == 404 and client.asked == []


async def test_a_model_is_described_with_what_it_can_do() -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        shown = (await http.post("/api/show", json={"model": "alias-of-m"})).json()
        unknown = await http.post("/api/show", json={"name": "gpt"})
        there = await http.head("/")
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 4096
    assert unknown.status_code == 404 and 'no model "gpt"' in unknown.json()["error"]
    assert (there.status_code, there.content) == (200, b"")


async def test_models_that_a_host_serves_now_are_listed_as_running() -> None:
    client = FakeClient()
    async with fake_client.http(fake_client.app(client)) as http:
        up = (await http.get("/api/ps")).json()
        client.view.hosts["m-decode"] = UNKNOWN
        down = (await http.get("/api/ps")).json()
    assert [(one["name"], one["context_length"]) for one in up["models"]] == [("m", 4096)]
    assert down == {"models": []}
