"""HTTP/1.1 for callers that have not sent a token yet: bounded heads, bounded waits, bounded connections.

uvicorn closes a connection that is idle after a response, but waits without limit for a first request head. 2,300 such
connections used up a server's file descriptors, so that its KV port accepted no transfer either.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
HEAD_S = 10.0  # from the moment a request may start until its head is complete
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
        elif idle and self._head_timer is None:  # a head has started on a kept-alive connection
            self._expect_head(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self, seconds: float) -> None:
        self._head_timer = self.loop.call_later(seconds, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._between_requests():
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
