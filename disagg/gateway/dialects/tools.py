"""The tools of chats and responses. Callers offer more kinds than models support: each becomes a function, or is left
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.requests import MAX_TOOLS
from disagg.errors import RequestError
from disagg.gateway.dialects.base import CalledAs
from disagg.gateway.dialects.form import FunctionBody

LEFT_OUT: Final = frozenset(
    {
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "apply_patch",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Kinds of tools that run at OpenAI, or that only its models can call. They are left out of the prompt, and the answer
is one that a caller must expect anyway: no tool has to be called."""
INPUT: Final = "input"
"""The argument of the function that a custom tool becomes."""
_OF_CUSTOM: Final = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


class ToolFormat(Contract, frozen=True):
    """The form of a custom tool's input: text, or a grammar."""

    type: str
    syntax: str = ""
    definition: str = ""


class Tool(Contract, frozen=True):
    """A tool. tools: of a namespace. format: of a custom tool's input."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    format: ToolFormat | None = None
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MAX_TOOLS)] = ()


@dataclass(slots=True)
class Offer:
    """A list of tools as the prompt has them. names: the caller's name of each function. with_grammar: functions whose
    input has a grammar. left_out: a line for each tool that is not in the prompt, and for each grammar that is not
    enforced."""

    functions: list[FunctionBody] = field(default_factory=list)
    names: dict[str, CalledAs] = field(default_factory=dict)
    with_grammar: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)


def offered(tools: Sequence[Tool]) -> Offer:
    """The tools as the prompt has them. Raises RequestError for a kind that is unknown, and for two of one name."""
    offer = Offer()
    for index, tool in enumerate(tools):
        _add(offer, tool, f"tools[{index}]", None)
    return offer


def told(offer: Offer, choice: Any) -> tuple[Sequence[FunctionBody], Any]:
    """The functions that the prompt has with this choice of a tool, and the choice as `form_of` takes it. Raises
    RequestError.

    Of `allowed_tools`, the others are not in the prompt.
    """
    if not isinstance(choice, Mapping):
        return offer.functions, choice
    if choice.get("type") != "allowed_tools":
        return offer.functions, _named(offer, choice)
    tools, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tool_choice.tools: not a list of tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"tool_choice.mode: no such mode (got {mode!r})", 'send "auto" or "required"')
    names = {_function(tool) for tool in tools if tool.get("type") not in LEFT_OUT}
    if unknown := names - offer.names.keys():
        raise RequestError("tool_choice.tools: one of them is none of tools", f"offer {min(unknown)!r} in tools, too")
    return [function for function in offer.functions if function.name in names], mode


def _named(offer: Offer, choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """The choice of one tool as chats write it. Raises RequestError for a custom tool whose input has a grammar: the
    input of a forced one would be any text."""
    name = _function(choice)
    called = offer.names.get(name)
    if name in offer.with_grammar:
        message = f"tool_choice: {name!r} cannot be forced, because the model is not held to the grammar of its input"
        raise RequestError(message, 'choose "auto"')
    kind = "function" if called is not None and called.kind == choice.get("type") else choice.get("type")
    return {"type": kind, "function": {"name": name}}


def _function(tool: Mapping[str, Any]) -> str:
    """The name in the prompt of a tool that a choice names."""
    namespace = tool.get("namespace")
    return function_name(str(tool.get("name")), namespace if isinstance(namespace, str) else None)


def function_name(name: str, namespace: str | None) -> str:
    """The name of a function of a namespace in the prompt."""
    return f"{namespace}__{name}" if namespace else name


def input_of(arguments: Mapping[str, Any]) -> str:
    """The input of a custom tool, from the arguments of the function that it became."""
    given = arguments.get(INPUT)
    return given if isinstance(given, str) else msgspec.json.encode(arguments).decode()


def _add(offer: Offer, tool: Tool, place: str, namespace: Tool | None) -> None:
    if tool.type == "namespace" and namespace is None:
        for index, inner in enumerate(tool.tools):
            _add(offer, inner, f"{place}.tools[{index}]", tool)
    elif tool.type == "function":
        _tell(offer, tool, place, namespace)
    elif tool.type == "custom":
        if _has_grammar(tool):
            offer.left_out.append(f"{place}.format: the model is told this grammar, and not held to it")
        _tell(offer, tool, place, namespace)
    elif tool.type in LEFT_OUT:
        offer.left_out.append(f"{place}: the model is not told about {tool.type}, which is no function")
    else:
        message = f"{place}.type: no tool of this type is known here (got {tool.type!r})"
        raise RequestError(message, "describe it as a function, or as a custom tool")


def _tell(offer: Offer, tool: Tool, place: str, namespace: Tool | None) -> None:
    name = function_name(tool.name, namespace.name if namespace else None)
    if name in offer.names:
        raise RequestError(f"{place}.name: there are two tools {name!r}")
    custom = tool.type == "custom"
    offer.names[name] = CalledAs("custom" if custom else "function", tool.name, namespace.name if namespace else None)
    offer.functions.append(FunctionBody(name, _description(tool, namespace), _OF_CUSTOM if custom else tool.parameters))
    if custom and _has_grammar(tool):
        offer.with_grammar.add(name)


def _has_grammar(tool: Tool) -> bool:
    return tool.format is not None and bool(tool.format.definition)


def _description(tool: Tool, namespace: Tool | None) -> str | None:
    """The description of a tool: after that of its namespace, and before the grammar of a custom tool's input, which
    the model is not held to."""
    parts = [namespace.description if namespace else None, tool.description]
    if tool.format is not None and tool.format.definition:
        parts.append(f"Its input has this form ({tool.format.syntax}):\n{tool.format.definition}")
    return "\n\n".join(part for part in parts if part) or None
