"""The tools of OpenAI's chats, read as responses write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.api.base import Contract
from disagg.errors import RequestError
from disagg.gateway.dialects.form import ToolBody
from disagg.gateway.dialects.tools import Tool, ToolFormat


class Grammar(Contract, frozen=True):
    """What the input of a custom tool must be."""

    syntax: str = ""
    definition: str = ""


class CustomFormat(Contract, frozen=True):
    """type: text or grammar."""

    type: str
    grammar: Grammar | None = None


class CustomBody(Contract, frozen=True):
    """A tool whose input is a text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class ChatTool(ToolBody, frozen=True):
    """A function or a custom tool."""

    custom: CustomBody | None = None


def tools_of(given: Sequence[ChatTool]) -> list[Tool]:
    """The tools as responses write them. Raises RequestError for one that is neither a function nor a custom tool."""
    tools = []
    for index, tool in enumerate(given):
        if tool.type == "function" and (function := tool.function) is not None:
            tools.append(Tool("function", function.name, function.description, function.parameters))
        elif tool.type == "custom" and (custom := tool.custom) is not None:
            grammar = custom.format.grammar if custom.format else None
            form = ToolFormat("grammar", grammar.syntax, grammar.definition) if grammar else None
            tools.append(Tool("custom", custom.name, custom.description, format=form))
        else:
            message = f"tools[{index}].type: not a function or a custom tool with its fields (got {tool.type!r})"
            raise RequestError(message, "describe it as a function")
    return tools


def choice_of(given: Any) -> Any:
    """The choice of a tool as responses write it."""
    if not isinstance(given, Mapping):
        return given
    kind = given.get("type")
    inner = given.get(kind) if isinstance(kind, str) else None
    if not isinstance(inner, Mapping):
        return given
    tools = inner.get("tools")
    more = {"tools": [choice_of(tool) for tool in tools]} if isinstance(tools, list) else {}
    return {"type": kind, **inner, **more}
