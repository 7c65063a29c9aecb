"""The input of POST /v1/responses: a list of items, of which several may make one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.requests import MAX_MESSAGES
from disagg.errors import RequestError
from disagg.gateway.dialects.openai.messages import CallBody, FunctionCall, call_of
from disagg.gateway.dialects.responses.tools import INPUT, function_name

SEALED: Final = "disagg:"
"""Reasoning begins like this where OpenAI's would be encrypted. Agents send it back as it is."""
_CALLS: Final = ("function_call", "custom_tool_call")
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text")


class Part(Contract, frozen=True):
    """A part of an item's content. Only text is understood."""

    type: str
    text: str = ""


Content = str | tuple[Part, ...]


class Item(Contract, frozen=True):
    """An item: a message, a reasoning, the call of a function or a custom tool, or its output. Without a type it is a
    message. namespace, input: of calls."""

    type: str = "message"
    role: Annotated[str, Meta(min_length=1, max_length=32)] = "user"
    content: Content | None = None
    encrypted_content: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = "{}"
    input: str = ""
    output: Content | None = None


Items = Annotated[tuple[Item, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]


def messages(instructions: str | None, given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The messages as disagg's hosts take them. Raises RequestError for an item that is not supported.

    instructions and the system messages that follow are one message: some chat templates read only the first.
    """
    written: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*written, {"role": "user", "content": given}]
    names = {item.call_id: _name(item) for item in given if item.type in _CALLS}
    for index, item in enumerate(given):
        place = f"input[{index}]"
        match item.type:
            case "message":
                _add_message(written, item, place)
            case "reasoning":
                if reasoning := _reasoning(item, place):
                    _answer(written, ("reasoning", "content", "tool_calls"))["reasoning"] = reasoning
            case "function_call":
                call = call_of(CallBody(FunctionCall(_name(item), item.arguments), item.call_id), place, "arguments")
                _answer(written, ()).setdefault("tool_calls", []).append(call)
            case "custom_tool_call":
                called = {"name": _name(item), "arguments": {INPUT: item.input}, "id": item.call_id}
                _answer(written, ()).setdefault("tool_calls", []).append(called)
            case "function_call_output" | "custom_tool_call_output":
                text = _text(item.output, f"{place}.output")
                result = {"role": "tool", "content": text, "tool_call_id": item.call_id}
                name = names.get(item.call_id)
                written.append(result | ({"name": name} if name else {}))
            case _:
                raise RequestError(f"{place}.type: {item.type!r} is not supported by this gateway")
    return written


def _name(item: Item) -> str:
    return function_name(item.name, item.namespace)


def _add_message(written: list[dict[str, Any]], item: Item, place: str) -> None:
    text = _text(item.content, f"{place}.content")
    role = "system" if item.role == "developer" else item.role
    if role == "assistant":
        _answer(written, ("content", "tool_calls"))["content"] = text
    elif role == "system" and len(written) == 1 and written[0]["role"] == "system":
        written[0] = {"role": "system", "content": f"{written[0]['content']}\n\n{text}"}
    else:
        written.append({"role": role, "content": text})


def _answer(written: list[dict[str, Any]], taken: Sequence[str]) -> dict[str, Any]:
    """The answer that an item belongs to: the last message, unless it is none or has one of the fields `taken`."""
    if not written or written[-1]["role"] != "assistant" or any(written[-1].get(name) for name in taken):
        written.append({"role": "assistant", "content": ""})
    return written[-1]


def _reasoning(item: Item, place: str) -> str:
    """The text of a reasoning; empty if only another server can read it."""
    if item.content:
        return _text(item.content, f"{place}.content")
    sealed = item.encrypted_content or ""
    return sealed.removeprefix(SEALED) if sealed.startswith(SEALED) else ""


def _text(content: Content | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in _TEXTS:
            raise RequestError(f"{place}[{index}].type: {part.type!r} is not supported", "send text only")
    return "".join(part.text for part in content)
