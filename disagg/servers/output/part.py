"""The parts of an answer, and the plainest way to find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from disagg.api.requests import ToolCall
from disagg.engines.model.text import TextStream

Kind = Literal["reasoning", "text", "call"]


class OutputPart(NamedTuple):
    """More of an answer. call: of the kind "call", which has no text."""

    kind: Kind
    text: str = ""
    call: ToolCall | None = None


class Output(Protocol):
    """Finds the parts of one answer. Stop strings end it whatever it is in the middle of."""

    @property
    def reasoning(self) -> bool:
        """Whether the last token was part of the reasoning."""
        ...

    @property
    def stopped(self) -> str:
        """The stop string that was reached, "" until then."""
        ...

    def push(self, token: int) -> Sequence[OutputPart]:
        """What became certain with this token."""
        ...

    def finish(self) -> Sequence[OutputPart]:
        """What was held back, at the end of the answer."""
        ...


class Plain:
    """An Output whose text is all the answer."""

    reasoning = False

    def __init__(self, text: TextStream) -> None:
        self._text = text

    @property
    def stopped(self) -> str:
        return self._text.stopped

    def push(self, token: int) -> Sequence[OutputPart]:
        return parts(self._text.push(token))

    def finish(self) -> Sequence[OutputPart]:
        return parts(self._text.finish())


def parts(text: str, kind: Kind = "text") -> Sequence[OutputPart]:
    """One part, or none without text."""
    return (OutputPart(kind, text),) if text else ()
