"""One request and its response: its body is parsed as the application asks for it, and an answer that is sent before
all of it has arrived ends the connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from disagg.errors import RequestError


class BoundedCycle(RequestResponseCycle):
    """more: parses what has arrived of the body. reading: the application waits for more of it. failure: why no more of
    it is read."""

    def __init__(self, more: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self.reading = False
        self.failure: RequestError | None = None
        self._more = more
        self._ends_with_connection = options["scope"]["http_version"] == "1.0"

    @property
    def writable(self) -> bool:
        """See PartWriter."""
        return bool(self.chunked_encoding) and not self.flow.write_paused

    def write_part(self, part: bytes) -> None:
        """See PartWriter."""
        if not self.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def receive(self) -> ASGIReceiveEvent:
        """Raises RequestError if the body is not one that is read."""
        if not self.more_body:
            return await super().receive()
        self.reading = True
        try:
            self._more()
            if self.failure is not None:
                raise self.failure
            return await super().receive()
        finally:
            self.reading = False

    async def send(self, message: ASGISendEvent) -> None:
        if not self.response_started:
            self.keep_alive = self.keep_alive and not self.more_body
        elif self.more_body and not message.get("more_body", False):
            self.keep_alive = True  # uvicorn does not close the connection; `on_response` does when it may
        if self._ends_with_connection:  # uvicorn would send chunks, which HTTP/1.0 does not have
            self.chunked_encoding = False
            if message["type"] == "http.response.body":
                self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
