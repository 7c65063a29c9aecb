"""The messages of an OpenAI chat, and the tool calls in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.requests import ToolCall
from disagg.errors import RequestError


class ContentPart(Contract, frozen=True):
    """A part of a message's content. Only text is understood."""

    type: str
    text: str = ""


class FunctionCall(Contract, frozen=True):
    """arguments: JSON."""

    name: str
    arguments: str = "{}"


class CallBody(Contract, frozen=True):
    """A tool call of an earlier answer."""

    function: FunctionCall
    id: str = ""


class Message(Contract, frozen=True):
    """One message of the chat. reasoning, reasoning_content: the same under two names."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | tuple[ContentPart, ...] | None = None
    tool_calls: tuple[CallBody, ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


def messages(given: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as disagg's hosts take them. Raises RequestError for content that is not text."""
    names = {call.id: call.function.name for message in given for call in message.tool_calls or ()}
    return [_message(message, f"messages[{index}]", names) for index, message in enumerate(given)]


def call_body(call: ToolCall) -> dict[str, Any]:
    """A tool call as it is written to clients."""
    arguments = msgspec.json.encode(call.arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _message(message: Message, place: str, names: dict[str, str]) -> dict[str, Any]:
    """names: of the tools that were called before, by the id of the call."""
    if message.role == "function":
        raise RequestError(f"{place}.role: 'function' is not supported by this gateway", "use the role tool")
    role = "system" if message.role == "developer" else message.role
    written: dict[str, Any] = {"role": role, "content": _text(message.content or "", place)}
    if reasoning := message.reasoning or message.reasoning_content:
        written["reasoning"] = reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            call_of(call, f"{place}.tool_calls[{index}]", "function.arguments")
            for index, call in enumerate(message.tool_calls)
        ]
    if role == "tool" and message.tool_call_id:
        written["tool_call_id"] = message.tool_call_id
        if name := message.name or names.get(message.tool_call_id):
            written["name"] = name
    return written


def _text(content: str | Sequence[ContentPart], place: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text":
            raise RequestError(f"{place}.content[{index}].type: {part.type!r} is not supported", "send text only")
    return "".join(part.text for part in content)


def call_of(call: CallBody, place: str, field: str) -> dict[str, Any]:
    """The call as disagg's hosts take it: templates want the arguments as an object. field: where they were given."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}.{field}: not a JSON object")
    return {"name": call.function.name, "arguments": arguments, "id": call.id}
