"""disagg/servers/output/marked.py: reasoning and calls by marks, wherever the tokens are cut."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest

from disagg.api.requests import Tool
from disagg.engines.model.format import ToolFormat
from disagg.servers.output.marked import MAX_BLANKS, Marked, Marks
from disagg.servers.output.tool_calls import MAX_CALL_CHARS, parsed
from tests.servers.output.texts import Texts, cuts, run

THINK = ("<think>", "</think>")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [Tool("weather", "of a city", PARAMETERS)]
CALL = ("call", "weather {'city': 'Ulm', 'days': 2}")
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
CODER = """<tool_call>
<function=weather>
<parameter=city>
Ulm
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""
MISTRAL = '[TOOL_CALLS]weather[ARGS]{"city": "Ulm", "days": 2}'


def form(name: str) -> ToolFormat:
    parser: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return ToolFormat(parser.tool_call_start, parser.tool_call_end, parser.parse_tool_call)


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("json_tools", "Just text.", [("text", "Just text.")]),
        ("json_tools", "a < b <t", [("text", "a < b <t")]),
        ("json_tools", "ends in a blank ", [("text", "ends in a blank ")]),
        ("json_tools", "<think>\nWhy?\n</think>\n\nSo.", [("reasoning", "Why?"), ("text", "So.")]),
        ("json_tools", "<think>\n\n</think>\n\nSo.", [("text", "So.")]),
        ("json_tools", "<think>cut off", [("reasoning", "cut off")]),
        ("json_tools", HERMES, [CALL]),
        ("json_tools", f"Let me see.\n{HERMES}", [("text", "Let me see."), CALL]),
        ("json_tools", f"<think>hm</think>\n{HERMES}\n{HERMES}", [("reasoning", "hm"), CALL, CALL]),
        ("qwen3_coder", f"I look.\n\n{CODER}", [("text", "I look."), CALL]),
        ("mistral", MISTRAL, [CALL]),
        ("json_tools", "<tool_call>no json</tool_call>", [("text", "<tool_call>no json</tool_call>")]),
        ("json_tools", '<tool_call>{"name": "wea', [("text", '<tool_call>{"name": "wea')]),
        ("json_tools", "<tool_call>[1]</tool_call>", [("text", "<tool_call>[1]</tool_call>")]),
        ("json_tools", '<tool_call>{"name": 3}</tool_call>', [("text", '<tool_call>{"name": 3}</tool_call>')]),
    ],
)
def test_the_parts_of_an_answer_do_not_depend_on_where_its_tokens_are_cut(
    parser: str, text: str, expected: list[tuple[str, str]]
) -> None:
    for texts in cuts(text):
        found = run(Marked(Texts(texts), Marks(THINK, form(parser)), TOOLS), range(len(texts)))
        assert [(part.kind, part.text) for part in found] == expected, texts


def test_an_answer_may_begin_inside_its_reasoning() -> None:
    for texts in cuts("Why?\n</think>\n\nSo."):
        found = run(Marked(Texts(texts), Marks(THINK), (), thinking=True), range(len(texts)))
        assert [tuple(part)[:2] for part in found] == [("reasoning", "Why?"), ("text", "So.")]


def test_text_that_may_begin_a_mark_is_sent_once_it_cannot() -> None:
    one = Marked(Texts(["a <th", "ree", "<think>b"]), Marks(THINK), ())
    assert [[part.text for part in one.push(token)] for token in range(3)] == [["a"], [" <three"], ["b"]]
    assert one.reasoning


def test_a_stop_string_ends_the_answer_in_the_middle_of_its_reasoning() -> None:
    one = Marked(Texts(["<think>a", " END b"], ["END"]), Marks(THINK), ())
    assert [part.text for token in range(2) for part in one.push(token)] == ["a"]
    assert one.stopped and [tuple(part)[:2] for part in one.finish()] == [("reasoning", " ")]


def test_special_tokens_have_no_text_except_in_a_call() -> None:
    texts = ["a", "<|x|>", "<tool_call>", "<|x|>", "</tool_call>"]
    one = Marked(Texts(texts), Marks(None, form("json_tools"), frozenset({1, 3})), TOOLS)
    assert [tuple(part)[:2] for part in run(one, range(5))] == [("text", "a<tool_call><|x|></tool_call>")]


def test_without_tools_a_call_is_text() -> None:
    assert run(Marked(Texts([HERMES]), Marks(THINK), ()), range(1))[0].text == HERMES


def test_every_call_has_an_id_of_its_own() -> None:
    one = Marked(Texts([HERMES + HERMES]), Marks(None, form("json_tools")), TOOLS)
    ids = [part.call.id for part in one.push(0) if part.call]
    assert len(ids) == len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)


def test_a_call_beyond_the_limit_stays_text() -> None:
    start, end = "<tool_call>", "</tool_call>"
    for chars, kinds in ((MAX_CALL_CHARS, ["call"]), (MAX_CALL_CHARS + 1, ["text"])):
        text = HERMES.removesuffix(end).ljust(len(start) + chars) + end
        found = run(Marked(Texts([text]), Marks(None, form("json_tools")), TOOLS), range(1))
        assert [part.kind for part in found] == kinds


def test_a_model_that_writes_blanks_for_ever_has_few_of_them_held_back() -> None:
    """The end of what is held is looked at with every token."""
    one = Marked(Texts(["a", " " * (MAX_BLANKS + 5), "<think>b"]), Marks(THINK), ())
    assert [[part.text for part in one.push(token)] for token in range(3)] == [["a"], [" " * 5], ["b"]]


@pytest.mark.parametrize("state", ["ended", "not ended"])
def test_a_call_that_grows_beyond_the_limit_is_no_longer_held_back(state: str) -> None:
    long = "x" * MAX_CALL_CHARS
    texts = ["<tool_call>", long, "1", "</tool_call>"][: None if state == "ended" else 3]
    one = Marked(Texts(texts), Marks(None, form("json_tools")), TOOLS)
    assert [part.text for token in range(3) for part in one.push(token)] == [f"<tool_call>{long}1"]
    assert not one._held


def test_a_parser_that_takes_too_long_is_interrupted() -> None:
    """It holds the interpreter's lock, so that no thread could go on meanwhile."""
    began = time.monotonic()
    assert parsed("f<arg_key>a</arg_key><arg_value>" * 3000, form("glm47"), TOOLS) is None
    assert time.monotonic() - began < 5
