"""uvicorn, with bounded connections, an accept loop of our own, and signals that do not end the process early."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from disagg.http.accept import accept
from disagg.http.connections import ConnectionBounds
from disagg.http.lazy import READ_BYTES
from disagg.http.protocol import KEEP_ALIVE_S, BoundedProtocol, Encryption, free_descriptor


def _other_words(record: logging.LogRecord) -> bool:
    """False for uvicorn's line about requests that a stop cuts: each of them has a line of its own."""
    return not str(record.msg).startswith("Cancel %s running task(s)")


logging.getLogger("uvicorn.error").addFilter(_other_words)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on uvloop: waking up for a token and sending it takes half of what it does on asyncio's own loop."""
    uvloop.run(main)


class BoundedServer(uvicorn.Server):
    """Serves an application until `should_exit` or a signal. shutdown_s: for the last requests and their last bytes;
    what still runs then is cancelled."""

    def __init__(self, app: ASGIApp, bounds: ConnectionBounds, shutdown_s: int, encryption: Encryption) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=shutdown_s,
            )
        )
        self._bounds, self._encryption = bounds, encryption
        self._read_buffer = memoryview(bytearray(READ_BYTES))
        self._accepting: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but a handled signal is not raised again: what the process holds must still be closed."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = []
        connections = self.server_state.connections
        for listener in sockets or []:
            listener.setblocking(False)
            accepting = accept(listener, self._protocol, lambda: free_descriptor(connections))
            self._accepting.append(asyncio.ensure_future(accepting))
        self.started = True

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            bounds=self._bounds,
            encryption=self._encryption,
            read_buffer=self._read_buffer,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.wait(self._accepting)
        await super().shutdown(sockets)
