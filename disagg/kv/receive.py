"""The receiving end: a server to which prefill hosts push KV caches, one per connection.

A hostile peer can occupy one of a bounded number of connections for a bounded time, and nothing else: memory is
allocated only for a valid ticket, and its size is computed on this host.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from disagg.api.names import WireForm
from disagg.errors import Cancelled, DisaggError, FleetError, HandoffError, Overloaded, PeerLost, PortInUse
from disagg.kv import frames
from disagg.kv.arena import Arenas
from disagg.kv.assemble import Assembly
from disagg.kv.channel import Channel
from disagg.kv.received import Placement, ReceivedKV, ReceiveTiming
from disagg.kv.tickets import Slot, Tickets

__all__ = ["KVServer", "ReceiveLimits", "ReceivedKV"]

SWEEP_S = 0.1  # interval between checks of the tickets' deadlines
CLOSE_S = 5.0  # how long close() waits for each thread
REPLY_S = 1.0  # how long sending the last reply may take

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """Bounds on what peers may use, in seconds. header_s: for the whole header. idle_s: without any byte afterwards.
    linger_s: for reading the last reply. connections: open at the same time; one more is refused with Overloaded."""

    header_s: float = 5.0
    idle_s: float = 30.0
    linger_s: float = 1.0
    connections: int = 64


class KVServer:
    """Listens from construction until `close`; port 0 picks a free one. PortInUse if the port is taken."""

    def __init__(self, host: str, port: int, tickets: Tickets, limits: ReceiveLimits | None = None) -> None:
        self._tickets = tickets
        self._limits = limits or ReceiveLimits()
        self._listener = _listen(host, port, backlog=self._limits.connections)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[Channel, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name=f"kv-accept-{self.port}", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def connections(self) -> int:
        """Open connections, in any state."""
        return len(self._connections)

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

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._closed.is_set():
            if poll.poll(SWEEP_S * 1000):
                self._accept_one()
            self._tickets.expire()

    def _accept_one(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer disconnected between poll and accept
            return
        except OSError as error:  # out of descriptors: the peer stays in the backlog; retry without spinning
            log.warning("cannot accept a KV connection: %s", error)
            self._closed.wait(SWEEP_S)
            return
        deadline = time.monotonic() + self._limits.header_s
        channel = Channel(sock, f"prefill host {address[0]}", deadline=deadline, idle_s=self._limits.header_s)
        if not self._start(channel, address[0]):
            self._reject(channel)

    def _start(self, channel: Channel, name: str) -> bool:
        """Start a thread for the connection; False if there are too many."""
        thread = threading.Thread(target=self._serve, args=(channel,), name=f"kv-{name}", daemon=True)
        with self._lock:
            if len(self._connections) >= self._limits.connections:
                return False
            self._connections[channel] = thread
        try:
            thread.start()
        except RuntimeError as error:  # the operating system has no more threads
            log.warning("cannot serve a KV connection: %s", error)
            with self._lock:
                del self._connections[channel]
            return False
        return True

    def _reject(self, channel: Channel) -> None:
        """Called on the accepting thread: the reply is small and the socket new, so the write does not block."""
        error = Overloaded("the decode host has no free KV connection", "try again shortly")
        _reply(channel, frames.encode_error(error))
        channel.close()

    def _serve(self, channel: Channel) -> None:
        try:
            receive_transfer(channel, self._tickets, self._limits)
        finally:
            channel.close()
            with self._lock:
                del self._connections[channel]


def receive_transfer(channel: Channel, tickets: Tickets, limits: ReceiveLimits) -> None:
    """Serve one connection to its end. The outcome goes to the slot's callback and, as a reply, to the peer."""
    try:
        header = frames.decode_header(channel.read(frames.decode_preamble(channel.read(frames.PREAMBLE.size))))
        slot = tickets.claim(header.ticket, channel.abort)
    except DisaggError as error:
        log.warning("refused a KV transfer from %s: %s", channel.peer, error)
        _refuse(channel, error, limits)
        return
    try:
        failure = _attempt(channel, header, slot, tickets, limits)
        if failure is not None:
            tickets.settle(slot, failure)
            revoked_here = isinstance(slot.failure, Cancelled)
            level = logging.INFO if revoked_here else logging.WARNING
            log.log(level, "KV transfer of request %s failed: %s", slot.expected.request_id, slot.failure)
            _refuse(channel, slot.failure or failure, limits)
    finally:  # a defect in this program must not leave the request waiting
        tickets.settle(slot, HandoffError(f"internal error of the KV receiver in request {slot.expected.request_id}"))


def _attempt(
    channel: Channel, header: frames.Header, slot: Slot, tickets: Tickets, limits: ReceiveLimits
) -> DisaggError | None:
    """Receive, deliver and acknowledge. Returns None, or the failure after every buffer is freed."""
    release = None
    try:
        slot.expected.require(header)
        expected = slot.expected
        nbytes = expected.layout.nbytes(expected.tokens, expected.start, header.wire)
        release = tickets.budget.reserve(nbytes)
        kv = _receive(channel, slot, header.wire, tickets.arenas, limits)
        kv.on_release = release
        received, timing = kv.nbytes, kv.timing  # before the owner may release it
        if not tickets.settle(slot, kv):
            raise Cancelled("the request ended before its KV was complete")
    except BaseException as error:
        if release is not None:
            release()
        if isinstance(error, DisaggError):
            return DisaggError.from_json(error.to_json())  # a copy: the traceback's frames reference the buffers
        raise
    acknowledgement = frames.encode_ok(received_bytes=received, receive_s=timing.last_byte - timing.first_byte)
    _reply(channel, acknowledgement)
    channel.close_gently(limits.linger_s)
    return None


def _receive(channel: Channel, slot: Slot, wire: WireForm, arenas: Arenas, limits: ReceiveLimits) -> ReceivedKV:
    """Accept the transfer and read all of it, each payload straight into its place."""
    claimed = time.monotonic()
    expected = slot.expected
    channel.deadline, channel.idle_s = slot.deadline, limits.idle_s
    channel.write([memoryview(frames.encode_ok())])
    # After the reply, so that the prefill host computes its first chunk while fresh memory is allocated.
    arena = arenas.acquire(Placement.of(expected.layout, expected.tokens, expected.start, wire).nbytes)
    assembly = Assembly(expected.layout, expected.tokens, expected.start, arena, wire)
    digest = frames.new_digest()
    first_byte = 0.0
    while True:
        head = channel.read(frames.FRAME.size)
        first_byte = first_byte or time.monotonic()
        frame = frames.decode_frame(head)
        if frame.kind is frames.Kind.END:
            break
        views = assembly.place(frame)
        digest.update(head)
        channel.read_into(views, digest.update)
    totals = frames.decode_totals(channel.read(frames.TOTALS.size))
    last_byte = time.monotonic()
    kv = assembly.finish(totals, digest.digest())
    kv.timing = ReceiveTiming(claimed, first_byte, last_byte, time.monotonic())
    kv.return_arena = arenas.release
    return kv


def _refuse(channel: Channel, error: DisaggError, limits: ReceiveLimits) -> None:
    _reply(channel, frames.encode_error(error))
    channel.close_gently(limits.linger_s)


def _reply(channel: Channel, raw: bytes) -> None:
    """Send the last reply. A failure is only logged: the outcome has been delivered on this host."""
    channel.deadline = max(channel.deadline, time.monotonic() + REPLY_S)
    try:
        channel.write([memoryview(raw)])
    except PeerLost as error:
        log.info("could not reply: %s", error)


def _listen(host: str, port: int, *, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=backlog)
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
