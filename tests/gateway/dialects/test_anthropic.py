"""Anthropic's dialect as pure functions: body -> request, events -> answer; and its errors over HTTP."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from disagg.api.requests import ToolCall
from disagg.errors import ContextLengthExceeded, Overloaded, RequestError, ServerUnavailable, Unauthorized
from disagg.gateway.clients.keys import KeyFile
from disagg.gateway.dialects.anthropic import UNSUPPORTED, Messages
from disagg.gateway.dialects.anthropic_writer import SIGNATURE
from disagg.gateway.dialects.base import AnswerPiece, Finished, GatewayRequest, Head
from disagg.inference.types import Stage
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient, completion, tokens_of

DIALECT = Messages()
MESSAGES = [{"role": "user", "content": "hello"}]
BODY = {"model": "m", "max_tokens": 7, "messages": MESSAGES}
TOOL = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
FLAT = {"name": "f", "description": "", "parameters": {"type": "object"}}
SILENT = {"enable_thinking": False, "thinking": False}
ALOUD = {"enable_thinking": True, "thinking": True}
DEFAULTS = {"temperature": 1.0, "max_tokens": 7, "fit_context": True, "chat_template_kwargs": SILENT}
SCHEMA = {"type": "json_schema", "schema": {"type": "array"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def read(**fields: Any) -> GatewayRequest:
    return DIALECT.read({**BODY, **fields})


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, {"temperature": 0, "top_p": 0.5, "top_k": 3}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_sequences": [], "top_p": None}, {}),
        ({"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"chat_template_kwargs": ALOUD}),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": ALOUD}),
        ({"thinking": {"type": "disabled"}}, {}),
        ({"output_config": {"effort": "low"}}, {"chat_template_kwargs": {**SILENT, "reasoning_effort": "low"}}),
        ({"output_config": {"effort": "max"}}, {"chat_template_kwargs": {**SILENT, "reasoning_effort": "high"}}),
        ({"output_config": {"format": SCHEMA}}, {"json_schema": {"type": "array"}}),
        ({"output_format": SCHEMA}, {"json_schema": {"type": "array"}}),
        ({"output_format": SCHEMA, "tools": [TOOL]}, {"json_schema": {"type": "array"}, "tools": [FLAT]}),
        ({"tools": [TOOL]}, {"tools": [FLAT]}),
        ({"tools": [{**TOOL, "type": "custom"}], "tool_choice": {"type": "auto"}}, {"tools": [FLAT]}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tools": [FLAT], "parallel_tool_calls": False},
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [FLAT], "must_call": ["f"]}),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, {"tools": [FLAT], "must_call": ("f",)}),
    ],
)
def test_fields_become_options(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert read(**fields).options == {**DEFAULTS, **options}


BEGUN = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "{"}]}]


def test_an_answer_goes_on_with_a_last_message_of_the_assistant() -> None:
    request = read(messages=BEGUN)
    assert request.options == {**DEFAULTS, "continue_final_message": True}
    assert request.prompts == ({"messages": [*MESSAGES, {"role": "assistant", "content": "{"}]},)
    assert read(messages=[*BEGUN, *MESSAGES]).options == DEFAULTS


USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
CALLED = {"name": "f", "arguments": {"a": 1}, "id": "c1"}


@pytest.mark.parametrize(
    ("system", "given", "messages"),
    [
        ("be short", MESSAGES, [{"role": "system", "content": "be short"}, *MESSAGES]),
        (
            [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"},
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "b"},
            ],
            MESSAGES,
            [{"role": "system", "content": "a\nb"}, *MESSAGES],
        ),
        ([{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}], MESSAGES, MESSAGES),
        (
            None,
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            None,
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "redacted_thinking", "data": "?"},
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "text", "text": "So."},
                        USE,
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]},
                        {"type": "tool_result", "tool_use_id": "c2"},
                        {"type": "text", "text": "and now?"},
                    ],
                },
            ],
            [
                {"role": "assistant", "content": "So.", "reasoning": "hm", "tool_calls": [CALLED]},
                {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
                {"role": "tool", "content": "", "tool_call_id": "c2"},
                {"role": "user", "content": "and now?"},
            ],
        ),
        (
            None,
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "tool_result", "tool_use_id": "c1", "content": "4", "is_error": True},
                    ],
                }
            ],
            [{"role": "user", "content": "a"}, {"role": "tool", "content": "4", "tool_call_id": "c1"}],
        ),
    ],
)
def test_blocks_become_messages(system: Any, given: list[Any], messages: list[Any]) -> None:
    assert read(system=system, messages=given).prompts == ({"messages": messages},)


IMAGE = {"type": "image", "source": {"type": "base64", "data": "aGk="}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": ""}]}, "messages"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": BEGUN, "tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, *MESSAGES]},
            "messages[0].content[0].type",
        ),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [TOOL, {"type": "web_surf_20250305", "name": "web_search"}]}, "tools[1].type"),
        ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_format": {"type": "xml"}}, "output_format"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.message.partition(": ")[0] == named


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in UNSUPPORTED for value in (None, *UNSUPPORTED[name].but)]
)
def test_the_neutral_value_of_a_refused_field_is_accepted(name: str, value: object) -> None:
    assert read(**{name: value}).options == DEFAULTS


CALL = ToolCall("f", {"a": 1}, "c1")
PIECES = (
    AnswerPiece(0, "", tokens_of("hm"), reasoning="h"),
    AnswerPiece(0, "So", tokens_of("So"), reasoning="m"),
    AnswerPiece(0, ".", (), tool_calls=(CALL,)),
)
DONE = completion("So .", held_tokens=3, reasoning="hm", tool_calls=(CALL,), finish_reason="tool_calls")
USAGE = {"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3, "output_tokens": 2}


def streamed(request: GatewayRequest) -> list[Any]:
    """The data of all events, each of which has the name that its data states."""
    writer = DIALECT.writer(Head(request, "id", 5.5))
    parts = [*map(writer.piece, PIECES), writer.finished(Finished(0, DONE)), writer.end([DONE])]
    found = []
    for event in DIALECT.framing.join(chain(*parts)).decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_stream_is_blocks_that_begin_and_end_in_turn() -> None:
    start, *blocks, delta, stop = streamed(read(stream=True, thinking={"type": "adaptive"}))
    assert start["message"] == {
        "id": "msg_id",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**USAGE, "input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0},
    }
    assert [(one["index"], one.get("content_block") or one.get("delta")) for one in blocks] == [
        (0, {"type": "thinking", "thinking": "", "signature": ""}),
        (0, {"type": "thinking_delta", "thinking": "h"}),
        (0, {"type": "thinking_delta", "thinking": "m"}),
        (0, {"type": "signature_delta", "signature": SIGNATURE}),
        (0, None),
        (1, {"type": "text", "text": ""}),
        (1, {"type": "text_delta", "text": "So"}),
        (1, {"type": "text_delta", "text": "."}),
        (1, None),
        (2, {"type": "tool_use", "id": "c1", "name": "f", "input": {}}),
        (2, {"type": "input_json_delta", "partial_json": '{"a":1}'}),
        (2, None),
    ]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == USAGE and delta["disagg"]["decode_server"] == "m-decode"
    assert stop == {"type": "message_stop"}


@pytest.mark.parametrize("config", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_reasoning_is_sent_only_to_callers_that_want_it(config: Any) -> None:
    request = read(stream=True, thinking=config)
    started = [one["content_block"]["type"] for one in streamed(request) if one["type"] == "content_block_start"]
    whole = DIALECT.writer(Head(request, "id", 0.0)).whole([DONE])
    assert started == [block["type"] for block in whole["content"]] == ["text", "tool_use"]


def test_an_answer_without_a_token_is_a_message_without_blocks() -> None:
    done = completion("", finish_reason="length")
    events = DIALECT.framing.join(DIALECT.writer(Head(read(), "id", 0.0)).finished(Finished(0, done)))
    assert [line for line in events.decode().split("\n") if line.startswith("event")] == [
        "event: message_start",
        "event: message_delta",
        "event: message_stop",
    ]


@pytest.mark.parametrize(("reason", "written"), [("stop", "end_turn"), ("length", "max_tokens")])
def test_a_whole_answer_has_its_blocks_its_reason_and_its_usage(reason: str, written: str) -> None:
    done = completion("So .", held_tokens=3, reasoning="hm", finish_reason=reason)
    body = DIALECT.writer(Head(read(thinking={"type": "adaptive"}), "id", 0.0)).whole([done])
    assert body["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": SIGNATURE},
        {"type": "text", "text": "So ."},
    ]
    assert (body["stop_reason"], body["usage"]) == (written, USAGE)


def test_a_stop_sequence_is_named_as_the_reason() -> None:
    done = completion("So .", stop="\n\n")
    whole = DIALECT.writer(Head(read(), "id", 0.0)).whole([done])
    last = DIALECT.framing.join(DIALECT.writer(Head(read(), "id", 0.0)).finished(Finished(0, done))).decode()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "\n\n")
    assert '"delta":{"stop_reason":"stop_sequence","stop_sequence":"\\n\\n"}' in last


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ContextLengthExceeded("900 tokens"), 400, "invalid_request_error"),
        (Overloaded("busy"), 429, "rate_limit_error"),
        (ServerUnavailable("none up"), 503, "overloaded_error"),
        (KeyError("a bug"), 500, "api_error"),
    ],
)
async def test_errors_have_anthropic_s_form_streamed_or_not(error: Exception, status: int, kind: str) -> None:
    async with fake_client.http(fake_client.app(FakeClient(error))) as http:
        refused = await http.post("/v1/messages", json=BODY)
    async with fake_client.http(fake_client.app(FakeClient("one ", error))) as http:
        cut = await http.post("/v1/messages", json={**BODY, "stream": True})
    assert (refused.status_code, refused.json()["type"], refused.json()["error"]["type"]) == (status, "error", kind)
    name, data = cut.text.split("\n\n")[-2].split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: ")) == refused.json()
    assert "message_stop" not in cut.text


async def test_a_prompt_over_the_context_is_named_as_claude_code_knows_it() -> None:
    async with fake_client.http(fake_client.app(FakeClient(ContextLengthExceeded("900 tokens")))) as http:
        refused = await http.post("/v1/messages", json=BODY)
    assert refused.json()["error"]["message"].startswith("prompt is too long: ")


async def test_tokens_are_counted_of_the_prompt_that_would_be_answered() -> None:
    client = FakeClient()
    asked = {"model": "m", "messages": MESSAGES, "system": "be short", "tools": [TOOL]}
    async with fake_client.http(fake_client.app(client)) as http:
        counted = await http.post("/v1/messages/count_tokens", json=asked)
        await http.post("/v1/messages", json={**asked, "max_tokens": 7})
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": 42})
    of_prompt = ("model", "messages", "tools", "chat_template_kwargs")
    assert [client.asked[0][name] for name in of_prompt] == [client.asked[1][name] for name in of_prompt]


async def test_counting_tokens_is_a_request_of_the_key(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key = {"x-api-key": file.add("editor", models=["m"], requests_per_minute=2)}
    asked = {"model": "m", "messages": MESSAGES}
    async with fake_client.http(fake_client.app(FakeClient(), file.path), **key) as http:
        other = await http.post("/v1/messages/count_tokens", json={**asked, "model": "other"})
        counted = [await http.post("/v1/messages/count_tokens", json=asked) for _ in range(3)]
    assert [one.status_code for one in (other, *counted)] == [403, 200, 200, 429]


@pytest.mark.parametrize(
    ("error", "fields", "status"),
    [
        (ServerUnavailable("none up"), {}, 503),
        (Unauthorized("the fleet's token"), {}, 503),
        (None, {"model": "gpt"}, 404),
        (None, {"messages": []}, 400),
    ],
)
async def test_tokens_that_cannot_be_counted_are_an_error(
    error: Exception | None, fields: dict[str, Any], status: int
) -> None:
    client = FakeClient(*([error] if error else []))
    async with fake_client.http(fake_client.app(client)) as http:
        refused = await http.post("/v1/messages/count_tokens", json={**BODY, **fields})
    assert (refused.status_code, refused.json()["type"]) == (status, "error")


async def test_a_stream_begins_with_the_number_of_the_prompts_tokens() -> None:
    client = FakeClient("one ")
    client.stages = [Stage("prefill", "disaggregated", "m-prefill", "m-decode", prompt_tokens=5, held_tokens=2)]
    async with fake_client.http(fake_client.app(client)) as http:
        answer = await http.post("/v1/messages", json={**BODY, "stream": True})
    start = json.loads(
        next(line for line in answer.text.splitlines() if "message_start" in line and "data" in line)[6:]
    )
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2, 0)


async def test_models_are_listed_as_anthropic_s_client_reads_them() -> None:
    async with fake_client.http(fake_client.app(FakeClient()), **{"anthropic-version": "2023-06-01"}) as http:
        listed = (await http.get("/v1/models")).json()
        one = (await http.get("/v1/models/alias-of-m")).json()
        unknown = await http.get("/v1/models/gpt")
    assert ([model["id"] for model in listed["data"]], listed["has_more"]) == (["m", "other"], False)
    assert (listed["first_id"], listed["last_id"]) == ("m", "other")
    assert one == listed["data"][0] and one["max_input_tokens"] == 4096
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


async def test_tools_that_run_at_anthropic_are_left_out_with_a_warning() -> None:
    client, tools = FakeClient("one "), [TOOL, SEARCH, {"type": "bash_20250124", "name": "bash"}]
    async with fake_client.http(fake_client.app(client)) as http:
        answer = await http.post("/v1/messages", json={**BODY, "tools": tools})
        counted = await http.post("/v1/messages/count_tokens", json={**BODY, "tools": tools})
    assert (answer.status_code, counted.status_code) == (200, 200)
    assert [asked["tools"] for asked in client.asked] == [[FLAT], [FLAT]]
    assert answer.json()["disagg"]["warnings"] == [
        "tools[1]: the model is not told about web_search_20250305, which is no function",
        "tools[2]: the model is not told about bash_20250124, which is no function",
    ]
