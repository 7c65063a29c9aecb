"""The gateway's process: listen, serve, drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from disagg.config import Fleet
from disagg.errors import FleetError, PortInUse
from disagg.gateway.access import Access, is_loopback, require_keys_if_public
from disagg.gateway.app import build
from disagg.gateway.keys import KeyFile, KeyRing
from disagg.gateway.protocol import HeadTimeoutProtocol
from disagg.inference.client import AsyncClient

BACKLOG = 512
MAX_CONNECTIONS = 1024
KEEP_ALIVE_S = 75
DRAIN_S = 20  # for running requests; what is still running then is cut, with an error that says so


def serve(fleet: Fleet, address: str, port: int, ready: Callable[[str], None]) -> None:
    """Run the gateway until SIGTERM or SIGINT. ready: called with its URL once it listens.

    Raises UsageError, PortInUse or FleetError if it cannot listen, and ConfigError if the fleet has no token.
    """
    ring = KeyRing(KeyFile.of(fleet))
    require_keys_if_public(address, ring)
    listener = listen(address, port)
    try:
        asyncio.run(_serve(fleet, Access(ring, public=not is_loopback(address)), listener, ready))
    finally:
        listener.close()


async def _serve(fleet: Fleet, access: Access, listener: socket.socket, ready: Callable[[str], None]) -> None:
    async with AsyncClient(fleet) as client:
        await client.connect()  # so that no request's time includes it
        server = Server(build(client, access))
        host, port = listener.getsockname()[:2]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await server.serve(sockets=[listener])


def listen(address: str, port: int) -> socket.socket:
    """A listening socket. Port 0: any that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # asyncio sets TCP_NODELAY on accepted connections only if the protocol is named; else every answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} on {address} is in use", "choose another with --port") from error
        raise FleetError(f"cannot listen on {address}:{port}: {error.strerror or error}", "check --host") from error
    return listener


class Server(uvicorn.Server):
    """uvicorn with the gateway's bounds."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HeadTimeoutProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                backlog=BACKLOG,
                limit_concurrency=MAX_CONNECTIONS,
                h11_max_incomplete_event_size=64 << 10,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but a handled signal is not raised again: the client must still be closed."""
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
