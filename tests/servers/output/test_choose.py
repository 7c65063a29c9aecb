"""disagg/servers/output/choose.py and grammar.py: what a request gets, by the model's format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.api.base import InvalidValue
from disagg.api.requests import MAX_SCHEMA_BYTES, GenerateBody
from disagg.engines.model.format import HARMONY, AnswerFormat, ToolFormat
from disagg.engines.simulated.model import ByteTokenizer
from disagg.errors import CapabilityMissing, RequestError
from disagg.servers.output.choose import output_of, thinking
from disagg.servers.output.grammar import grammar_of

HERMES = ToolFormat("<tool_call>", "</tool_call>", lambda text, tools: json.loads(text))
THINK = AnswerFormat(think=("<think>", "</think>"), tools=HERMES)
GPT_OSS = AnswerFormat(harmony={name: 300 + number for number, name in enumerate(HARMONY)})
TOOL = {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def tokenizer(form: AnswerFormat) -> ByteTokenizer:
    made = ByteTokenizer(400)
    made.format = form
    return made


def body(**fields: Any) -> GenerateBody:
    return GenerateBody.from_json({**CHAT, **fields})


@pytest.mark.parametrize(
    ("form", "fields", "kind"),
    [
        (AnswerFormat(), {}, "Plain"),
        (AnswerFormat(tools=HERMES), {}, "Plain"),
        (AnswerFormat(tools=HERMES), {"tools": [TOOL]}, "Marked"),
        (THINK, {}, "Marked"),
        (GPT_OSS, {}, "Harmony"),
        (GPT_OSS, {"tools": [TOOL]}, "Harmony"),
        (AnswerFormat(), {"tools": [TOOL], "must_call": ["f"]}, "Forced"),
        (AnswerFormat(), {"tools": [TOOL], "regex": "x+"}, "Enveloped"),
        (AnswerFormat(tools=HERMES), {"tools": [TOOL], "regex": "x+"}, "Marked"),
        (GPT_OSS, {"tools": [TOOL], "regex": "x+"}, "Harmony"),
        (THINK, {"messages": None, "prompt": "x"}, "Plain"),
    ],
)
def test_the_output_of_a_request(form: AnswerFormat, fields: dict[str, Any], kind: str) -> None:
    assert type(output_of(body(**fields), b"x", tokenizer(form))).__name__ == kind


def test_tools_whose_calls_cannot_be_read_are_refused() -> None:
    with pytest.raises(RequestError, match="tools: this model writes calls"):
        output_of(body(tools=[TOOL]), b"x", tokenizer(AnswerFormat()))
    with pytest.raises(CapabilityMissing, match="mlx-lm is not installed"):
        output_of(body(tools=[TOOL]), b"x", tokenizer(AnswerFormat(parsers=False)))


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [("assistant\n<think>\n", True), ("assistant\n", False), ("<think>\n\n</think>\n\n", False), ("<think>: x", False)],
)
def test_an_answer_begins_in_its_reasoning_if_the_prompt_ends_with_its_mark(prompt: str, opened: bool) -> None:
    assert thinking(prompt.encode(), tokenizer(THINK), THINK) is opened


def test_an_answer_that_must_be_a_call_is_one() -> None:
    forced = output_of(body(tools=[TOOL], must_call=["f"]), b"x", tokenizer(AnswerFormat()))
    parts = [part for letter in b'{"name": "f", "arguments": {"a": 1}}' for part in forced.push(letter)]
    (part,) = forced.finish()
    assert parts == [] and part.call is not None and (part.call.name, part.call.arguments) == ("f", {"a": 1})


def test_a_forced_call_that_was_cut_off_is_left_out() -> None:
    forced = output_of(body(tools=[TOOL], must_call=["f"]), b"x", tokenizer(AnswerFormat()))
    for letter in b'{"name": "f", "argu':
        assert not forced.push(letter)
    assert not forced.finish()


@pytest.mark.parametrize(
    ("text", "streamed", "end"),
    [
        ('{"a": 1}', '{"a": 1}', []),
        ('{"name":"g","arguments":{}}', '{"name":"g","arguments":{}}', []),  # no tool: the form allows it
        ('{"name":"f","arguments":{"a":1}}', "", ["f"]),
        ('{"name":"f","arguments":{"a"', "", []),
        ('{"name":"f","arguments":[1]}', "", ['{"name":"f","arguments":[1]}']),  # no call: the form allows it
        ('{"na', "", ['{"na']),
    ],
)
def test_an_answer_that_may_be_a_call_or_a_form_is_streamed_once_it_is_no_call(
    text: str, streamed: str, end: list[str]
) -> None:
    output = output_of(body(tools=[TOOL], json_schema={"type": "object"}), b"x", tokenizer(AnswerFormat()))
    parts = [part.text for letter in text.encode() for part in output.push(letter)]
    assert "".join(parts) == streamed
    assert [part.call.name if part.call else part.text for part in output.finish()] == end


def test_only_an_answer_that_must_have_a_form_has_a_grammar() -> None:
    assert grammar_of(body(), THINK) is grammar_of(body(tools=[TOOL]), THINK) is None


def test_each_tool_has_a_rule_whose_references_are_its_own() -> None:
    other = {**TOOL, "name": 'g"'}
    grammar = grammar_of(body(tools=[TOOL, other, {"name": "h"}], must_call=["f", 'g"']), AnswerFormat())
    assert grammar is not None
    start, form, *rules = grammar.splitlines()
    assert (start, form, len(rules)) == ("start: form", "form: call0 | call1", 4)
    assert json.loads(rules[3].removeprefix("arguments1: %json "))["$defs"] == {"A": {"type": "integer"}}


def test_the_form_of_an_answer_of_gpt_oss_is_that_of_its_last_channel() -> None:
    schema = {"json_schema": {"type": "object"}}
    assert "<|channel|>" in (grammar_of(body(**schema), GPT_OSS) or "")
    plain = body(**schema, messages=None, prompt="x")
    assert (grammar_of(plain, GPT_OSS) or "").startswith("start: form\n")


def test_an_answer_of_gpt_oss_that_goes_on_with_a_message_is_text_and_its_form_has_no_channels() -> None:
    begun = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "It"}], "continue_final_message": True}
    output = output_of(body(**begun), b"x", tokenizer(GPT_OSS))
    assert [part.text for letter in b" is" for part in output.push(letter)] == [" ", "i", "s"]
    assert (grammar_of(body(**begun, regex="a"), GPT_OSS) or "").startswith("start: form\n")


@pytest.mark.parametrize("form", [AnswerFormat(), THINK, GPT_OSS])
def test_no_stop_string_is_looked_for_before_the_least_number_of_tokens(form: AnswerFormat) -> None:
    mark = form.harmony or {}
    head = [mark["channel"], *b"final", mark["message"]] if mark else []
    for least, text in ((0, "a"), (len(head) + 2, "abca")):
        sampling = {"stop": ["b"], "min_tokens": least}
        output = output_of(body(sampling=sampling), b"x", tokenizer(form))
        parts = [part.text for token in [*head, *b"abcab"] for part in output.push(token)]
        assert "".join(parts) == text and output.stopped == "b"
    kept = output_of(body(sampling={"stop": ["b"], "include_stop_str_in_output": True}), b"x", tokenizer(form))
    assert "".join(part.text for token in [*head, *b"abcab"] for part in kept.push(token)) == "ab"


def test_the_schemas_of_tools_that_must_be_called_are_bounded_together() -> None:
    half = {"description": "x" * (MAX_SCHEMA_BYTES // 2)}
    tools = [{"name": name, "parameters": half} for name in ("f", "g")]
    assert body(tools=tools, must_call=["f"]).must_call == ("f",)
    with pytest.raises(InvalidValue, match="must_call: the parameters of its tools are over 65536 bytes"):
        body(tools=tools, must_call=["f", "g"])
