"""The dialect of /v1/responses as pure functions: body -> request, events -> answer; and its errors over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest

from disagg.api.events import TokenLogprob
from disagg.api.requests import ToolCall
from disagg.errors import RequestError, ServerUnavailable
from disagg.gateway.dialects.base import AnswerPiece, Finished, GatewayRequest, Head, Written
from disagg.gateway.dialects.responses import UNSUPPORTED, Responses
from disagg.gateway.dialects.responses_writer import SEALED
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient, completion, tokens_of

DIALECT = Responses()
DEFAULTS = {"temperature": 1.0, "max_tokens": 4096, "fit_context": True}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
FLAT = {"name": "f", "description": "", "parameters": {"type": "object"}}
ONE_CALL = {"parallel_tool_calls": False}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "array"}, "strict": True}
LOGPROBS = ["message.output_text.logprobs"]
SEAL = ["reasoning.encrypted_content"]


def read(**fields: Any) -> GatewayRequest:
    return DIALECT.read({"model": "m", "input": "hello", **fields})


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, DEFAULTS),
        ({"max_output_tokens": 7}, {**DEFAULTS, "max_tokens": 7}),
        ({"temperature": 0, "top_p": 0.5, "seed": 3}, {**DEFAULTS, "temperature": 0, "top_p": 0.5, "seed": 3}),
        ({"top_k": -1, "priority": 1, "service_tier": "auto", "metadata": {}, "user": "u"}, {**DEFAULTS, "top_k": 0}),
        (
            {"reasoning": {"effort": "low", "summary": "auto"}},
            {**DEFAULTS, "chat_template_kwargs": {"reasoning_effort": "low"}},
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, DEFAULTS),
        ({"text": {"format": {"type": "json_object"}}}, {**DEFAULTS, "json_schema": {"type": "object"}}),
        ({"text": {"format": SCHEMA}}, {**DEFAULTS, "json_schema": {"type": "array"}}),
        (
            {"text": {"format": SCHEMA}, "tools": [TOOL]},
            {**DEFAULTS, "json_schema": {"type": "array"}, "tools": [FLAT]},
        ),
        ({"structured_outputs": {"regex": "a"}}, {**DEFAULTS, "regex": "a"}),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {**DEFAULTS, "tools": [FLAT], **ONE_CALL}),
        ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": "none"}, DEFAULTS),
        ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": "auto"}, {**DEFAULTS, "tools": [FLAT]}),
        ({"tools": [TOOL], "tool_choice": "required"}, {**DEFAULTS, "tools": [FLAT], "must_call": ["f"]}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {**DEFAULTS, "tools": [FLAT], "must_call": ("f",)},
        ),
        ({"include": LOGPROBS}, {**DEFAULTS, "logprobs": 0}),
        ({"include": LOGPROBS, "top_logprobs": 2}, {**DEFAULTS, "logprobs": 2}),
        ({"include": ["file_search_call.results"], "stream_options": {"include_obfuscation": False}}, DEFAULTS),
    ],
)
def test_fields_become_options(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert read(**fields).options == options


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*"'},
}
NAMESPACE = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [TOOL]}
OF_AGENT = [TOOL, PATCH, NAMESPACE, {"type": "web_search", "external_web_access": False}, {"type": "local_shell"}]
TOLD = [
    FLAT,
    {
        "name": "apply_patch",
        "description": 'Edit files.\n\nIts input has this form (lark):\nstart: "*"',
        "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    },
    {**FLAT, "name": "mcp__files__f", "description": "Files."},
]
FORCED = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
FREE = {"type": "custom", "name": "say", "description": "Say it.", "format": {"type": "text"}}


def test_an_agents_tools_become_functions_or_are_left_out_with_a_warning() -> None:
    request = read(tools=OF_AGENT)
    assert request.options == {**DEFAULTS, "tools": TOLD}
    assert request.left_out == (
        "tools[1].format: the model is told this grammar, and not held to it",
        "tools[3]: the model is not told about web_search, which is no function",
        "tools[4]: the model is not told about local_shell, which is no function",
    )


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "say"}, "say"),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "name": "f", "namespace": "mcp__files"}, "mcp__files__f"),
    ],
)
def test_a_tool_whose_input_has_no_grammar_can_be_forced(choice: dict[str, Any], name: str) -> None:
    assert read(tools=[*OF_AGENT, FREE], tool_choice=choice).options["must_call"] == (name,)


@pytest.mark.parametrize(("mode", "called"), [("auto", None), ("required", ["f", "mcp__files__f"])])
def test_of_allowed_tools_the_others_are_not_in_the_prompt(mode: str, called: Any) -> None:
    allowed = [{"type": "function", "name": "f"}, {"type": "web_search"}]
    allowed.append({"type": "function", "name": "f", "namespace": "mcp__files"})
    request = read(tools=OF_AGENT, tool_choice={"type": "allowed_tools", "mode": mode, "tools": allowed})
    assert [tool["name"] for tool in request.options["tools"]] == ["f", "mcp__files__f"]
    assert request.options.get("must_call") == called
    assert request.echoed["tool_choice"]["tools"] == allowed


def test_what_is_wrong_in_allowed_tools_says_what_to_send() -> None:
    for changed, hint in (
        ({"tools": [{"type": "function", "name": "no"}]}, "offer 'no' in tools, too"),
        ({"mode": "any"}, 'send "auto" or "required"'),
    ):
        with pytest.raises(RequestError) as raised:
            read(tools=OF_AGENT, tool_choice={**ALLOWED, **changed})
        assert raised.value.hint == hint


@pytest.mark.parametrize(
    ("namespace", "function", "described"),
    [
        ("Files.", "Reads one.", "Files.\n\nReads one."),
        ("Files.", None, "Files."),
        (None, "Reads one.", "Reads one."),
        (None, None, ""),
    ],
)
def test_a_function_is_described_after_its_namespace(
    namespace: str | None, function: str | None, described: str
) -> None:
    tools = [{**NAMESPACE, "description": namespace, "tools": [{**TOOL, "description": function}]}]
    assert [tool["description"] for tool in read(tools=tools).options["tools"]] == [described]


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ({}, {"metadata": {}, "parallel_tool_calls": True, "text": {"format": {"type": "text"}}}),
        ({"metadata": {"job": "7"}, "user": "u", "instructions": "be short"}, {}),
        ({"parallel_tool_calls": False}, {}),
        ({"text": {"format": SCHEMA, "verbosity": "low"}}, {}),
        ({"store": True}, {"store": False}),
        ({"max_output_tokens": 7, "top_p": 0.5}, {}),
    ],
)
def test_a_response_repeats_what_its_request_has_set(given: dict[str, Any], echoed: dict[str, Any]) -> None:
    body = DIALECT.writer(Head(read(**given), "id", 0.0)).whole([DONE])
    assert (given | echoed).items() <= body.items()


def test_a_verbosity_is_accepted_with_a_warning() -> None:
    assert read(text={"verbosity": "low"}).left_out == ("text.verbosity: the model is not told",)
    assert read(text={"verbosity": "medium"}).left_out == ()


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ({}, ([], "auto")),
        ({"tools": OF_AGENT}, (OF_AGENT, "auto")),
        ({"tools": OF_AGENT, "tool_choice": "none"}, (OF_AGENT, "none")),
        ({"tools": OF_AGENT, "tool_choice": FORCED}, (OF_AGENT, FORCED)),
    ],
)
def test_a_response_repeats_the_callers_own_tools(given: dict[str, Any], echoed: Any) -> None:
    body = DIALECT.writer(Head(read(**given), "id", 0.0)).whole([DONE])
    assert (body["tools"], body["tool_choice"]) == echoed


@pytest.mark.parametrize(
    ("called", "arguments", "item"),
    [
        ("f", {"a": 1}, {"type": "function_call", "name": "f", "arguments": '{"a":1}'}),
        (
            "mcp__files__f",
            {"a": 1},
            {"type": "function_call", "name": "f", "namespace": "mcp__files", "arguments": '{"a":1}'},
        ),
        ("apply_patch", {"input": "*** x"}, {"type": "custom_tool_call", "name": "apply_patch", "input": "*** x"}),
        ("apply_patch", {"in": "x"}, {"type": "custom_tool_call", "name": "apply_patch", "input": '{"in":"x"}'}),
        ("unheard_of", {}, {"type": "function_call", "name": "unheard_of", "arguments": "{}"}),
    ],
)
def test_a_call_is_written_as_its_caller_knows_the_tool_and_can_be_sent_back(
    called: str, arguments: dict[str, Any], item: dict[str, Any]
) -> None:
    writer = DIALECT.writer(Head(read(tools=OF_AGENT, stream=True), "id", 0.0))
    call = ToolCall(called, arguments, "c1")
    added, delta, ended, done = events(writer.piece(AnswerPiece(0, "", (), tool_calls=(call,))))[2:]
    field = "input" if item["type"] == "custom_tool_call" else "arguments"
    kind = "custom_tool_call_input" if field == "input" else "function_call_arguments"
    assert [delta["type"], ended["type"]] == [f"response.{kind}.delta", f"response.{kind}.done"]
    assert delta["delta"] == ended[field] == item[field] and added["item"][field] == ""
    assert {**done["item"], "id": "", "status": ""} == {**item, "id": "", "status": "", "call_id": "c1"}
    output = {"type": item["type"] + "_output", "call_id": "c1", "output": "done"}
    (messages,) = (prompt["messages"] for prompt in read(input=[done["item"], output]).prompts)
    sent_back = {"input": item["input"]} if field == "input" else arguments
    assert messages == [
        {"role": "assistant", "content": "", "tool_calls": [{"name": called, "arguments": sent_back, "id": "c1"}]},
        {"role": "tool", "content": "done", "tool_call_id": "c1", "name": called},
    ]


CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "id": "fc_1"}
CALLED = {"name": "f", "arguments": {"a": 1}, "id": "c1"}
USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("instructions", "given", "messages"),
    [
        (None, "hello", [USER]),
        ("be short", "hello", [{"role": "system", "content": "be short"}, USER]),
        (
            "be short",
            [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "no tricks"}]},
                {"role": "user", "content": "hello"},
            ],
            [{"role": "system", "content": "be short\n\nno tricks"}, USER],
        ),
        (
            None,
            [USER, {"role": "system", "content": "now in French"}],
            [USER, {"role": "system", "content": "now in French"}],
        ),
        (
            None,
            [
                USER,
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {"role": "assistant", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
                CALL_ITEM,
                {**CALL_ITEM, "call_id": "c2", "arguments": ""},
                {"type": "function_call_output", "call_id": "c1", "output": "4"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
                {"type": "reasoning", "summary": [], "encrypted_content": SEALED + "ah"},
                {"role": "assistant", "content": "Nine."},
                {"role": "assistant", "content": "Really."},
            ],
            [
                USER,
                {
                    "role": "assistant",
                    "content": "So.",
                    "reasoning": "hm",
                    "tool_calls": [CALLED, {"name": "f", "arguments": {}, "id": "c2"}],
                },
                {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
                {"role": "tool", "content": "5", "tool_call_id": "c2", "name": "f"},
                {"role": "assistant", "content": "Nine.", "reasoning": "ah"},
                {"role": "assistant", "content": "Really."},
            ],
        ),
        (None, [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, USER], [USER]),
    ],
)
def test_items_become_messages(instructions: str | None, given: Any, messages: list[Any]) -> None:
    assert read(instructions=instructions, input=given).prompts == ({"messages": messages},)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [USER, {"type": "web_search_call"}]}, "input[1].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{**CALL_ITEM, "arguments": "[1]"}]}, "input[0].arguments"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{**NAMESPACE, "tools": [TOOL] * 129}]}, "tools[0].tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}, "guided_choice": ["a"]}, "text.format"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tools": [TOOL], "tool_choice": {**ALLOWED, "mode": "any"}}, "tool_choice.mode"),
        (
            {"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": [{"type": "function", "name": "g"}]}},
            "tool_choice.tools",
        ),
        (
            {"tools": [TOOL], "tool_choice": {**ALLOWED, "mode": "required", "tools": [{"type": "web_search"}]}},
            "tool_choice",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_tokens": 7}, "max_tokens"),
        ({"guided_regex": "a", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
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
    AnswerPiece(0, ".", tokens_of("."), tool_calls=(CALL,)),
)
DONE = completion("So .", held_tokens=3, reasoning="hm", tool_calls=(CALL,), finish_reason="tool_calls")


def events(*objects: Iterable[Written]) -> list[Any]:
    return read_events(DIALECT.framing.join(chain(*objects)))


def read_events(data: bytes) -> list[Any]:
    """The data of all events, each of which has the name that its data states."""
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, body = event.split("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def streamed(request: GatewayRequest) -> list[Any]:
    writer = DIALECT.writer(Head(request, "id", 5.5))
    return events(*map(writer.piece, PIECES), writer.finished(Finished(0, DONE)), writer.end([DONE]))


def test_a_stream_is_items_that_begin_and_end_in_turn() -> None:
    found = streamed(read(stream=True))
    names = [one["type"].removeprefix("response.") for one in found]
    part = ["content_part.added", "content_part.done"]
    assert names == [
        *("created", "in_progress"),
        *("output_item.added", part[0], "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *(part[1], "output_item.done"),
        *("output_item.added", part[0], "output_text.delta", "output_text.delta", "output_text.done"),
        *(part[1], "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [one["output_index"] for one in found[2:-1]] == [0] * 7 + [1] * 7 + [2] * 4
    ended = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert found[-1]["response"]["output"] == ended
    assert {one["item_id"] for one in found if "item_id" in one} == {item["id"] for item in ended}
    assert [item["status"] for item in ended] == ["completed"] * 3
    assert ended[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert ended[1]["content"] == [{"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}]
    assert (ended[2]["name"], ended[2]["call_id"], ended[2]["arguments"]) == ("f", "c1", '{"a":1}')
    last = found[-1]["response"]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert last["disagg"]["decode_server"] == "m-decode" and last["store"] is False
    assert found[0]["response"]["usage"] is None and found[0]["response"]["output"] == []


def test_a_whole_response_has_the_items_of_the_stream() -> None:
    whole = DIALECT.writer(Head(read(), "id", 5.5)).whole([DONE])
    output = streamed(read(stream=True))[-1]["response"]["output"]
    output[1]["content"][0]["text"] = "So ."  # the made-up completion's
    assert json.loads(json.dumps(whole["output"])) == output
    assert (whole["id"], whole["status"], whole["created_at"]) == ("resp_id", "completed", 5)


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_an_answer_of_nothing_is_a_message_without_text(reason: Any, status: str) -> None:
    done = completion("", finish_reason=reason)
    found = events(DIALECT.writer(Head(read(stream=True), "id", 0.0)).finished(Finished(0, done)))
    part = ["content_part.added", "output_text.done", "content_part.done"]
    names = [one["type"].removeprefix("response.") for one in found]
    assert names == ["created", "in_progress", "output_item.added", *part, "output_item.done", status]
    (item,) = found[-1]["response"]["output"]
    assert (item["type"], item["status"], item["content"][0]["text"]) == ("message", status, "")
    assert DIALECT.writer(Head(read(), "id", 0.0)).whole([done])["output"] == [item]


def test_an_answer_that_is_cut_by_its_bound_is_incomplete() -> None:
    done = completion("So .", finish_reason="length")
    writer = DIALECT.writer(Head(read(stream=True, max_output_tokens=2), "id", 0.0))
    *_, item, last = events(writer.piece(AnswerPiece(0, "So .", ())), writer.finished(Finished(0, done)))
    assert item["item"]["status"] == last["response"]["status"] == "incomplete"
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["max_output_tokens"] == 2


@pytest.mark.parametrize(("include", "sealed"), [(None, None), (SEAL, SEALED + "hm")])
def test_reasoning_is_sealed_for_agents_that_ask_for_it(include: Any, sealed: str | None) -> None:
    item = streamed(read(stream=True, include=include))[-1]["response"]["output"][0]
    assert item["encrypted_content"] == sealed


def test_log_probabilities_come_with_their_text() -> None:
    token = TokenLogprob(1, -0.5, ((1, -0.5), (2, -2.0)), b" a", (b" a", b"\xc3"))
    writer = DIALECT.writer(Head(read(include=LOGPROBS, top_logprobs=2), "id", 0.0))
    (delta,) = [one for one in events(writer.piece(AnswerPiece(0, " a", (token,)))) if "delta" in one]
    assert [(one["token"], one["bytes"]) for one in delta["logprobs"]] == [(" a", [32, 97])]
    assert len(delta["logprobs"][0]["top_logprobs"]) == 2


def test_a_response_repeats_what_was_asked_for() -> None:
    request = read(tools=[TOOL], tool_choice="required", reasoning={"effort": "low"}, temperature=0.5)
    body = DIALECT.writer(Head(request, "id", 0.0)).whole([DONE])
    assert body["tools"] == [TOOL] and body["tool_choice"] == "required"
    assert (body["reasoning"]["effort"], body["temperature"], body["max_output_tokens"]) == ("low", 0.5, None)


async def test_a_cut_stream_ends_with_a_failed_response_and_an_error() -> None:
    failing = FakeClient("one ", ServerUnavailable("Decode server unavailable"))
    async with fake_client.http(fake_client.app(failing)) as http:
        response = await http.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
    *_, failed, error = read_events(response.content)
    assert failed["type"] == "response.failed" and failed["response"]["error"]["code"] == "no_host_available"
    assert "Decode server unavailable" in error["error"]["message"]
    assert b"response.completed" not in response.content
