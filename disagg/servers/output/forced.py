"""An answer that had to be one call: its text is the call as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.servers.output.calls import from_json
from disagg.servers.output.part import Output, OutputPart, parts


class Forced:
    """An Output over another one, whose text is {"name", "arguments"}. Text that was cut off stays text."""

    def __init__(self, inner: Output) -> None:
        self._inner = inner
        self._text = ""

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
        if calls := from_json(self._text):
            return [*found, *(OutputPart("call", call=call) for call in calls)]
        return [*found, *parts(self._text)]

    def _keep(self, found: Sequence[OutputPart]) -> list[OutputPart]:
        """All parts but text, which is kept."""
        self._text += "".join(part.text for part in found if part.kind == "text")
        return [part for part in found if part.kind != "text"]
