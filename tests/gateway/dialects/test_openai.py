"""The OpenAI dialects as pure functions: body -> request, events -> answer."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from disagg.api.events import TokenLogprob
from disagg.api.requests import ToolCall
from disagg.errors import CapabilityMissing, RequestError
from disagg.gateway.dialects.base import (
    REFUSED,
    AnswerPiece,
    Dialect,
    Finished,
    GatewayRequest,
    Head,
    read_fields,
)
from disagg.gateway.dialects.chat import ChatCompletions
from disagg.gateway.dialects.completions import Completions
from disagg.gateway.dialects.openai import UNSUPPORTED, StreamOptions
from disagg.gateway.dialects.problems import Problem
from disagg.inference.types import Completion, Stage
from tests.gateway.fake_client import completion, tokens_of

CHAT, TEXT = ChatCompletions(), Completions()
MESSAGES = [{"role": "user", "content": "hello"}]
KEPT = {"include_stop_str_in_output": True}
DEFAULTS = {"temperature": 1.0, "max_tokens": 4096, "fit_context": True}
BOUNDED = {**DEFAULTS, "max_tokens": 7}
SUM = {"name": "sum", "arguments": '{"of": [2, 2]}'}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edit files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*"'}},
    },
}
SAY = {"type": "custom", "custom": {"name": "say"}}
FLAT = {"name": "f", "description": "", "parameters": {"type": "object"}}


def chat(**fields: Any) -> GatewayRequest:
    return CHAT.read({"model": "m", "messages": MESSAGES, **fields})


def text(**fields: Any) -> GatewayRequest:
    return TEXT.read({"model": "m", "prompt": "x", **fields})


@pytest.mark.parametrize("read", [chat, text])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, DEFAULTS),
        ({"temperature": 0, "top_p": 0.5, "min_p": 0.1}, {**DEFAULTS, "temperature": 0, "top_p": 0.5, "min_p": 0.1}),
        ({"top_k": -1}, {**DEFAULTS, "top_k": 0}),
        ({"top_k": 40, "seed": 3}, {**DEFAULTS, "top_k": 40, "seed": 3}),
        ({"stop": "\n"}, {**DEFAULTS, "stop": "\n"}),
        ({"stop": ["a", "b"]}, {**DEFAULTS, "stop": ("a", "b")}),
        ({"stop": None, "seed": None, "max_tokens": None, "temperature": None}, DEFAULTS),
        ({"repetition_penalty": 1.1, "ignore_eos": True}, {**DEFAULTS, "repetition_penalty": 1.1, "ignore_eos": True}),
        (
            {"min_tokens": 3, "stop_token_ids": [7], "bad_words": ["a"], "include_stop_str_in_output": True},
            {**DEFAULTS, "min_tokens": 3, "stop_token_ids": (7,), "bad_words": ("a",), **KEPT},
        ),
        ({"no_stop_trim": True}, {**DEFAULTS, **KEPT}),
        (
            {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"50256": -100}},
            {**DEFAULTS, "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": [(50256, -100)]},
        ),
        ({"user": "u", "metadata": {}, "store": True, "priority": 1, "parallel_tool_calls": True}, DEFAULTS),
    ],
)
def test_sampling_fields_become_options(read: Any, fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert read(**fields).options == options


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"max_tokens": 9, "max_completion_tokens": 7}, BOUNDED),
        ({"max_completion_tokens": 7}, BOUNDED),
        ({"logprobs": True}, {**DEFAULTS, "logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {**DEFAULTS, "logprobs": 3}),
        ({"logprobs": False, "top_logprobs": 0}, DEFAULTS),
        ({"tools": [TOOL]}, {**DEFAULTS, "tools": [FLAT]}),
        ({"tools": [TOOL], "tool_choice": "none"}, DEFAULTS),
        ({"tools": [TOOL], "tool_choice": "required"}, {**DEFAULTS, "tools": [FLAT], "must_call": ["f"]}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            {**DEFAULTS, "tools": [FLAT], "must_call": ("f",)},
        ),
        ({"response_format": {"type": "text"}}, DEFAULTS),
        ({"response_format": {"type": "json_object"}}, {**DEFAULTS, "json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}},
            {**DEFAULTS, "json_schema": {"type": "array"}},
        ),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {**DEFAULTS, "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"}},
        ),
        ({"repeat_penalty": 1.2}, {**DEFAULTS, "repetition_penalty": 1.2}),
    ],
)
def test_fields_that_only_chats_have(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert chat(**fields).options == options


BEGUN = [*MESSAGES, {"role": "assistant", "content": "It is"}]
GOES_ON = {"continue_final_message": True}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"messages": BEGUN}, {}),
        ({"messages": BEGUN, "continue_final_message": True}, GOES_ON),
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}, GOES_ON),
        ({"messages": BEGUN, "add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"messages": [*MESSAGES, {**BEGUN[-1], "prefix": True}]}, GOES_ON),
        ({"continue_final_message": False, "add_generation_prompt": True}, {}),
    ],
)
def test_how_the_prompt_of_a_chat_ends(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert chat(**fields).options == {**DEFAULTS, **options}


def test_a_suffix_makes_a_gap_in_each_prompt_of_text() -> None:
    request = text(prompt=["a", "b"], suffix=")")
    assert request.options == {**DEFAULTS, "suffix": ")"} and request.prompts == ({"prompt": "a"}, {"prompt": "b"})


ARRAY = {"type": "array"}


@pytest.mark.parametrize("read", [chat, text])
@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object", "schema": ARRAY}}, {"json_schema": ARRAY}),
        ({"response_format": {"type": "json_schema", "schema": ARRAY}}, {"json_schema": ARRAY}),
        ({"json_schema": ARRAY}, {"json_schema": ARRAY}),
        ({"guided_json": ARRAY}, {"json_schema": ARRAY}),
        ({"guided_json": '{"type": "array"}'}, {"json_schema": ARRAY}),
        ({"guided_json": {}}, {"json_schema": {}}),
        ({"guided_json_object": True}, {"json_schema": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ({"guided_grammar": "start: x"}, {"grammar": "start: x"}),
        ({"structured_outputs": {"json": ARRAY}}, {"json_schema": ARRAY}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+", "whitespace_pattern": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ("a",)}),
        ({"structured_outputs": {"grammar": "start: x"}}, {"grammar": "start: x"}),
        ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"ebnf": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"guided_regex": "", "guided_choice": [], "structured_outputs": {}}, {}),
    ],
)
def test_the_form_of_an_answer_has_many_names(read: Any, fields: dict[str, Any], form: dict[str, Any]) -> None:
    assert read(**fields).options == {**DEFAULTS, **form}


def test_a_form_and_tools_are_either_and_a_forced_call_needs_no_form() -> None:
    form = {"response_format": {"type": "json_object"}, "tools": [TOOL]}
    assert chat(**form).options == {**DEFAULTS, "tools": [FLAT], "json_schema": {"type": "object"}}
    assert chat(**form, tool_choice="none").options == {**DEFAULTS, "json_schema": {"type": "object"}}
    assert chat(**form, tool_choice="required").options == {**DEFAULTS, "tools": [FLAT], "must_call": ["f"]}


@pytest.mark.parametrize(
    ("given", "on", "effort"),
    [
        ({"enable_thinking": False}, False, None),
        ({"enable_thinking": True, "reasoning_effort": "low"}, True, "low"),
        ({"think": False}, False, None),
        ({"think": "high"}, True, "high"),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, None),
        ({"reasoning": {"effort": "medium"}}, None, "medium"),
        ({"reasoning": {"enabled": True, "exclude": False}}, True, None),
        ({"reasoning_effort": "none"}, False, "none"),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}}, True, None),
    ],
)
def test_reasoning_is_turned_on_and_off_by_the_names_that_clients_have_for_it(
    given: Any, on: bool | None, effort: str | None
) -> None:
    template: dict[str, Any] = {} if on is None else {"enable_thinking": on, "thinking": on}
    template |= {} if effort is None else {"reasoning_effort": effort}
    assert chat(**given).options["chat_template_kwargs"] == template


@pytest.mark.parametrize("given", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_reasoning_that_the_caller_does_not_want_is_not_sent(given: Any) -> None:
    done = completion("So.", reasoning="hm")
    for request, shown in ((chat(**given), False), (chat(), True)):
        writer = CHAT.writer(Head(request, "id", 0.0))
        deltas = [one["choices"][0]["delta"] for one in writer.piece(AnswerPiece(0, "So.", (), reasoning="hm"))]
        assert any("reasoning" in one for one in deltas) is shown
        message = writer.whole([done])["choices"][0]["message"]
        assert (message["reasoning"] == "hm") is ("reasoning_content" in message) is shown


@pytest.mark.parametrize("api", REFUSED)
def test_every_refusal_names_the_field_the_reason_and_what_to_send_instead(api: str) -> None:
    for name, field in REFUSED[api].items():
        with pytest.raises(RequestError) as caught:
            read_fields(StreamOptions, {name: "surely not neutral"}, REFUSED[api])
        assert str(caught.value) == f"{name}: not supported: {field.why} ({field.instead})"
        assert field.why and field.instead and not set(field.why + field.instead) & set("\n()")


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ([{"role": "developer", "content": "be short"}], [{"role": "system", "content": "be short"}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "ab"}],
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": "hm", "name": "x"}],
            [{"role": "assistant", "content": "", "reasoning": "hm"}],
        ),
        (
            [
                {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": SUM}]},
                {"role": "tool", "tool_call_id": "c1", "content": "4"},
            ],
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"name": "sum", "arguments": {"of": [2, 2]}, "id": "c1"}],
                },
                {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "sum"},
            ],
        ),
    ],
)
def test_messages_become_texts(given: list[Any], messages: list[Any]) -> None:
    assert CHAT.read({"model": "m", "messages": given}).prompts == ({"messages": messages},)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("x", ({"prompt": "x"},)),
        (["x", "y"], ({"prompt": "x"}, {"prompt": "y"})),
        ([1, 2], ({"tokens": [1, 2]},)),
        ([[1, 2], [3]], ({"tokens": (1, 2)}, {"tokens": (3,)})),
    ],
)
def test_a_prompt_has_four_forms(given: Any, prompts: Any) -> None:
    assert text(prompt=given).prompts == prompts


@pytest.mark.parametrize(
    ("read", "fields", "named"),
    [
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": "hello"}, "messages"),
        (chat, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (chat, {"messages": [*MESSAGES, {"role": "function", "content": "4"}]}, "messages[1].role"),
        (
            chat,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            chat,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (chat, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (chat, {"model": None}, "model"),
        (chat, {"n": 0}, "n"),
        (chat, {"n": 17}, "n"),
        (chat, {"temperature": "hot"}, "temperature"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"stream_options": {"include_usage": True}}, "stream_options"),
        (text, {"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        (chat, {"tools": [{"type": "function"}]}, "tools[0].type"),
        (chat, {"tools": [TOOL] * 129}, "tools"),
        (chat, {"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        (chat, {"tool_choice": "required"}, "tool_choice"),
        (chat, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        (chat, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        (chat, {"tools": [TOOL, TOOL]}, "tools[1].name"),
        (chat, {"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        (chat, {"tools": [PATCH], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}, "tool_choice"),
        (
            chat,
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (chat, {"response_format": {"type": "xml"}}, "response_format.type"),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (chat, {"functions": [{"name": "f"}]}, "functions"),
        (text, {"tools": [TOOL]}, "tools"),
        (chat, {"guided_regex": "a", "grammar": "start: x"}, "grammar"),
        (chat, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (chat, {"suffix": "x"}, "suffix"),
        (text, {"continue_final_message": True}, "continue_final_message"),
        (text, {"prompt": [1, 2], "suffix": "x"}, "suffix"),
        (text, {"suffix": "x", "echo": True}, "suffix"),
        (text, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        (text, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (text, {"guided_json": "["}, "guided_json"),
        (chat, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (text, {"reasoning_effort": "high"}, "reasoning_effort"),
        (text, {"prompt": []}, "prompt"),
        (text, {"prompt": ["x", 1]}, "prompt"),
        (text, {"prompt": 1}, "prompt"),
        (text, {"prompt": ["x"] * 9, "n": 2}, "n"),
        (text, {"best_of": 1, "n": 2}, "best_of"),
        (text, {"best_of": 3, "stream": True}, "best_of"),
        (text, {"best_of": 17}, "best_of"),
        (chat, {"best_of": 3}, "best_of"),
        (chat, {"echo": True}, "echo"),
        (chat, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (text, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (text, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (text, {"max_tokens": 0}, "max_tokens"),
        (text, {"logit_bias": {"a": -100}}, "logit_bias"),
        (text, {"add_special_tokens": False}, "add_special_tokens"),
        (chat, {"add_special_tokens": True}, "add_special_tokens"),
        (text, {"prompt_embeds": "x"}, "prompt_embeds"),
        (chat, {"stop_regex": "x"}, "stop_regex"),
        (chat, {"separate_reasoning": False}, "separate_reasoning"),
        (text, {"logprob_token_ids": [7]}, "logprob_token_ids"),
        (text, {"guided_json": '{"const": NaN}'}, "guided_json"),
        (text, {"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        (text, {"logit_bias": {"9" * 5000: -100}}, "logit_bias"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(read: Any, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.message.partition(": ")[0] == named


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, field in UNSUPPORTED.items() for value in field.but]
)
def test_the_neutral_value_of_a_refused_field_is_accepted(name: str, value: object) -> None:
    assert chat(**{name: value}).options == DEFAULTS


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_null_is_neutral(name: str) -> None:
    assert chat(**{name: None}).options == DEFAULTS


STAGE = Stage("decode", "disaggregated", "m-prefill", "m-decode", prompt_tokens=5, held_tokens=3)


def streamed(dialect: Dialect, request: GatewayRequest, stage: Stage | None = None) -> list[Any]:
    """The events of an answer "one two" in two pieces."""
    writer, whole = dialect.writer(Head(request, "id", 5.5)), completion("one two", held_tokens=3)
    parts = [
        writer.piece(AnswerPiece(0, "one ", tokens_of("one"), stage=stage)),
        writer.piece(AnswerPiece(0, "", ())),
        writer.piece(AnswerPiece(0, "two", tokens_of("two"), stage=stage)),
        writer.finished(Finished(0, whole)),
        writer.end([whole]),
    ]
    written = dialect.framing.join(chain(*parts)) + dialect.framing.done
    data = [line.removeprefix("data: ") for line in written.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def test_a_streamed_chat_is_role_then_text_then_reason_then_usage() -> None:
    *chunks, usage, done = streamed(CHAT, chat(stream=True, stream_options={"include_usage": True}))
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        ("chatcmpl-id", "chat.completion.chunk", 5, "m")
    }
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "one "},
        {"content": "two"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert choices[-1]["disagg"]["decode_server"] == "m-decode"
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert done == "[DONE]"


@pytest.mark.parametrize(("dialect", "read"), [(CHAT, chat), (TEXT, text)])
def test_with_continuous_usage_stats_every_chunk_states_the_tokens_so_far(dialect: Dialect, read: Any) -> None:
    given = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, usage, _ = streamed(dialect, read(stream=True, stream_options=given), STAGE)
    so_far = [(one["usage"]["prompt_tokens"], one["usage"]["completion_tokens"]) for one in chunks if "usage" in one]
    assert len(so_far) == len(chunks) and so_far == sorted(so_far)
    assert so_far[0][1] == (0 if dialect is CHAT else 1), "a chat's first chunk holds its role only"
    assert so_far[-1] == (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (5, 2)
    *alone, _ = streamed(dialect, read(stream=True, stream_options={**given, "include_usage": False}), STAGE)
    assert not any("usage" in one for one in alone), "as in vLLM, they come with include_usage"


def test_only_a_completion_refuses_an_answer_that_its_context_has_no_room_for() -> None:
    assert chat(max_tokens=7).options == BOUNDED
    assert text(max_tokens=7).options == {"temperature": 1.0, "max_tokens": 7}


def test_without_include_usage_a_stream_has_none() -> None:
    for dialect, request in ((CHAT, chat(stream=True)), (TEXT, text(stream=True))):
        *chunks, done = streamed(dialect, request)
        assert done == "[DONE]" and not any("usage" in chunk for chunk in chunks)


def test_streamed_log_probabilities_come_with_their_text() -> None:
    chunks = streamed(CHAT, chat(stream=True, logprobs=True, top_logprobs=2))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    assert [one and [token["token"] for token in one["content"]] for one in found] == [
        None,
        ["token_id:0"],
        ["token_id:0"],
        None,
    ]
    assert found[1]["content"][0]["top_logprobs"][1] == {"token": "token_id:99", "logprob": -2.0, "bytes": None}


def test_a_streamed_completion_is_text_then_reason() -> None:
    *chunks, done = streamed(TEXT, text(stream=True, logprobs=1))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices if choice["text"]] == ["one ", "two"]
    offsets = [choice["logprobs"]["text_offset"] for choice in choices if choice["logprobs"]]
    assert offsets == [[0], [4]]
    assert choices[-1]["finish_reason"] == "stop" and done == "[DONE]"


@pytest.mark.parametrize(("asked", "likeliest"), [(0, [{"a": -0.5}]), (1, [{"b": -0.1, "a": -0.5}])])
def test_the_likeliest_tokens_of_a_completion_include_the_one_that_was_chosen(asked: int, likeliest: Any) -> None:
    token = TokenLogprob(1, -0.5, ((2, -0.1),)[:asked], b"a", (b"b",)[:asked])
    writer = TEXT.writer(Head(text(stream=True, logprobs=asked), "id", 0.0))
    (chunk,) = writer.piece(AnswerPiece(0, "a", (token,)))
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == likeliest


def test_whole_answers_count_each_prompt_once() -> None:
    request = TEXT.read({"model": "m", "prompt": ["x", "y"], "n": 2})
    body = TEXT.writer(Head(request, "id", 0.0)).whole([completion(words) for words in ("a", "a b", "c", "c d")])
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (10, 6)
    assert body["usage"]["total_tokens"] == 16


def test_the_likeliest_of_the_answers_to_each_prompt_are_shown() -> None:
    request = TEXT.read({"model": "m", "prompt": ["x", "y"], "best_of": 3, "n": 2})
    assert request.choices == 6

    def scored(name: str, *logprobs: float) -> Completion:
        return replace(completion(name), tokens=tuple(TokenLogprob(1, one) for one in logprobs))

    given = [scored("a", -3.0), scored("b", -1.0, -1.0), scored("c", -2.0), *map(scored, "def", (-1.0, -2.0, -0.5))]
    body = TEXT.writer(Head(request, "id", 0.0)).whole(given)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "b"), (1, "c"), (2, "f"), (3, "d")]
    assert body["usage"]["completion_tokens"] == 6, "of all answers"
    unknown = replace(given[0], tokens=())
    with pytest.raises(CapabilityMissing, match="best_of"):
        TEXT.writer(Head(request, "id", 0.0)).whole([unknown] * 6)


def test_each_answer_of_a_seeded_request_has_its_own_seed() -> None:
    request = TEXT.read({"model": "m", "prompt": ["x", "y"], "n": 2, "seed": 7})
    assert [(request.arguments(choice)["prompt"], request.arguments(choice)["seed"]) for choice in range(4)] == [
        ("x", 7),
        ("x", 8),
        ("y", 7),
        ("y", 8),
    ]


def test_the_seeds_of_several_answers_go_on_at_zero_and_a_wrong_one_stays_wrong() -> None:
    request = text(n=2, seed=(1 << 63) - 1)
    assert [request.arguments(choice)["seed"] for choice in range(2)] == [(1 << 63) - 1, 0]
    assert [text(seed=seed).arguments(0)["seed"] for seed in (-(1 << 63) - 1, 1 << 63)] == [-(1 << 63) - 1, 1 << 63]


def test_a_negative_seed_is_one_too_but_minus_one_is_none() -> None:
    seeds = [text(n=2, seed=seed).arguments(choice).get("seed") for seed in (-1, -2, -(1 << 63)) for choice in (0, 1)]
    assert seeds == [None, None, (1 << 63) - 2, (1 << 63) - 1, 0, 1]


@pytest.mark.parametrize(("max_tokens", "seconds"), [(None, 1419.2), (1, 600.2), (32_000, 7000), (1 << 20, 86_400)])
def test_a_long_answer_has_a_later_deadline(max_tokens: int | None, seconds: float) -> None:
    assert text(max_tokens=max_tokens).arguments(0)["timeout"] == pytest.approx(seconds)


def test_a_whole_chat_has_vllm_s_fields_if_they_are_empty_too() -> None:
    body = CHAT.writer(Head(chat(), "id", 0.0)).whole([completion("hi")])
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi", "reasoning": None}
    assert body["prompt_logprobs"] is None


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_name_tokens_by_their_ids_for_a_caller_that_wants_so(stream: bool) -> None:
    token = TokenLogprob(1, -0.5, ((2, -0.1),), b"a", (b"b",))
    done, wanted = replace(completion("a"), tokens=(token,)), {"stream": stream, "return_tokens_as_token_ids": True}

    def logprobs(dialect: Dialect, request: GatewayRequest) -> Any:
        writer = dialect.writer(Head(request, "id", 0.0))
        written = [*writer.piece(AnswerPiece(0, "a", (token,)))] if stream else [writer.whole([done])]
        return written[-1]["choices"][0]["logprobs"]

    found = logprobs(TEXT, text(logprobs=1, **wanted))
    assert found["tokens"] == ["token_id:1"]
    assert found["top_logprobs"] == [{"token_id:2": -0.1, "token_id:1": -0.5}]
    (found,) = logprobs(CHAT, chat(logprobs=True, top_logprobs=1, **wanted))["content"]
    assert (found["token"], found["bytes"]) == ("token_id:1", [97])
    assert found["top_logprobs"] == [{"token": "token_id:2", "logprob": -0.1, "bytes": [98]}]


def test_an_error_has_openai_s_fields() -> None:
    problem = Problem(400, "invalid_request_error", "some_code", "what is wrong", "n")
    body = {"message": "what is wrong", "type": "invalid_request_error", "param": "n", "code": "some_code"}
    assert CHAT.error(problem) == TEXT.error(problem) == {"error": body}


CALLS = (ToolCall("f", {"a": 1}, "c1"), ToolCall("g", {}, "c2"))
WRITTEN = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
    {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


def test_streamed_reasoning_and_calls_are_deltas_of_their_own_in_order() -> None:
    writer = CHAT.writer(Head(chat(stream=True), "id", 0.0))
    parts = [
        writer.piece(AnswerPiece(0, "", (), reasoning="hm")),
        writer.piece(AnswerPiece(0, "So.", (), tool_calls=CALLS[:1])),
        writer.piece(AnswerPiece(0, "", (), tool_calls=CALLS[1:])),
        writer.finished(Finished(0, completion("So.", finish_reason="tool_calls"))),
    ]
    lines = [line.removeprefix(b"data: ") for line in CHAT.framing.join(chain(*parts)).split(b"\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"content": "So."},
        {"tool_calls": [{"index": 0, **WRITTEN[0]}]},
        {"tool_calls": [{"index": 1, **WRITTEN[1]}]},
        {},
    ]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_whole_answer_that_only_calls_tools_has_no_content() -> None:
    done = completion("", finish_reason="tool_calls", reasoning="hm", tool_calls=CALLS, reasoning_tokens=3)
    body = CHAT.writer(Head(chat(), "id", 0.0)).whole([done])
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": WRITTEN,
    }
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_a_custom_tool_is_told_as_a_function_and_called_as_the_caller_knows_it() -> None:
    request = chat(tools=[TOOL, PATCH], stream=True)
    told = request.options["tools"][1]
    assert told["name"] == "patch" and told["description"].endswith('Its input has this form (lark):\nstart: "*"')
    assert request.left_out == ("tools[1].format: the model is told this grammar, and not held to it",)
    calls = (ToolCall("patch", {"input": "*"}, "c1"), ToolCall("f", {"a": 1}, "c2"))
    written = [{"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*"}}, {**WRITTEN[0], "id": "c2"}]
    writer = CHAT.writer(Head(request, "id", 0.0))
    _, chunk = writer.piece(AnswerPiece(0, "", (), tool_calls=calls))
    assert chunk["choices"][0]["delta"]["tool_calls"] == [{"index": at, **one} for at, one in enumerate(written)]
    whole = writer.whole([completion("", finish_reason="tool_calls", tool_calls=calls)])
    assert whole["choices"][0]["message"]["tool_calls"] == written
    again = [{"role": "assistant", "tool_calls": written}, {"role": "tool", "tool_call_id": "c1", "content": "done"}]
    called, result = chat(messages=again).prompts[0]["messages"]
    assert called["tool_calls"] == [
        {"name": "patch", "arguments": {"input": "*"}, "id": "c1"},
        {"name": "f", "arguments": {"a": 1}, "id": "c2"},
    ]
    assert result["name"] == "patch"


def test_a_custom_tool_without_a_grammar_can_be_forced() -> None:
    forced = chat(tools=[TOOL, SAY], tool_choice={"type": "custom", "custom": {"name": "say"}})
    assert forced.options["must_call"] == ("say",)


@pytest.mark.parametrize(("mode", "called"), [("auto", None), ("required", ["say"])])
def test_of_allowed_tools_the_others_are_not_in_the_prompt(mode: str, called: Any) -> None:
    allowed = {"mode": mode, "tools": [{"type": "custom", "custom": {"name": "say"}}]}
    request = chat(tools=[TOOL, SAY], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [tool["name"] for tool in request.options["tools"]] == ["say"]
    assert request.options.get("must_call") == called


def test_log_probabilities_name_tokens_by_their_text_and_bytes() -> None:
    token = TokenLogprob(1, -0.5, ((1, -0.5), (2, -2.0)), b" a", (b" a", b"\xc3"))
    written = CHAT.framing.join(CHAT.writer(Head(chat(logprobs=True), "id", 0.0)).piece(AnswerPiece(0, " a", (token,))))
    (found,) = json.loads(written.split(b"data: ")[2])["choices"][0]["logprobs"]["content"]
    assert (found["token"], found["bytes"]) == (" a", [32, 97])
    assert [(one["token"], one["bytes"]) for one in found["top_logprobs"]] == [(" a", [32, 97]), ("\ufffd", [195])]


def test_an_answer_has_one_call_at_most_if_the_caller_wants_no_more_and_there_are_tools() -> None:
    for choice in ("auto", "required"):
        assert chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).options["parallel_tool_calls"] is False
        assert "parallel_tool_calls" not in chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=True).options
    assert "parallel_tool_calls" not in chat(parallel_tool_calls=False).options
