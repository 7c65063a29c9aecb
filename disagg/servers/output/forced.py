"""An answer that had to be one call: its text is the call as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.servers.output import calls
from disagg.servers.output.part import Output, OutputPart, parts


class Forced:
    """An Output over another one, whose text is {"name", "arguments"}. Text that was cut off, or is too
    long for a call, stays text."""

    def __init__(self, inner: Output) -> None:
        self._inner = inner
        self._text = ""
        self._too_long = False

    @property
    def reasoning(self) -> bool:
        """See Output."""
        return self._inner.reasoning

    @property
    def stopped(self) -> str:
        """See Output."""
        return self._inner.stopped

    def push(self, token: int) -> Sequence[OutputPart]:
        """See Output."""
        return self._keep(self._inner.push(token))

    def finish(self) -> Sequence[OutputPart]:
        """See Output."""
        found = self._keep(self._inner.finish())
        if made := calls.from_json(self._text):
            return [*found, *(OutputPart("call", call=call) for call in made)]
        return [*found, *parts(self._text)]

    def _keep(self, found: Sequence[OutputPart]) -> list[OutputPart]:
        """All parts but text, which is kept unless it is too long."""
        if self._too_long:
            return [*found]
        self._text += "".join(part.text for part in found if part.kind == "text")
        others = [part for part in found if part.kind != "text"]
        if len(self._text) <= calls.MAX_CALL_CHARS:
            return others
        text, self._text, self._too_long = self._text, "", True
        return [*others, *parts(text)]
