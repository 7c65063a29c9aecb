"""Tool calls from what a model has written. Models write what they like: whatever is no call is None."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from disagg.api.base import InvalidValue
from disagg.api.requests import Tool, ToolCall
from disagg.engines.model.format import ToolFormat

MAX_CALL_CHARS: Final = 1 << 17
"""Text beyond it is no call: the event loop waits for the parser. The slowest of mlx-lm's took 0.8 s for 100,000
characters that were made to be slow, and its time grows with their square."""


def parsed(text: str, form: ToolFormat, tools: Sequence[Tool]) -> Sequence[ToolCall] | None:
    """The calls in the text between two marks; None if it is not of this form, or too long."""
    if len(text) > MAX_CALL_CHARS:
        return None
    return _calls(lambda: form.parse(text, [tool.for_template() for tool in tools]))


def from_json(text: str) -> Sequence[ToolCall] | None:
    """The call that {"name", "arguments"} states."""
    return _calls(lambda: json.loads(text))


def named(name: str, arguments: str) -> Sequence[ToolCall] | None:
    """The call of this tool with arguments in JSON."""
    return _calls(lambda: {"name": name, "arguments": arguments})


def _calls(read: Callable[[], Any]) -> Sequence[ToolCall] | None:
    try:
        found = read()
        return [_call(one) for one in (found if isinstance(found, list) else [found])] or None
    except Exception:  # noqa: BLE001 - parsers of models' text raise anything
        return None


def _call(found: Mapping[str, Any]) -> ToolCall:
    """Raises an exception if this is no call."""
    arguments = found.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise InvalidValue("arguments: not an object")
    id = found.get("id") or f"call_{secrets.token_hex(12)}"
    return ToolCall.from_json({"name": found["name"], "arguments": arguments, "id": id})
