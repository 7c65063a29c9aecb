"""An answer that must have a form: its grammar, as llguidance reads it, and the call that such an answer is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from disagg.api.requests import GenerateBody
from disagg.engines.model.format import AnswerFormat
from disagg.engines.model.matchers.limits import require_bounded
from disagg.servers.output import tool_calls
from disagg.servers.output.part import Output, OutputPart, parts

# A weak model writes blanks for ever where they are allowed.
_OPTIONS: Final = {"x-guidance": {"whitespace_flexible": False}}
# gpt-oss answers in its last channel and may reason in others before.
_HARMONY: Final = """
start: earlier* <|channel|> "final" <|message|> form
earlier: <|channel|> "analysis" <|message|> REASONING <|end|> <|start|> "assistant"
REASONING: /(.|\\n)*/
"""


class Forced:
    """An Output over another one, whose text is {"name", "arguments"}. Text that was cut off, or is too
    long for a call, stays text."""

    def __init__(self, inner: Output) -> None:
        self._inner = inner
        self._text = ""
        self._too_long = False

    @property
    def reasoning(self) -> bool:
        return self._inner.reasoning

    @property
    def stopped(self) -> str:
        return self._inner.stopped

    def push(self, token: int) -> Sequence[OutputPart]:
        return self._keep(self._inner.push(token))

    def finish(self) -> Sequence[OutputPart]:
        found = self._keep(self._inner.finish())
        if made := tool_calls.from_json(self._text):
            return [*found, *(OutputPart("call", call=call) for call in made)]
        return [*found, *parts(self._text)]

    def _keep(self, found: Sequence[OutputPart]) -> list[OutputPart]:
        """All parts but text, which is kept unless it is too long."""
        if self._too_long:
            return [*found]
        self._text += "".join(part.text for part in found if part.kind == "text")
        others = [part for part in found if part.kind != "text"]
        if len(self._text) <= tool_calls.MAX_CALL_CHARS:
            return others
        text, self._text, self._too_long = self._text, "", True
        return [*others, *parts(text)]


def grammar_of(body: GenerateBody, form: AnswerFormat) -> str | None:
    """The grammar that an answer must fit; None if it may have any form. Raises SchemaTooComplex for a schema that is
    not to be compiled."""
    if body.must_call:
        rules = _calls(body)
    elif body.json_schema is not None:
        rules = f"form: {_json(body.json_schema)}\n"
    else:
        return None
    return (_HARMONY.lstrip() if form.harmony and body.messages is not None else "start: form\n") + rules


def _calls(body: GenerateBody) -> str:
    """{"name": NAME, "arguments": {...}} of one of the tools."""
    tools = [tool for tool in body.tools if tool.name in body.must_call]
    lines = [f"form: {' | '.join(f'call{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        start = json.dumps({"name": tool.name})[:-1] + ', "arguments": '
        lines.append(f'call{number}: {json.dumps(start)} arguments{number} "}}"')
        lines.append(f"arguments{number}: {_json({'type': 'object', **tool.parameters})}")
    return "\n".join(lines) + "\n"


def _json(schema: Mapping[str, Any]) -> str:
    require_bounded(schema)
    return "%json " + json.dumps({**schema, **_OPTIONS})
