"""The receiving end: a server to which prefill hosts push KV caches, on one or several connections each.

A hostile peer can occupy one of a bounded number of connections for a short time, and nothing else: its ticket is
checked before anything else is read, memory is allocated only for a valid one, and its size is computed on this host.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import threading
import time
from types import TracebackType
from typing import Self

from disagg.errors import DisaggError, FleetError, HandoffError, Overloaded, PortInUse
from disagg.kv.channel import Channel
from disagg.kv.receive.newcomers import Newcomers, ProvenConnection
from disagg.kv.receive.pace import ReceiveLimits
from disagg.kv.receive.part import receive_part
from disagg.kv.receive.tickets import IssuedTicket, Tickets

SWEEP_S = 0.1  # interval between checks of the deadlines
CLOSE_S = 5.0  # how long close() waits for each thread
BACKLOG = 128  # connections that the operating system holds until they are accepted
ACCEPTS = 32  # new connections between two looks at the others
BACK_OFF_S = (0.05, 1.0)  # after a failed accept: the first pause, doubled up to the last

log = logging.getLogger(__name__)


class KVServer:
    """Listens from construction until `close`; port 0 picks a free one. PortInUse if the port is taken."""

    def __init__(self, host: str, port: int, tickets: Tickets, limits: ReceiveLimits | None = None) -> None:
        self._tickets = tickets
        self._limits = limits or ReceiveLimits()
        self._listener = _listen(host, port)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[Channel, threading.Thread] = {}
        self._poll = select.poll()
        self._newcomers = Newcomers(self._poll, self._limits, self._tickets.find, self._admit, _log_refusal)
        self._pause_s, self._listen_from, self._swept = 0.0, 0.0, 0.0
        self._acceptor = threading.Thread(target=self._run, name=f"kv-accept-{self.port}", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def connections(self) -> int:
        """Open connections, in any state."""
        return len(self._connections) + len(self._newcomers)

    def close(self) -> None:
        """Stop listening, revoke every ticket, abort every connection, and wait a bounded time for the threads."""
        self._closed.set()
        self._acceptor.join(CLOSE_S)
        self._listener.close()
        self._tickets.revoke_all()
        with self._lock:
            connections = list(self._connections.items())
        for channel, _ in connections:
            channel.abort()
        for _, thread in connections:
            thread.join(CLOSE_S)

    def _run(self) -> None:
        """The accepting thread: new connections, those without a ticket, and the tickets' deadlines."""
        while not self._closed.is_set():
            try:
                self._serve_ready()
                self._sweep()
            except Exception:  # a defect must not end the thread: no KV would arrive, and no ticket expire
                log.exception("the KV receiver failed")
                self._closed.wait(SWEEP_S)
        self._newcomers.close()

    def _sweep(self) -> None:
        now = time.monotonic()
        if now >= self._swept + SWEEP_S:
            self._swept = now
            self._newcomers.expire(now)
            self._tickets.expire(self._limits)

    def _serve_ready(self) -> None:
        now = time.monotonic()
        if now >= self._listen_from:
            self._poll.register(self._listener, select.POLLIN)
        for descriptor, _ in self._poll.poll(SWEEP_S * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            else:
                self._newcomers.read(descriptor, time.monotonic())

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # no more, or the peer disconnected since
                return
            except OSError as error:  # out of descriptors: the peer stays in the backlog
                self._back_off(error)
                return
            self._pause_s = 0.0
            with contextlib.suppress(OSError):  # macOS: the peer has reset the connection since
                # Else each credit may wait for the acknowledgement of the one before, up to 40 ms.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._newcomers.add(sock, address[0], time.monotonic())

    def _back_off(self, error: OSError) -> None:
        """Stop listening for a while, and close a connection that has shown no ticket: its descriptor may be enough."""
        now = time.monotonic()
        log.warning("cannot accept a KV connection: %s", error)
        self._newcomers.evict_oldest()
        first, last = BACK_OFF_S
        self._pause_s = min(max(first, 2 * self._pause_s), last)
        self._listen_from = now + self._pause_s
        self._poll.unregister(self._listener)

    def _admit(self, admitted: ProvenConnection) -> None:
        """Claim the ticket and start a thread for the rest. Raises what refuses the connection, which is then still
        the newcomers'."""
        with self._lock:
            if len(self._connections) >= self._limits.connections:
                raise Overloaded("the decode host has no free KV connection", "try again shortly")
        deadline = time.monotonic() + self._limits.header_s
        peer = f"prefill host {admitted.address}"
        channel = Channel(admitted.sock, peer, deadline=deadline, idle_s=self._limits.header_s)
        issued = self._tickets.claim(admitted.ticket, channel.abort)
        thread = threading.Thread(
            target=self._serve,
            args=(channel, issued, admitted),
            name=f"kv-{admitted.address}",
            daemon=True,
        )
        with self._lock:
            self._connections[channel] = thread
        try:
            thread.start()
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # no thread: not for being busy, which would pass, so that callers go elsewhere
            with self._lock:
                del self._connections[channel]
            self._tickets.unclaim(issued, channel.abort)
            refusal = HandoffError(f"the decode host cannot serve one more KV connection: {error}", "free its memory")
            self._tickets.settle(issued, refusal)
            raise refusal from error

    def _serve(self, channel: Channel, issued: IssuedTicket, admitted: ProvenConnection) -> None:
        try:
            receive_part(channel, issued, admitted.header_bytes, self._tickets, self._limits, version=admitted.version)
        finally:
            channel.close()
            with self._lock:
                del self._connections[channel]


def _log_refusal(address: str, error: DisaggError) -> None:
    """Peers cause these lines as often as they like; `disagg.logs` limits the lines of one template."""
    log.warning("refused a KV connection from %s: %s", address, error)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"cannot receive KV on {host}: port {port} is already in use",
                f"find the process with `lsof -nP -iTCP:{port} -sTCP:LISTEN`, or choose another port",
            ) from error
        raise FleetError(
            f"cannot receive KV on {host} port {port}: {error}", "check the host's data address"
        ) from error
    listener.setblocking(False)
    return listener
