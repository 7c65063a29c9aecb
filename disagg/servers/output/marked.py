"""Answers in which marks such as <think> and <tool_call> enclose reasoning and calls.

A mark may be one token, several, or a part of some: it is found in the text. White space next to a mark is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from disagg.api.requests import Tool
from disagg.engines.model.format import ToolFormat
from disagg.engines.model.text import TextStream
from disagg.servers.output import tool_calls
from disagg.servers.output.part import OutputPart, parts

State = Literal["text", "reasoning", "call"]
MAX_BLANKS: Final = 1024
"""White space before a mark is dropped, but no more than this is held back until one comes."""


class Marks(NamedTuple):
    """think: None if reasoning is not marked. form: None if calls are not recognised. hidden: tokens without text,
    except in a call."""

    think: tuple[str, str] | None = None
    form: ToolFormat | None = None
    hidden: frozenset[int] = frozenset()


class Marked:
    """An Output of a model with such marks. text: with special tokens. thinking: the answer begins inside its
    reasoning."""

    def __init__(self, text: TextStream, marks: Marks, tools: Sequence[Tool], *, thinking: bool = False) -> None:
        self._text = text
        self._think, self._form, self._hidden = marks
        self._tools = tools
        self._state: State = "reasoning" if thinking else "text"
        self._held = ""  # not certain yet: may begin a mark, or is white space that may precede one
        self._fresh = True  # nothing but white space since the last mark

    @property
    def reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def stopped(self) -> str:
        return self._text.stopped

    def push(self, token: int) -> Sequence[OutputPart]:
        if token in self._hidden and self._state != "call":
            return ()
        return self._take(self._text.push(token))

    def finish(self) -> Sequence[OutputPart]:
        found = [*self._take(self._text.finish())]
        left, self._held = self._held, ""
        if self._state == "call":
            found += self._call(left, ended=False)
        elif left.strip() or not self._fresh:
            found += parts(left, self._state)
        return found

    def _take(self, text: str) -> list[OutputPart]:
        looked_at = max(0, len(self._held) - max(map(len, self._marks()), default=1) + 1)  # no mark begins before
        self._held += text
        found: list[OutputPart] = []
        while text and (at := self._next_mark(looked_at)) is not None:
            start, mark = at
            looked_at = 0
            before, self._held = self._held[:start], self._held[start + len(mark) :]
            found += self._call(before, ended=True) if self._state == "call" else self._release(before.rstrip())
            self._state = self._after(mark)
            self._fresh = True
        if self._state == "call" and len(self._held) > tool_calls.MAX_CALL_CHARS:
            before, self._held = self._held, ""
            found += self._call(before, ended=False)
            self._state, self._fresh = "text", False
        elif self._state != "call" and text:
            certain = len(self._held) - self._uncertain()
            before, self._held = self._held[:certain], self._held[certain:]
            found += self._release(before)
        return found

    def _release(self, text: str) -> Sequence[OutputPart]:
        if self._fresh:
            text = text.lstrip()
        self._fresh = self._fresh and not text
        assert self._state != "call", "the text of a call is parsed as a whole"
        return parts(text, self._state)

    def _call(self, text: str, *, ended: bool) -> Sequence[OutputPart]:
        """The calls in the text of a call, or the text as it was written."""
        assert self._form is not None, "without a form there are no calls"
        if made := tool_calls.parsed(text, self._form, self._tools):
            return [OutputPart("call", call=call) for call in made]
        return parts(self._form.start + text + (self._form.end if ended else ""))

    def _marks(self) -> Sequence[str]:
        """The marks that change the state."""
        if self._state == "reasoning":
            return [self._think[1]] if self._think else []
        if self._state == "call":
            return [self._form.end] if self._form and self._form.end else []
        return [*([self._think[0]] if self._think else []), *([self._form.start] if self._form else [])]

    def _after(self, mark: str) -> State:
        if self._state != "text":
            return "text"
        return "reasoning" if self._think is not None and mark == self._think[0] else "call"

    def _next_mark(self, start: int) -> tuple[int, str] | None:
        """Where the first mark from `start` on begins, and which it is."""
        found = ((self._held.find(mark, start), mark) for mark in self._marks())
        return min(((at, mark) for at, mark in found if at >= 0), default=None)

    def _uncertain(self) -> int:
        """How much of the end of the held text may belong to a mark, with the white space before it."""
        held, marks = self._held, self._marks()
        ends = range(min(len(held), max(map(len, marks), default=1) - 1), 0, -1)
        length = next((n for n in ends if any(mark.startswith(held[-n:]) for mark in marks)), 0)
        kept = held[: len(held) - length]
        return min(len(held) - len(kept.rstrip()), length + MAX_BLANKS) if marks else length
