"""The gateway's process: listen, serve, drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

from disagg.config import Fleet, Host
from disagg.config.addresses import is_loopback
from disagg.gateway.app import build
from disagg.gateway.clients.access import Access, require_keys_if_public
from disagg.gateway.clients.keys import KeyFile, KeyRing
from disagg.gateway.health import GatewayHealth, Member
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.history import history_path
from disagg.gateway.watch.recorder import Recorder
from disagg.http.protocol import ConnectionBounds, Encryption
from disagg.http.server import BoundedServer, ListenHints, listen, run
from disagg.inference.client import AsyncClient
from disagg.tls.certificate import ServerTLS
from disagg.token import Tokens

BOUNDS = ConnectionBounds(connections=1024, unproven=768, unproven_per_address=256)
"""A proxy or router in front of the gateway has many connections from one address."""
HINTS = ListenHints("choose another with --port", "check --host")
DRAIN_S = 20
END_S = 2.0  # for requests that are cut to send their callers the error, and to be recorded

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a gateway listens, and the models that had a host which was up when it began to."""

    address: str
    port: int
    live: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The URL at which programs of this machine reach it, also if it listens on all addresses."""
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)
        return f"http://{f'[{address}]' if ':' in address else address}:{self.port}"

    @property
    def public_url(self) -> str:
        """The URL at which other machines reach it, if it listens for all of them; else empty."""
        return f"http://{socket.gethostname()}:{self.port}" if self.address in ("0.0.0.0", "::") else ""


def serve(
    fleet: Fleet,
    address: str,
    port: int,
    ready: Callable[[Listening], None],
    *,
    host: Host | None = None,
    keep_text: bool = False,
) -> None:
    """Run the gateway until SIGTERM or SIGINT. ready: called once it listens. host: the gateway's in
    hosts.toml; without one it refuses to listen for other machines before there is a key that they could use.
    keep_text: whether the history has prompts and answers.

    Raises UsageError, PortInUse or FleetError if it cannot listen, and ConfigError if the fleet has no token.
    """
    ring = KeyRing(KeyFile.of(fleet))
    # A gateway of hosts.toml is a server of the fleet, whose programs ask for its health with the fleet's token.
    member = Member(host, Tokens.of(fleet)) if host is not None else None
    if member is None:
        require_keys_if_public(address, ring)
    listener = listen(address, port, HINTS)
    try:
        access = Access(ring, public=not is_loopback(address))
        run(_serve(fleet, access, member, listener, ready, keep_text=keep_text))
    finally:
        listener.close()


async def _serve(
    fleet: Fleet,
    access: Access,
    member: Member | None,
    listener: socket.socket,
    ready: Callable[[Listening], None],
    *,
    keep_text: bool,
) -> None:
    async with AsyncClient(fleet) as client:
        await client.connect()  # so that no request's time includes it
        watch = GatewayWatch(client, Recorder(history_path(client.fleet)), keep_text=keep_text)
        async with watch.watching():
            url_host, port = listener.getsockname()[:2]
            health = GatewayHealth(client, member)
            application = build(client, access, health, watch)
            # Programs of the fleet ask by TLS; clients have keys, and a proxy if they want TLS.
            encryption = Encryption(ServerTLS(lambda: member.tokens.all)) if member is not None else Encryption()
            spare_collector()
            ready(Listening(url_host, port, tuple(health.live_models())))
            await GatewayServer(application, encryption, stopping=watch.feed.stop).serve(sockets=[listener])


def spare_collector() -> None:
    """Let the garbage collector leave alone what exists now, which lives as long as the process: modules and routes.

    Otherwise a full collection, about one in 500 requests, holds up every stream: for 57 ms on a busy machine."""
    gc.collect()
    gc.freeze()


class GatewayServer(BoundedServer):
    """The HTTP server around the application. stopping: is called when it stops, before it waits for requests. drain_s:
    for running requests; what is still running then is cut, with an error that says so."""

    def __init__(
        self,
        app: ASGIApp,
        encryption: Encryption = Encryption(),  # noqa: B008 - frozen
        *,
        bounds: ConnectionBounds = BOUNDS,
        stopping: Callable[[], None] = lambda: None,
        drain_s: int = DRAIN_S,
    ) -> None:
        super().__init__(app, bounds, drain_s, encryption)
        self._stopping, self._drain_s = stopping, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        if running := len(self.server_state.tasks):
            requests = f"{running} request{'s run' if running > 1 else ' runs'}"
            log.warning("stopping: %s; waiting for %d s at most, Ctrl-C again ends it at once", requests, self._drain_s)
        await super().shutdown(sockets)
        if tasks := set(self.server_state.tasks):
            if self.force_exit:  # else uvicorn has cancelled them
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks, timeout=END_S)
