"""The gateway's process: listen, serve, drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from disagg.config import Fleet, GatewaySettings, Host, load, served_digest, tables_digest
from disagg.config.addresses import expanded, is_loopback
from disagg.errors import ConfigError, DisaggError
from disagg.files import stamp
from disagg.gateway.app import build
from disagg.gateway.clients.access import Access, require_keys_if_public
from disagg.gateway.clients.keys import KeyFile, KeyRing
from disagg.gateway.clients.origins import Origins
from disagg.gateway.health import GatewayHealth, Member
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.history import history_path
from disagg.gateway.watch.recorder import Recorder
from disagg.http.protocol import ConnectionBounds, Encryption
from disagg.http.server import BoundedServer, ListenHints, listen, run
from disagg.inference.client import AsyncClient
from disagg.tls.callers import CertificateFiles, fingerprint, self_signed
from disagg.tls.certificate import ServerTLS
from disagg.token import Tokens, gateway_folder

BOUNDS = ConnectionBounds(connections=1024, unproven=768, unproven_per_address=256)
"""A proxy or router in front of the gateway has many connections from one address."""
HINTS = ListenHints("choose another with --port", "check --host")
DRAIN_S = 20
LOOK_S: Final = 1.0
"""How often it looks whether hosts.toml has changed."""
END_S = 2.0  # for requests that are cut to send their callers the error, and to be recorded

_EVERYWHERE: Final = ("0.0.0.0", "::")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a gateway listens, and the models that had a host which was up when it began to. certificate: the file of
    the one that its clients are shown; None: they speak plain HTTP."""

    address: str
    port: int
    live: tuple[str, ...] = ()
    certificate: Path | None = None

    @property
    def url(self) -> str:
        """The URL at which programs of this machine reach it, also if it listens on all addresses."""
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)
        return f"{self._scheme}://{f'[{address}]' if ':' in address else address}:{self.port}"

    @property
    def public_url(self) -> str:
        """The URL at which other machines reach it, if it listens for all of them; else empty."""
        return f"{self._scheme}://{socket.gethostname()}:{self.port}" if self.address in _EVERYWHERE else ""

    @property
    def fingerprint(self) -> str | None:
        """Of the certificate."""
        return None if self.certificate is None else fingerprint(self.certificate)

    @property
    def _scheme(self) -> str:
        return "http" if self.certificate is None else "https"


def serve(
    fleet: Fleet,
    address: str,
    port: int,
    ready: Callable[[Listening], None],
    *,
    host: Host | None = None,
    settings: GatewaySettings = GatewaySettings(),  # noqa: B008 - frozen
    keep_text: bool = False,
) -> None:
    """Run the gateway until SIGTERM or SIGINT. ready: called once it listens. host: the gateway's in
    hosts.toml; without one it refuses to listen for other machines before there is a key that they could use.
    settings: what it offers its clients. keep_text: whether the history has prompts and answers.

    Raises UsageError, PortInUse or FleetError if it cannot listen, and ConfigError if the fleet has no token or the
    certificate cannot be used.
    """
    ring = KeyRing(KeyFile.of(fleet))
    # A gateway of hosts.toml is a server of the fleet, whose programs ask for its health with the fleet's token.
    member = Member(host, Tokens.of(fleet)) if host is not None else None
    if member is None:
        require_keys_if_public(address, ring)
    files = certificate_files(fleet, address, settings)
    encryption = _encryption(fleet, files, member)
    listener = listen(address, port, HINTS)
    try:
        access = Access(ring, public=not is_loopback(address), origins=Origins(settings.cors_origins))
        bound, number = listener.getsockname()[:2]
        at = Listening(bound, number, certificate=files[0] if files else None)
        opened = _Opened(access, member, listener, encryption, at, settings.keep_responses)
        run(_serve(fleet, opened, ready, keep_text=keep_text))
    finally:
        listener.close()


def certificate_files(fleet: Fleet, address: str, settings: GatewaySettings) -> tuple[Path, Path] | None:
    """The certificate that clients of this gateway are shown, and its key; None if they speak plain HTTP. One that
    signs itself is made if there is none yet. Raises ConfigError."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        return expanded(settings.tls_cert), expanded(settings.tls_key)
    if not settings.tls_self_signed:
        return None
    own = [] if address in _EVERYWHERE else [str(address)]
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *own]
    return self_signed(gateway_folder(fleet) / "tls", list(dict.fromkeys(names)))


def _encryption(fleet: Fleet, files: tuple[Path, Path] | None, member: Member | None) -> Encryption:
    """Programs of the fleet ask by TLS, by a name that says so. Clients have keys, and a certificate to know or plain
    HTTP, which a port with a certificate refuses."""
    if files is not None:
        tokens = member.tokens if member is not None else Tokens.of(fleet)
        return Encryption(ServerTLS(lambda: tokens.all, CertificateFiles(*files).context), plain=False)
    return Encryption(ServerTLS(lambda: member.tokens.all)) if member is not None else Encryption()


@dataclass(frozen=True, slots=True)
class _Opened:
    """A gateway that can be reached, before it serves."""

    access: Access
    member: Member | None
    listener: socket.socket
    encryption: Encryption
    at: Listening
    keep_responses: int


async def _serve(fleet: Fleet, opened: _Opened, ready: Callable[[Listening], None], *, keep_text: bool) -> None:
    seen = stamp(fleet.path)
    async with AsyncClient(fleet) as client:
        await client.connect()  # so that no request's time includes it
        watch = GatewayWatch(client, Recorder(history_path(client.fleet)), keep_text=keep_text)
        async with watch.watching():
            health = GatewayHealth(client, opened.member)
            application = build(client, opened.access, health, watch, keep_responses=opened.keep_responses)
            spare_collector()
            ready(replace(opened.at, live=tuple(health.live_models())))
            server = GatewayServer(application, opened.encryption, stopping=watch.feed.stop)
            following = asyncio.ensure_future(_follow(seen, client, watch, opened.member))
            try:
                await server.serve(sockets=[opened.listener])
            finally:
                following.cancel()
                await asyncio.wait((following,))


async def _follow(
    seen: tuple[int, int, int] | None, client: AsyncClient, watch: GatewayWatch, member: Member | None
) -> None:
    """Read hosts.toml again when it has changed. Requests that run go on. seen: when it was read."""
    while True:
        await asyncio.sleep(LOOK_S)
        if (now := stamp(client.fleet.path)) == seen:
            continue
        seen = now
        try:
            fleet = await asyncio.to_thread(load, client.fleet.path)
            require_only_models_changed(client.fleet, fleet, member.host if member is not None else None)
        except DisaggError as error:
            log.error("models_not_changed", extra={"fields": error.to_json()})
            continue
        client.replace_fleet(fleet)
        watch.read_models()
        await client.connect()  # the keepers state what is new
        log.info("models_read", extra={"fields": {"models": list(fleet.models)}})


def require_only_models_changed(fleet: Fleet, changed: Fleet, host: Host | None) -> None:
    """Raise ConfigError if the two differ in more than the models, their names, and which of them a host with several
    has. host: the gateway's in hosts.toml. Pure."""
    if host is None:
        same = tables_digest(changed) == tables_digest(fleet)
    else:
        now = changed.hosts.get(host.name)
        same = now is not None and served_digest(changed, now) == served_digest(fleet, host)
    if not same or (changed.name, changed.token_file) != (fleet.name, fleet.token_file):
        raise ConfigError(
            f"{fleet.path}: more has changed than its models: hosts, their addresses, ports or engines, or the gateway",
            "restart the gateway",
        )


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
