"""The grammar that an answer must fit, as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from disagg.api.requests import GenerateBody, Tool
from disagg.engines.model.format import AnswerFormat, ToolFormat
from disagg.engines.model.matchers.limits import require_bounded
from disagg.engines.model.matchers.notation import ANY_NOTATION

# A weak model writes blanks for ever where they are allowed.
_OPTIONS: Final = {"x-guidance": {"whitespace_flexible": False}}
_PARTS: Final = frozenset({"allOf", "if", "then", "else", "dependentSchemas"})
_OPEN: Final = _PARTS | {
    "$ref",
    "additionalProperties",
    "anyOf",
    "oneOf",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
}
"""What states in another way which fields an object has."""
# gpt-oss answers in its last channel, or calls a tool, and may reason in others before.
_HARMONY: Final = """\
start: earlier* ({ends})
earlier: <|channel|> "analysis" <|message|> REASONING <|end|> <|start|> "assistant"
REASONING: /(.|\\n)*/
final: <|channel|> "final" <|message|> form
"""


class _Rules(NamedTuple):
    """Lines of a grammar. ends: the rules of which an answer may be one, beside the form."""

    ends: Sequence[str] = ()
    lines: Sequence[str] = ()


def grammar_of(body: GenerateBody, form: AnswerFormat) -> str | None:
    """The grammar that an answer must fit; None if it may have any form. With a form and tools, it is either. Raises
    SchemaTooComplex for a schema that is not to be compiled."""
    channels = form.harmony is not None and body.messages is not None and not body.continue_final_message
    ends: Sequence[str] = ()
    if body.must_call:
        calls = _enveloped([tool for tool in body.tools if tool.name in body.must_call])
        lines = [f"form: {' | '.join(calls.ends)}", *calls.lines]
    elif body.form is not None:
        ends, more = _calls(body, form, channels=channels)
        lines = [f"form: {_form(*body.form)}", *more]
    else:
        return None
    every = " | ".join(["final" if channels else "form", *ends])
    return (_HARMONY.format(ends=every) if channels else f"start: {every}\n") + "\n".join(lines) + "\n"


def opening(tool: Tool) -> str:
    """How the envelope of a call begins in an answer that may have a form instead: {"name":NAME,"arguments":{...}}."""
    return "".join(_opening(tool))


def _opening(tool: Tool) -> Sequence[str]:
    return ("{", '"name"', ":", json.dumps(tool.name), ",", '"arguments"', ":")


def _form(field: str, value: Any) -> str:
    """The form that this field of the body gives."""
    if field == "json_schema":
        return _json(value)
    if field == "regex":
        return f"/{_in_slashes(value)}/"
    if field == "choice":
        return " | ".join(map(_text, value))
    return f"{ANY_NOTATION} {json.dumps(value)}"


def _in_slashes(regex: str) -> str:
    """The expression between two slashes: those within it, and line breaks, are escaped, once."""
    written, escaped = "", False
    for letter in regex:
        plain = ("n" if escaped else "\\n") if letter == "\n" else letter
        written += f"\\{plain}" if plain == "/" and not escaped else plain
        escaped = letter == "\\" and not escaped
    return written


def _calls(body: GenerateBody, form: AnswerFormat, *, channels: bool) -> _Rules:
    """Calls of the tools: in the model's own markup if that is known."""
    if not body.tools:
        return _Rules()
    if channels:
        return _in_channels(body.tools)
    if form.tools is not None:
        return _marked(body.tools, form.tools, one=not body.parallel_tool_calls)
    # Cut as llguidance cuts JSON: its lexer takes the longest match, and would not find its way back from the beginning
    # of an envelope to a form that begins alike.
    return _numbered(body.tools, lambda tool: " ".join(map(_text, _opening(tool))))


def _enveloped(tools: Sequence[Tool]) -> _Rules:
    return _numbered(tools, lambda tool: _text(json.dumps({"name": tool.name})[:-1] + ', "arguments": '))


def _numbered(tools: Sequence[Tool], head: Callable[[Tool], str], end: str = ' "}"') -> _Rules:
    """A call of each tool: its head, its arguments and the end."""
    lines = []
    for number, tool in enumerate(tools):
        lines.append(f"call{number}: {head(tool)} arguments{number}{end}")
        lines.append(f"arguments{number}: {_json({'type': 'object', **tool.parameters}, closed=True)}")
    return _Rules([f"call{number}" for number in range(len(tools))], lines)


def _in_channels(tools: Sequence[Tool]) -> _Rules:
    def head(tool: Tool) -> str:
        return f'<|channel|> {_text(f"commentary to=functions.{tool.name} ")} <|constrain|> "json" <|message|>'

    return _numbered(tools, head, "")


def _marked(tools: Sequence[Tool], form: ToolFormat, *, one: bool) -> _Rules:
    """One call or several between the model's marks. Between them is JSON if that is how the model writes calls, and
    else any text, which its parser reads."""
    start, end = (_mark(mark, form) for mark in (form.start, form.end))
    if form.json:
        calls = _enveloped(tools)
        between, lines = f'"\\n"? ({" | ".join(calls.ends)}) "\\n"? {end}', calls.lines
    elif form.end and form.end not in form.ids:
        between, lines = "inner", [f"inner[suffix={end}]: /(.|\\n)*/"]
    else:
        between, lines = f"inner {end}", ["inner: /(.|\\n)+/"]
    several = "" if one else ' ("\\n"? called)*'
    return _Rules(["calls"], [f"calls: called{several}", f"called: {start} {between}", *lines])


def _mark(mark: str, form: ToolFormat) -> str:
    """A mark that is one token is this token, and no other ones of the same text."""
    if not mark:
        return ""
    return f"<[{form.ids[mark]}]>" if mark in form.ids else _text(mark)


def _json(schema: Mapping[str, Any], *, closed: bool = False) -> str:
    """closed: objects have the fields that they state and no others, unless they say otherwise."""
    require_bounded(schema)
    return "%json " + json.dumps({**(_closed(schema) if closed else schema), **_OPTIONS})


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments, most of which do not state what a function does with fields that it does not
    know: a weak model invents some. Parts that a whole is composed of stay open: another part may state the field."""
    written = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(parts := schema.get(name), Mapping) and (name == "properties" or not _composed(schema)):
            written[name] = {key: _closed(one) if isinstance(one, Mapping) else one for key, one in parts.items()}
    if isinstance(items := schema.get("items"), Mapping):
        written["items"] = _closed(items)
    if isinstance(schema.get("properties"), Mapping) and not _OPEN & schema.keys():
        written["additionalProperties"] = False
    return written


def _composed(schema: Any) -> bool:
    """Whether objects are composed of parts somewhere in the schema."""
    if isinstance(schema, Mapping):
        return bool(_PARTS & schema.keys()) or any(map(_composed, schema.values()))
    return isinstance(schema, list | tuple) and any(map(_composed, schema))


def _text(text: str) -> str:
    return json.dumps(text)
