"""What an answer must be: a call of a tool, of a form such as JSON, either, or what the model likes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from disagg.api.base import Contract
from disagg.errors import RequestError
from disagg.gateway.dialects.base import REFUSED, read_fields

REFUSED_IN_OUTPUTS: Final = REFUSED["structured-outputs"]
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
"""The JSON schema of every object."""


class FunctionBody(Contract, frozen=True):
    """A function of a tool. parameters: the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None


class ToolBody(Contract, frozen=True):
    """A tool that is a function."""

    type: str
    function: FunctionBody | None = None


class NamedSchema(Contract, frozen=True):
    """A JSON schema."""

    schema: Mapping[str, Any] | None = None


class ResponseFormat(Contract, frozen=True):
    """type: text, json_object or json_schema. schema: where llama.cpp's clients write it."""

    type: str
    json_schema: NamedSchema | None = None
    schema: Mapping[str, Any] | None = None


class StructuredOutputs(Contract, frozen=True):
    """A form as vLLM's clients write it. json: a JSON schema, or its text."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FormFields(Contract, frozen=True, kw_only=True):
    """The fields of a body that give an answer its form, by the names that clients of OpenAI, vLLM, llama.cpp and
    SGLang know. At most one is given."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | Mapping[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def form(self) -> Mapping[str, Any]:
        """The option of AsyncClient.stream that states the form; empty if the answer may have any. Raises
        RequestError."""
        given = [(field, form) for field, form in self._forms() if form]
        if len(given) > 1:
            raise RequestError(
                f"{given[1][0]}: the answer has a form already, by {given[0][0]}", "leave out one of them"
            )
        return given[0][1] if given else {}

    def _forms(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """What each field states, empty if it is not given."""
        yield "response_format", _option("json_schema", schema_of(self.response_format))
        inner = read_fields(StructuredOutputs, self.structured_outputs or {}, REFUSED_IN_OUTPUTS, "structured_outputs.")
        yield "structured_outputs", json_form(inner.json, "structured_outputs.json")
        yield "structured_outputs.json_object", _option("json_schema", ANY_OBJECT if inner.json_object else None)
        for name in ("regex", "choice", "grammar"):
            yield f"structured_outputs.{name}", _option(name, getattr(inner, name))
            yield f"guided_{name}", _option(name, getattr(self, f"guided_{name}"))
        yield "guided_json", json_form(self.guided_json, "guided_json")
        yield "guided_json_object", _option("json_schema", ANY_OBJECT if self.guided_json_object else None)
        yield "json_schema", json_form(self.json_schema, "json_schema")
        yield "grammar", _option("grammar", self.grammar)
        yield "regex", _option("regex", self.regex)
        yield "ebnf", _option("grammar", self.ebnf)


def json_form(given: str | Mapping[str, Any] | None, field: str) -> Mapping[str, Any]:
    """The option for a JSON schema, or its text. An empty one is none. Raises RequestError."""
    if isinstance(given, str):
        try:
            read = msgspec.json.decode(given) if given else None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            read = given
        if read is not None and not isinstance(read, dict):
            raise RequestError(f"{field}: not a JSON schema", "send an object, or its text")
        given = read
    return _option("json_schema", given)


def _option(name: str, value: Any) -> Mapping[str, Any]:
    return {} if value in (None, "", ()) else {name: value}


def functions(tools: Sequence[ToolBody]) -> list[FunctionBody]:
    """The functions of these tools. Raises RequestError for a tool that is none."""
    found = []
    for index, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            message = f"tools[{index}].type: models here call functions only (got {tool.type!r})"
            raise RequestError(message, "describe it as a function")
        found.append(tool.function)
    return found


def schema_of(response: ResponseFormat | None) -> Mapping[str, Any] | None:
    """The JSON schema that the answer must fit, None if it may be any text."""
    if response is None or response.type == "text":
        return None
    named = response.json_schema.schema if response.json_schema is not None else None
    if response.type == "json_object":
        return response.schema or named or ANY_OBJECT
    if response.type != "json_schema":
        raise RequestError(f"response_format.type: not text, json_object or json_schema (got {response.type!r})")
    if not (schema := named or response.schema):
        raise RequestError("response_format.json_schema: has no schema", "send json_schema.schema, or json_object")
    return schema


def form_of(
    tools: Sequence[FunctionBody], choice: Any, form: Mapping[str, Any], *, parallel: bool | None = None
) -> dict[str, Any]:
    """The options of AsyncClient.stream. Raises RequestError for what cannot be honoured, by the name of the field.

    choice: "auto", "none", "required", or a tool as OpenAI's chats name it. form: that of an answer that is no call.
    parallel: whether an answer may have several calls; None: not given, it may.
    """
    given = [_tool(tool) for tool in tools] if choice != "none" else []
    must_call = _must_call(choice, [tool["name"] for tool in given])
    options: dict[str, Any] = {"tools": given} if given else {}
    options |= {"must_call": must_call} if must_call else form
    return options | ({"parallel_tool_calls": False} if given and parallel is False else {})


def _tool(tool: FunctionBody) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}


def _must_call(choice: Any, names: Sequence[str]) -> Sequence[str]:
    """The names of which one must be called; empty if none need be."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        if not names:
            raise RequestError("tool_choice: there are no tools", "send tools, or leave out tool_choice")
        return names
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise RequestError("tool_choice: no such tool is offered", 'send "auto", "none", "required" or one of tools')
    return (name,)
