"""An application behind the server of every host and gateway, on a free port of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from disagg.http.protocol import ConnectionBounds, Encryption
from disagg.http.server import BoundedServer, ListenHints, listen

PATIENCE_S = 60.0


@asynccontextmanager
async def served(
    app: ASGIApp,
    encryption: Encryption = Encryption(),  # noqa: B008 - frozen
    bounds: ConnectionBounds = ConnectionBounds(),  # noqa: B008 - frozen
) -> AsyncIterator[int]:
    """The port on which it is served while the block runs."""
    listener = listen("127.0.0.1", 0, ListenHints("", ""))
    server = BoundedServer(app, bounds, 5, encryption)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, PATIENCE_S)
        listener.close()
