"""The gateway's process: listen, serve, drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from starlette.types import ASGIApp

from disagg.config import Fleet
from disagg.gateway.access import Access, is_loopback, require_keys_if_public
from disagg.gateway.app import build
from disagg.gateway.keys import KeyFile, KeyRing
from disagg.http.accept import ListenHints, listen
from disagg.http.connections import Bounds
from disagg.http.server import BoundedServer
from disagg.inference.client import AsyncClient

BOUNDS = Bounds(connections=1024, unproven=768, unproven_per_address=256)
"""A proxy or router in front of the gateway has many connections from one address."""
HINTS = ListenHints("choose another with --port", "check --host")
DRAIN_S = 20  # for running requests; what is still running then is cut, with an error that says so


def serve(fleet: Fleet, address: str, port: int, ready: Callable[[str], None]) -> None:
    """Run the gateway until SIGTERM or SIGINT. ready: called with its URL once it listens.

    Raises UsageError, PortInUse or FleetError if it cannot listen, and ConfigError if the fleet has no token.
    """
    ring = KeyRing(KeyFile.of(fleet))
    require_keys_if_public(address, ring)
    listener = listen(address, port, HINTS)
    try:
        asyncio.run(_serve(fleet, Access(ring, public=not is_loopback(address)), listener, ready))
    finally:
        listener.close()


async def _serve(fleet: Fleet, access: Access, listener: socket.socket, ready: Callable[[str], None]) -> None:
    async with AsyncClient(fleet) as client:
        await client.connect()  # so that no request's time includes it
        host, port = listener.getsockname()[:2]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await server(build(client, access)).serve(sockets=[listener])


def server(app: ASGIApp, bounds: Bounds = BOUNDS) -> BoundedServer:
    """The HTTP server around the application."""
    return BoundedServer(app, bounds, DRAIN_S)
