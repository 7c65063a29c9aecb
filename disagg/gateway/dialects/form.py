"""What the answer to a chat must be: a call of a tool, JSON, or what the model likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from disagg.api.base import Contract
from disagg.errors import RequestError

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
"""The JSON schema of every object."""


class FunctionBody(Contract, frozen=True):
    """A function of a tool. parameters: the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None


class ToolBody(Contract, frozen=True):
    """A tool. Only functions are understood."""

    type: str
    function: FunctionBody | None = None


class NamedSchema(Contract, frozen=True):
    """A JSON schema."""

    schema: Mapping[str, Any] | None = None


class ResponseFormat(Contract, frozen=True):
    """type: text, json_object or json_schema."""

    type: str
    json_schema: NamedSchema | None = None


def functions(tools: Sequence[ToolBody]) -> list[FunctionBody]:
    """The functions of these tools. Raises RequestError for a tool that is none."""
    found = []
    for index, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise RequestError(f"tools[{index}].type: only functions are supported (got {tool.type!r})")
        found.append(tool.function)
    return found


def schema_of(response: ResponseFormat | None) -> Mapping[str, Any] | None:
    """The JSON schema that the answer must fit, None if it may be any text."""
    if response is None or response.type == "text":
        return None
    if response.type == "json_object":
        return ANY_OBJECT
    if response.type != "json_schema":
        raise RequestError(f"response_format.type: not text, json_object or json_schema (got {response.type!r})")
    if response.json_schema is None or not response.json_schema.schema:
        raise RequestError("response_format.json_schema: has no schema")
    return response.json_schema.schema


def form_of(
    tools: Sequence[FunctionBody],
    choice: Any,
    schema: Mapping[str, Any] | None,
    schema_field: str = "response_format",
    *,
    parallel: bool | None = None,
) -> dict[str, Any]:
    """The options of AsyncClient.stream. Raises RequestError for what cannot be honoured, by the name of the field.

    choice: "auto", "none", "required", or a tool as OpenAI's chats name it. schema_field: where the schema was given.
    parallel: whether an answer may have several calls; None: not given, it may.
    """
    given = [_tool(tool) for tool in tools] if choice != "none" else []
    must_call = _must_call(choice, [tool["name"] for tool in given])
    if schema is not None and given:
        raise RequestError(f"{schema_field}: not supported together with tools", "leave out one of them")
    options = {"tools": given, "must_call": must_call, "json_schema": schema}
    one_call = {"parallel_tool_calls": False} if given and parallel is False else {}
    return {name: value for name, value in options.items() if value} | one_call


def _tool(tool: FunctionBody) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}


def _must_call(choice: Any, names: Sequence[str]) -> Sequence[str]:
    """The names of which one must be called; empty if none need be."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        if not names:
            raise RequestError("tool_choice: there are no tools")
        return names
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise RequestError('tool_choice: not "auto", "none", "required" or a function of tools')
    return (name,)
