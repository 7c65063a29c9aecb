"""HTTP/1.1 for callers that have not sent a key yet: a request's head must arrive in time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # from the connection, or from the head's first byte on a kept-alive one, until the head is complete


class HeadTimeoutProtocol(H11Protocol):
    """uvicorn's own h11 protocol, which waits for heads without limit, with a limit."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        waiting = self._waiting_for_head()
        super().data_received(data)
        if not self._waiting_for_head():
            self._stop_timer()
        elif waiting and self._timer is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _waiting_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
