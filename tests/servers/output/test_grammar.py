"""disagg/servers/output/grammar.py with llguidance: which answers have the form, and which may be a call instead."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from disagg.api.base import InvalidValue
from disagg.api.requests import MAX_SCHEMA_BYTES, GenerateBody
from disagg.engines.model.constraint import Constraints
from disagg.engines.model.format import AnswerFormat, ToolFormat
from disagg.engines.model.matchers.limits import MIB, FormLimits
from disagg.engines.simulated.model import CONSTRAINED, END
from disagg.errors import RequestError, SchemaTooComplex
from disagg.servers.output.grammar import grammar_of
from tests import tiny_models

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "weather", "parameters": CITY}, {"name": "wait", "parameters": {}}]
JSON = {"json_schema": {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}}


def parse(text: str, _: object) -> Any:
    return json.loads(text)


UNKNOWN = AnswerFormat()
HERMES = AnswerFormat(tools=ToolFormat("<tool_call>", "</tool_call>", parse, json=True))
CODER = AnswerFormat(tools=ToolFormat("<tool_call>", "</tool_call>", parse))
MISTRAL = AnswerFormat(tools=ToolFormat("[TOOL_CALLS]", "", parse))
ULM = '{"name": "weather", "arguments": {"city":"Ulm"}}'
COMPACT = '{"name":"weather","arguments":{"city":"Ulm"}}'
LARK = 'start: "a" DIGIT+\nDIGIT: /[0-9]/'
GBNF = 'root ::= "a" digit+\ndigit ::= [0-9]'


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    made = Constraints(lambda: "byte", CONSTRAINED, frozenset({END}))
    yield made
    made.close()


def body(**fields: Any) -> GenerateBody:
    return GenerateBody.from_json({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


LOOSE: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("parameters", "arguments", "fits"),
    [
        (LOOSE, {"a": 1}, True),
        (LOOSE, {"a": 1, "b": 2}, False),
        ({**LOOSE, "additionalProperties": True}, {"a": 1, "b": 2}, True),
        ({**LOOSE, "additionalProperties": {"type": "integer"}}, {"a": 1, "b": 2}, True),
        ({"properties": {"list": {"type": "array", "items": LOOSE}}}, {"list": [{"a": 1, "b": 2}]}, False),
        ({"$defs": {"one": LOOSE}, "properties": {"of": {"$ref": "#/$defs/one"}}}, {"of": {"a": 1, "b": 2}}, False),
        ({"allOf": [LOOSE, {"properties": {"b": {"type": "integer"}}}]}, {"a": 1, "b": 2}, True),
        ({"type": "object"}, {"anything": 1}, True),
        ({}, {"anything": 1}, True),
    ],
)
def test_the_arguments_of_a_forced_call_have_no_field_that_their_schema_does_not_state(
    constraints: Constraints, parameters: dict[str, Any], arguments: dict[str, Any], fits: bool
) -> None:
    forced = body(tools=[{"name": "f", "parameters": parameters}], must_call=["f"])
    call = '{"name": "f", "arguments": ' + json.dumps(arguments, separators=(",", ":")) + "}"
    assert may_end(constraints, forced, UNKNOWN, [*call.encode()]) is (fits or None)


def may_end(
    constraints: Constraints, asked: GenerateBody, form: AnswerFormat, tokens: list[int], end: int = END
) -> Any:
    """Whether an answer may end after these tokens; None if it must not begin with them."""
    grammar = grammar_of(asked, form)
    assert grammar is not None
    try:
        field = asked.form[0] if asked.form else "json_schema"
        constraint = asyncio.run(constraints.make(grammar, tokens, field=field))
    except RequestError as error:
        if "answer_tokens" in error.message:
            return None
        raise
    allowed = constraint.allowed()
    constraint.close()
    return allowed is None or bool(np.asarray(allowed)[end])


@pytest.mark.parametrize(
    ("form", "text", "complete"),
    [
        ({"regex": r"\d{3}-\d{4}"}, "555-1234", True),
        ({"regex": r"\d{3}-\d{4}"}, "555-", False),
        ({"regex": r"^(a/b|a\/c)$"}, "a/c", True),
        ({"regex": "a\nb"}, "a\nb", True),
        ({"regex": "a\\\nb"}, "a\nb", True),
        ({"regex": r"[\w]+@[\w]+\.com"}, "me@ulm.com", True),
        ({"choice": ["yes", "no", 'may"be\\']}, 'may"be\\', True),
        ({"choice": ["yes", "no"]}, "n", False),
        ({"choice": ["yes", "no"]}, "x", None),
        ({"choice": ["ä", "/x/i"]}, "/x/i", True),
        ({"grammar": LARK}, "a12", True),
        ({"grammar": LARK}, "b", None),
        ({"grammar": GBNF}, "a12", True),
        ({"grammar": GBNF}, "a", False),
        ({"grammar": 'start: "}" x "{"\nx: "{\\"}"\n'}, '}{"}{', True),
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(
    constraints: Constraints, form: dict[str, Any], text: str, complete: bool | None
) -> None:
    assert may_end(constraints, body(**form), UNKNOWN, list(text.encode())) is complete


@pytest.mark.parametrize(
    ("form", "text", "complete"),
    [
        (UNKNOWN, '{"warm":true}', True),
        (UNKNOWN, COMPACT, True),
        (UNKNOWN, COMPACT.replace("Ulm", "Rom"), None),
        (HERMES, '{"warm":true}', True),
        (HERMES, f"<tool_call>\n{ULM}\n</tool_call>", True),
        (HERMES, f"<tool_call>{ULM}</tool_call>" * 2, True),
        (HERMES, f"<tool_call>{ULM}</tool_call>\n<tool_call>{ULM}</tool_call>", True),
        (HERMES, f"<tool_call>{ULM}", False),
        (HERMES, ULM[:9], None),
        (HERMES, "hello", None),
        (CODER, "<tool_call>\n<function=weather>\n</function></tool_call>", True),
        (CODER, "<tool_call>\n<function=weather>", False),
        (CODER, "<tool_call>a</tool_call>" * 2, True),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}', True),
    ],
)
def test_with_tools_it_has_its_form_or_is_a_call_in_the_markup_of_the_model(
    constraints: Constraints, form: AnswerFormat, text: str, complete: bool | None
) -> None:
    schema = {**JSON["json_schema"], "additionalProperties": False}
    assert may_end(constraints, body(json_schema=schema, tools=TOOLS), form, list(text.encode())) is complete


def test_an_answer_of_one_call_at_most_has_no_second_one(constraints: Constraints) -> None:
    for form, text in ((HERMES, f"<tool_call>{ULM}</tool_call>"), (CODER, "<tool_call>a</tool_call>")):
        asked = body(**JSON, tools=TOOLS, parallel_tool_calls=False)
        assert may_end(constraints, asked, form, list(text.encode())) is True
        assert may_end(constraints, asked, form, list(f"{text}<".encode())) is None


@pytest.mark.parametrize("special", [True, False])
def test_marks_that_are_tokens_are_these_tokens(special: bool) -> None:
    marks = ("<tool_call>", "</tool_call>")
    made = copy.deepcopy(tiny_models.tokenizer())
    made.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    ids = {mark: made.convert_tokens_to_ids(mark) for mark in marks}
    constraints = Constraints(made.backend_tokenizer.to_str, len(made), frozenset({tiny_models.EOS_ID}))
    for json_calls, inner in ((True, ULM), (False, "any < text")):
        form = AnswerFormat(tools=ToolFormat(*marks, parse, json=json_calls, ids=ids))
        tokens = made.encode(f"<tool_call>{inner}</tool_call>", add_special_tokens=False)
        assert tokens[0] == ids[marks[0]] and tokens[-1] == ids[marks[1]]
        assert may_end(constraints, body(**JSON, tools=TOOLS), form, tokens, tiny_models.EOS_ID) is True
        assert may_end(constraints, body(**JSON, tools=TOOLS), form, tokens[:-1], tiny_models.EOS_ID) is False
    constraints.close()


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": "(secret"}, "regex: it has no regular expression"),
        ({"regex": "secret(?=x)"}, "regex: it looks around"),
        ({"regex": "secret\\"}, "regex: it has no regular expression"),
        ({"grammar": 'root: "secret"'}, "grammar: it is neither in Lark's notation nor in GBNF"),
        ({"grammar": "start: secret"}, "grammar: it uses a name that it does not define"),
        ({"grammar": "start: <|secret|>"}, "grammar: it names a special token"),
        ({"grammar": 'start: "secret" }'}, "grammar: it is not in Lark's notation"),
        ({"grammar": "(" * 5000}, "grammar: it is neither"),
        ({"grammar": "root ::= " + "(" * 20000 + '"secret"' + ")" * 20000}, "grammar: it is neither"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_without_its_text(
    constraints: Constraints, form: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError) as raised:
        may_end(constraints, body(**form), UNKNOWN, [])
    assert raised.value.message.startswith(reason) and "secret" not in str(raised.value)


def test_a_body_has_one_form_within_its_bounds() -> None:
    for fields, reason in (
        ({"regex": "a", "choice": ["b"]}, "choice: the answer has a form already, by regex"),
        ({"regex": "a" * MAX_SCHEMA_BYTES}, f"regex: over {MAX_SCHEMA_BYTES} bytes"),
        ({"grammar": LARK, "tools": TOOLS, "must_call": ["wait"]}, "grammar: the answer is a tool call already"),
        ({"choice": []}, "choice"),
        (
            {"regex": "a", "tools": [{"name": "f", "parameters": {"description": "x" * MAX_SCHEMA_BYTES}}]},
            f"tools: their parameters are over {MAX_SCHEMA_BYTES} bytes",
        ),
    ):
        with pytest.raises(InvalidValue, match=reason):
            body(**fields)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"grammar": 'start: %json {"type": "integer", "multipleOf": 99999999}'}, "grammar: it takes over 48 MiB"),
        ({"grammar": "\n" * 32000}, "grammar: it is not compiled after 0.5 s"),  # an expression that is quadratic
    ],
)
def test_a_form_that_takes_too_much_ends_its_process_and_no_other_answer(form: dict[str, Any], reason: str) -> None:
    limits = FormLimits(compile_cpu_s=0.5, process_bytes=48 * MIB)
    constraints = Constraints(lambda: "byte", CONSTRAINED, frozenset({END}), limits)
    with pytest.raises(SchemaTooComplex, match=reason):
        may_end(constraints, body(**form), UNKNOWN, [])
    assert may_end(constraints, body(choice=["yes"]), UNKNOWN, list(b"yes")) is True
    constraints.close()


def test_an_answer_with_too_many_ways_to_go_on_is_ended(constraints: Constraints) -> None:
    rules = " & ".join(f"/(.|\\n)*{letter}(.|\\n)*/" for letter in "abcdefghijklmnopqrst")
    grammar = grammar_of(body(grammar=f"start: X\nX: {rules}"), UNKNOWN)
    assert grammar is not None
    constraint = asyncio.run(constraints.make(grammar, b"a", field="grammar"))
    assert constraint.allowed() is None
    assert isinstance(constraint.error, SchemaTooComplex) and constraint.error.message.startswith("grammar: it has too")
    constraint.close()
