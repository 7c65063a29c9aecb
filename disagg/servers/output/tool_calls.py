"""Tool calls from what a model has written. Models write what they like, and what their callers make them write:
whatever is no call is None."""

from __future__ import annotations

import json
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from disagg.api.base import InvalidValue
from disagg.api.requests import Tool, ToolCall
from disagg.engines.model.format import ToolFormat

MAX_CALL_CHARS: Final = 1 << 17
"""Text beyond it is no call."""
PARSE_S: Final = 0.25
"""Text that takes longer is no call: the event loop waits for the parser. mlx-lm's need milliseconds for a call, but
some try regular expressions whose time grows with the cube of a text made for it: 45 s for 90,000 characters."""


class _TooSlow(BaseException):
    """A parser must not catch it."""


def parsed(text: str, form: ToolFormat, tools: Sequence[Tool]) -> Sequence[ToolCall] | None:
    """The calls in the text between two marks; None if it is not of this form, or too long."""
    return _calls(text, lambda: form.parse(text, [tool.for_template() for tool in tools]))


def from_json(text: str) -> Sequence[ToolCall] | None:
    """The call that {"name", "arguments"} states."""
    return _calls(text, lambda: json.loads(text))


def named(name: str, arguments: str) -> Sequence[ToolCall] | None:
    """The call of this tool with arguments in JSON."""
    return _calls(arguments, lambda: {"name": name, "arguments": arguments})


def _calls(text: str, read: Callable[[], Any]) -> Sequence[ToolCall] | None:
    if len(text) > MAX_CALL_CHARS:
        return None
    try:
        with _interrupted_after(PARSE_S):
            found = read()
            return [_call(one) for one in (found if isinstance(found, list) else [found])] or None
    except (Exception, _TooSlow):  # noqa: BLE001 - parsers of models' text raise anything
        return None


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise _TooSlow in what takes longer. Only a signal interrupts a regular expression, and only in the main thread,
    which servers have their event loop in; elsewhere nothing is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _TooSlow

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, interrupt)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)[0]
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # also if the signal came in the line above
        signal.signal(signal.SIGALRM, handler)
        if before:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, before - (time.monotonic() - began)))


def _call(found: Mapping[str, Any]) -> ToolCall:
    """Raises an exception if this is no call."""
    arguments = found.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise InvalidValue("arguments: not an object")
    id = found.get("id") or f"call_{secrets.token_hex(12)}"
    return ToolCall.from_json({"name": found["name"], "arguments": arguments, "id": id})
