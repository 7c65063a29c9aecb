"""HTTP/1.1 for callers that have not shown a token yet: bounded heads, bounded waits, bounded connections.

uvicorn ends a connection that idles after an answer, but waits for ever for one that never sends a whole head. 2,300
such connections were seen to use up a server's file descriptors, and with them its KV port.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
HEAD_S = 10.0  # from the first moment in which a request may come to its whole head
KEEP_ALIVE_S = 75


class BoundedProtocol(H11Protocol):
    """uvicorn's own h11 protocol, with a timer on request heads and a cap on connections."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._expect_head(HEAD_S)

    def data_received(self, data: bytes) -> None:
        idle = self._between_requests()
        super().data_received(data)
        if not self._between_requests():
            self._stop_timer()
        elif idle and self._head_timer is None:  # a head has begun on a connection kept alive
            self._expect_head(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self, seconds: float) -> None:
        self._head_timer = self.loop.call_later(seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._between_requests():
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
