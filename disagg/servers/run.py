"""The life of a server process: bind, answer /health while loading, serve, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from math import inf
from types import FrameType

from starlette.types import ASGIApp

from disagg import logs
from disagg.api.keeper import MemoryClaim
from disagg.api.status import ProcessOrder, ProcessReport
from disagg.config import Fleet, Host
from disagg.engines.opening import open_decode, open_prefill
from disagg.engines.process import low_priority
from disagg.errors import ConfigError, Overloaded
from disagg.http.protocol import ConnectionBounds, Encryption
from disagg.http.server import BoundedServer, ListenHints, listen, run
from disagg.ledger import Claimed, Ledger, machine_room, needed, source_of
from disagg.servers.app import build
from disagg.servers.host.record import RequestRecord, record_path
from disagg.servers.host.service import AnyService
from disagg.servers.monitor import KeeperConnection, Monitor, Problems, Watchdog, notify_ready
from disagg.servers.sse import unfinished
from disagg.tls.certificate import ServerTLS
from disagg.token import Tokens, memory_folder

DRAIN_S = 20  # for running requests to finish
LAST_BYTES_S = 2  # for their last bytes to leave
CLOSE_S = 5  # for the engine to end; together less than the 30 s that service managers wait
BOUNDS = ConnectionBounds()
SWITCH_S = 0.0005  # else an engine's Python code delays the event loop and the KV threads by 5 ms at a time


def serve(fleet: Fleet, host: Host) -> int:
    """Run the server of `host` until SIGTERM or SIGINT and return 0. Raises what made it fail."""
    keeper = KeeperConnection.of_environment()
    tokens = Tokens.of(fleet)
    listener = listener_of(host)
    sys.setswitchinterval(SWITCH_S)
    service = make_service(fleet, host)
    service.record = RequestRecord(host.name, record_path(fleet, host), tokens)
    try:
        run(_serve(service, tokens, listener, keeper))
    finally:
        listener.close()
    return 0


def make_service(fleet: Fleet, host: Host) -> AnyService:
    """The service for the host's role. Its engine is not loaded yet."""
    model, options = fleet.models[host.model], host.engine
    source = model.sources.get(options.name, "")
    hardware = host.hardware or ""
    if "prefill" in host.roles:
        from disagg.servers.prefill.service import PrefillService

        return PrefillService(fleet, host, lambda: open_prefill(options, source, model.context, hardware))
    if "decode" in host.roles:
        from disagg.servers.decode.service import DecodeService

        return DecodeService(fleet, host, lambda: open_decode(options, source, model.context, hardware))
    raise ConfigError(f"{host.name} has no role that serves a model", 'give it roles = ["prefill"] or ["decode"]')


def listener_of(host: Host) -> socket.socket:
    """A listening socket on the host's address and port, bound before the model loads."""
    ours = f"`ports` of {host.keeper}" if host.keeper else f"the port of {host.name}"
    taken = f"stop the process on it (`ss -ltnp 'sport = :{host.port}'`) or change {ours}"
    return listen(host.address, host.port, ListenHints(taken, "check the address in hosts.toml"))


async def _serve(service: AnyService, tokens: Tokens, listener: socket.socket, keeper: KeeperConnection | None) -> None:
    """Load while the HTTP server runs, so that /health answers "loading". When one ends, stop the other."""
    server = _Server(service, build(service, tokens), Encryption(ServerTLS(lambda: tokens.all), plain=False))
    loading = asyncio.ensure_future(_load(service, server))
    monitor = Monitor(service)
    beside = [asyncio.ensure_future(monitor.run())]
    if keeper is not None:
        beside.append(asyncio.ensure_future(keeper.attend(server.report, server.carry_out)))
    watchdog = Watchdog(Problems(service, monitor), keeper=keeper)
    watchdog.start()
    try:
        await server.serve(sockets=[listener])
    finally:
        watchdog.stop()
        for task in beside:
            task.cancel()
        loaded = loading.done()
        loading.cancel()
        await asyncio.wait((loading,))
        if server.claimed is not None:
            server.claimed.release()
        service.record.close()
        closed = await _close(service)
    logs.info("stopped", host=service.host.name)
    if not loaded or not closed or unfinished():
        # A thread runs native code that cannot be interrupted; it holds nothing that outlives the process.
        sys.stderr.flush()
        os._exit(0)
    loading.result()


