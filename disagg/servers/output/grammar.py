"""The grammar of an answer that must have a form, as llguidance reads it: JSON by a schema, or a call of a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from disagg.api.requests import GenerateBody
from disagg.engines.model.format import AnswerFormat
from disagg.engines.model.matchers.schema import require_bounded

# A weak model writes blanks for ever where they are allowed.
_OPTIONS: Final = {"x-guidance": {"whitespace_flexible": False}}
# gpt-oss answers in its last channel and may reason in others before.
_HARMONY: Final = """
start: earlier* <|channel|> "final" <|message|> form
earlier: <|channel|> "analysis" <|message|> REASONING <|end|> <|start|> "assistant"
REASONING: /(.|\\n)*/
"""


def grammar_of(body: GenerateBody, form: AnswerFormat) -> str | None:
    """None if the answer may have any form. Raises SchemaTooComplex for a schema that is not to be compiled."""
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
