"""What the answer to a chat must be: a call of a tool, JSON, or what the model likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.api.base import Contract
from disagg.errors import RequestError


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


def form_of(tools: Sequence[ToolBody], choice: Any, response: ResponseFormat | None) -> dict[str, Any]:
    """The options of AsyncClient.stream. Raises RequestError for what cannot be honoured, by the name of the field."""
    given = _tools(tools) if choice != "none" else []
    must_call = _must_call(choice, [tool["name"] for tool in given])
    schema = _schema(response)
    if schema is not None and given:
        raise RequestError("response_format: not supported together with tools", 'set tool_choice to "none"')
    options = {"tools": given, "must_call": must_call, "json_schema": schema}
    return {name: value for name, value in options.items() if value}


def _tools(tools: Sequence[ToolBody]) -> list[dict[str, Any]]:
    given = []
    for index, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise RequestError(f"tools[{index}].type: only functions are supported (got {tool.type!r})")
        one = tool.function
        given.append({"name": one.name, "description": one.description or "", "parameters": one.parameters or {}})
    return given


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


def _schema(response: ResponseFormat | None) -> Mapping[str, Any] | None:
    if response is None or response.type == "text":
        return None
    if response.type == "json_object":
        return {"type": "object"}
    if response.type != "json_schema":
        raise RequestError(f"response_format.type: not text, json_object or json_schema (got {response.type!r})")
    if response.json_schema is None or not response.json_schema.schema:
        raise RequestError("response_format.json_schema: has no schema")
    return response.json_schema.schema