async def _close(service: AnyService) -> bool:
    """Close the service. False if it takes longer than CLOSE_S, e.g. because the engine is stuck."""
    closing = asyncio.ensure_future(service.close())
    await asyncio.wait((closing,), timeout=CLOSE_S)
    if not closing.done():
        logs.event(logging.WARNING, "engine_does_not_close", seconds=CLOSE_S)
        return False
    closing.result()
    return True


async def _load(service: AnyService, server: _Server) -> None:
    started = time.monotonic()
    logs.info("loading", host=service.host.name, model=service.model.name, role=service.role)
    try:
        if service.host.keeper:
            with low_priority():  # others of the machine answer meanwhile
                await service.load()
        else:
            server.claimed = await asyncio.to_thread(_claim, service.fleet, service.host)
            await service.load()
    except BaseException:  # also a cancellation: a server that cannot load ends
        server.should_exit = True
        raise
    notify_ready()
    if not service.health().verified:
        hint = f"not verified: run disagg verify {service.model.name}"
        logs.event(logging.WARNING, "not_verified", model=service.model.name, hint=hint)
    logs.info("ready", host=service.host.name, seconds=round(time.monotonic() - started, 3))


def _claim(fleet: Fleet, host: Host) -> Claimed | None:
    """State what this host's model takes of its machine's memory, for the keepers of other hosts there."""
    if not host.engine.kind.loads:
        return None
    room, model = machine_room(host), fleet.models[host.model]
    return Ledger(memory_folder()).claim(
        MemoryClaim(
            host=host.name,
            model=model.name,
            source=source_of(host, model),
            nbytes=needed(host, model, room),
            pool=room.pool,
            stays=True,
        )
    )


class _Server(BoundedServer):
    """A signal lets running requests finish first.

    Until they have, the server still answers: 503 to new requests, "draining" to health. A second signal ends at once.
    Requests that still run then are told that the host stops: it has not ended because of them (disagg/strikes.py).
    """

    def __init__(
        self, service: AnyService, app: ASGIApp, encryption: Encryption, bounds: ConnectionBounds = BOUNDS
    ) -> None:
        super().__init__(app, bounds, LAST_BYTES_S, encryption)
        self._service = service
        self.claimed: Claimed | None = None
        self._stopping = False
        self._draining: asyncio.Task[None] | None = None
        self._answered = ProcessOrder(number=0)
        self._refused = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopping:
            super().handle_exit(sig, frame)
        else:
            self._stopping = True
            self._service.drain()
            self._drain(DRAIN_S)

    def carry_out(self, order: ProcessOrder) -> None:
        """Take no more requests and end, as the keeper of this process wants. Nothing comes between a look at what runs
        and the end of admission. No running request is cut, whatever it takes, unless the order is to cut them."""
        service = self._service
        self._answered = order
        if order.cuts:
            self.should_exit = True
            return
        self._refused = service.state == "loading" or (service.occupied and not order.drains)
        if not self._refused and service.state == "ok":
            service.state = "draining"
            self._drain(inf)

    def report(self) -> ProcessReport:
        """What the keeper of this process is told."""
        load, counters = self._service.load_figures(), self._service.counters
        return ProcessReport(load=load, counters=counters, answers=self._answered.number, refused=self._refused)

    def _drain(self, limit_s: float) -> None:
        if self._draining is not None:
            self._draining.cancel()
        self._draining = asyncio.ensure_future(self._exit_when_idle(limit_s))

    async def _exit_when_idle(self, limit_s: float) -> None:
        ends = time.monotonic() + limit_s
        while self._service.occupied and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.state = "draining"
        if self._draining is not None:
            self._draining.cancel()
        for caller in list(self._service.active.values()):
            caller.end(Overloaded(f"{self._service.host.name} stops", "another host goes on with the request"))
        await super().shutdown(sockets)
