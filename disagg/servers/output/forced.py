"""Answers that are, or may be, a call of a tool in an envelope: {"name", "arguments"}."""

from __future__ import annotations

import json
from collections.abc import Sequence

from disagg.servers.output import tool_calls
from disagg.servers.output.part import Output, OutputPart, parts


class Forced:
    """An Output over another one, whose text is an envelope. An envelope that was cut off is left out; one that is too
    long for a call stays text."""

    def __init__(self, inner: Output) -> None:
        self._inner = inner
        self._text = ""
        self._free = False  # what follows is no call

    @property
    def reasoning(self) -> bool:
        return self._inner.reasoning

    @property
    def stopped(self) -> str:
        return self._inner.stopped

    def push(self, token: int) -> Sequence[OutputPart]:
        return self._keep(self._inner.push(token))

    def finish(self) -> Sequence[OutputPart]:
        found = self._keep(self._inner.finish())
        if made := tool_calls.from_json(self._text):
            return [*found, *(OutputPart("call", call=call) for call in made)]
        return [*found, *self._cut()]

    def _cut(self) -> Sequence[OutputPart]:
        """What an answer has that ended in its envelope."""
        return ()

    def _may_be_call(self) -> bool:
        """Whether the text so far may be an envelope, or the beginning of one."""
        return len(self._text) <= tool_calls.MAX_CALL_CHARS

    def _keep(self, found: Sequence[OutputPart]) -> list[OutputPart]:
        """All parts but text, which is kept as long as it may be a call."""
        if self._free:
            return [*found]
        self._text += "".join(part.text for part in found if part.kind == "text")
        others = [part for part in found if part.kind != "text"]
        if self._may_be_call():
            return others
        text, self._text, self._free = self._text, "", True
        return [*others, *parts(text)]


class Enveloped(Forced):
    """An Output over another one, whose text may be an envelope, or the form of an answer. openings: how an envelope
    begins."""

    def __init__(self, inner: Output, openings: Sequence[str]) -> None:
        super().__init__(inner)
        self._openings = openings

    def _cut(self) -> Sequence[OutputPart]:
        begun = any(self._text.startswith(one) for one in self._openings)
        return () if begun and not _is_json(self._text) else parts(self._text)

    def _may_be_call(self) -> bool:
        text = self._text
        begun = any(one.startswith(text) or text.startswith(one) for one in self._openings)
        return begun and super()._may_be_call()


def _is_json(text: str) -> bool:
    """Whether the text is complete: of an envelope that was cut it is not, of a form that begins as one it may be."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
