"""Answers of gpt-oss: messages in channels. Marks are tokens of their own:

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{arguments}<|call|>
<|start|>assistant<|channel|>final<|message|>text<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from disagg.engines.model.format import HarmonyMark
from disagg.engines.model.text import TextStream
from disagg.servers.output import tool_calls
from disagg.servers.output.part import Kind, OutputPart, parts

_TOOL = re.compile(r"to=functions\.([^\s<]+)")
MAX_HEADER_CHARS: Final = 4096
"""More text of a header is dropped: it has a channel, and the name of a tool."""


class Harmony:
    """An Output of gpt-oss, whose prompt ends with <|start|>assistant. stream: a new TextStream after so many
    tokens of the answer, one for every message. with_tools: calls are recognised; else their arguments are
    text. within: the prompt ends within a message of the last channel."""

    def __init__(
        self,
        stream: Callable[[int], TextStream],
        marks: Mapping[HarmonyMark, int],
        *,
        with_tools: bool,
        within: bool = False,
    ) -> None:
        self._stream = stream
        self._marks = {token: name for name, token in marks.items()}
        self._with_tools = with_tools
        self._state: Literal["header", "message", "between"] = "message" if within else "header"
        self._pushed = 0
        self._text = stream(0)
        self._header = ""
        self._kind: Kind = "text"
        self._tool = ""
        self._arguments = ""
        self._stopped = ""

    @property
    def reasoning(self) -> bool:
        return self._state == "message" and self._kind == "reasoning"

    @property
    def stopped(self) -> str:
        """Stop strings count within a message."""
        return self._stopped

    def push(self, token: int) -> Sequence[OutputPart]:
        self._pushed += 1
        mark = self._marks.get(token)
        if mark is None and self._state == "between":
            return ()
        if mark is None:
            return self._take(self._text.push(token))
        if mark in ("channel", "constrain") and self._state == "header":
            self._header = (self._header + self._text.finish())[:MAX_HEADER_CHARS] + f"<|{mark}|>"
            self._text = self._stream(self._pushed)
            return ()
        ended = self._end()
        if mark == "message":
            self._begin_message()
        elif mark == "start":
            self._state, self._header = "header", ""
        self._text = self._stream(self._pushed)
        return ended

    def finish(self) -> Sequence[OutputPart]:
        return self._end()

    def _take(self, text: str) -> Sequence[OutputPart]:
        self._stopped = self._text.stopped if self._state == "message" else ""
        if self._state == "header":
            self._header = (self._header + text)[:MAX_HEADER_CHARS]
            return ()
        if self._kind == "call":
            self._arguments += text
            if len(self._arguments) <= tool_calls.MAX_CALL_CHARS:
                return ()
            self._kind, text = "text", self._arguments
        return parts(text, self._kind)

    def _begin_message(self) -> None:
        channel = self._header.rpartition("<|channel|>")[2]
        found = _TOOL.search(self._header)
        self._tool = found[1] if found else ""
        self._arguments = ""
        if self._tool and self._with_tools:
            self._kind = "call"
        else:
            self._kind = "reasoning" if channel.startswith("analysis") else "text"
        self._state, self._header = "message", ""

    def _end(self) -> Sequence[OutputPart]:
        """What ends with the message or the header that this is in the middle of."""
        rest = self._take(self._text.finish())
        state, self._state = self._state, "between"
        if state == "message" and self._kind == "call":
            made = tool_calls.named(self._tool, self._arguments or "{}")
            return [OutputPart("call", call=call) for call in made] if made else parts(self._arguments)
        return rest
