"""A TCP proxy on the loopback that applies faults to the connections through it. Two threads per connection."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self, cast

from disagg.tls.certificate import client_tls
from tests import secure
from tests.faults.flow import Direction, Fault, Flow, Needle
from tests.secure import SecureSocket

READ_BYTES = 1 << 16
SLICE_S = 0.02  # of a slow flow
CONNECT_S = 5.0

OnCall = Callable[[str], None]
"""Called with the proxy's name when a fault strikes, before its effect."""


@dataclass(slots=True)
class Injection:
    """One fault, in effect on one or more proxies. struck: when and where it did, in time.monotonic() seconds."""

    fault: Fault
    on_call: OnCall | None = None
    struck: list[tuple[float, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def spent(self) -> bool:
        return len(self.struck) >= self.fault.times

    def strike(self, name: str) -> bool:
        """Whether the fault may strike here; it does so only `times` times."""
        with self._lock:
            if self.spent:
                return False
            self.struck.append((time.monotonic(), name))
            return True


class Proxy:
    """Listens on a port of its own and forwards to `target`, a port too. token: of connections with TLS, whose bytes
    it sees as they are without. rewrite: a text of the answers and what replaces it, equally long."""

    def __init__(self, name: str, target: int, token: str = "") -> None:
        self.name, self.target, self.token = name, target, token
        self.rewrite = (b"", b"")
        self.injection: Injection | None = None
        self.healed = threading.Event()  # else what a stall holds back stays
        self._connections: set[_Connection] = set()
        self._gone = False  # new connections are refused, and open ones were reset: one accepted before gets there late
        self._lock = threading.Lock()
        self._listener = _listener(0)
        self.port = int(self._listener.getsockname()[1])
        self._accept()

    def refuse(self) -> None:
        """Refuse new connections. Those that are open go on."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def inject(self, injection: Injection) -> None:
        """Apply the fault to new connections, and to open ones from their next request on."""
        self.healed.clear()
        self.injection = injection

    def heal(self) -> None:
        """No fault any more; what a stall held back goes on, and connections are accepted."""
        self.injection = None
        self.healed.set()
        self._gone = False
        if self._listener.fileno() < 0:
            self._listener = _listener(self.port)
            self._accept()

    def reset_all(self) -> None:
        """Reset every open connection."""
        with self._lock:
            connections = list(self._connections)
            self._gone = self._listener.fileno() < 0
        for connection in connections:
            connection.end(reset=True)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        self.refuse()
        self.healed.set()
        self.reset_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        threading.Thread(target=self._serve, args=(self._listener,), name=f"proxy {self.name}", daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(caller,), daemon=True).start()

    def _connect(self, caller: socket.socket) -> None:
        server: socket.socket | None = None
        try:
            server = socket.create_connection(("127.0.0.1", self.target), CONNECT_S)
            if self.token:
                client = client_tls(self.token)
                server = cast(socket.socket, SecureSocket(server, client.context, client.server_name))
                caller = cast(socket.socket, SecureSocket(caller, secure.context(self.token)))
        except OSError:
            _reset(caller)
            if server is not None:
                server.close()
            return
        connection = _Connection(self, caller, server)
        with self._lock:
            self._connections.add(connection)
            gone = self._gone
        try:
            if gone:
                connection.end(reset=True)
            else:
                connection.run()
        finally:
            with self._lock:
                self._connections.discard(connection)


class _Connection:
    """One connection through a proxy, with the fault that was in effect when it began or when its request passed."""

    def __init__(self, proxy: Proxy, caller: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._ends = {"request": (caller, server), "answer": (server, caller)}
        self._injection: Injection | None = None
        self._flow: Flow | None = None
        self._path: Needle | None = None
        for end in (caller, server):
            end.settimeout(None)
            with suppress(OSError):  # of a connection that has ended already, on macOS
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> None:
        """Forward both directions until both have ended."""
        answers = threading.Thread(target=self._pump, args=("answer",), daemon=True)
        answers.start()
        try:
            self._pump("request")
            answers.join()
        finally:
            self.end(reset=False)

    def end(self, *, reset: bool) -> None:
        """Close both sockets, if they are open."""
        for end in self._ends["request"]:
            if reset:
                _reset(end)
            else:
                _close(end)

    def _pump(self, direction: Direction) -> None:
        source, target = self._ends[direction]
        try:
            while data := source.recv(READ_BYTES):
                self._follow()
                if direction == "answer" and self._proxy.rewrite[0]:
                    data = data.replace(*self._proxy.rewrite)
                if direction == "request":
                    data = self._armed(data)
                self._forward(direction, data)
            if self._flow and self._flow.fault.direction == direction:
                target.sendall(self._flow.end())
            target.shutdown(socket.SHUT_WR)
        except OSError:
            self.end(reset=True)  # the other end learns that this one was reset

    def _follow(self) -> None:
        """Take up the fault that the proxy has now, unless it has struck as often as it may."""
        injection = self._proxy.injection
        if injection is None or injection is self._injection or injection.spent:
            return
        self._injection, fault = injection, injection.fault
        self._flow = Flow(fault, armed=not fault.path)
        self._path = Needle(f"POST {fault.path} ".encode()) if fault.path else None

    def _armed(self, data: bytes) -> bytes:
        """Arm the flow if the fault's path is in these bytes of the request; returns those that are still to pass."""
        if self._flow is None or self._path is None or self._flow.armed or (at := self._path.find(data)) is None:
            return data
        self._ends["request"][1].sendall(data[:at])
        self._flow.armed = True
        return data[at:]

    def _forward(self, direction: Direction, data: bytes) -> None:
        flow, injection, target = self._flow, self._injection, self._ends[direction][1]
        if flow is None or injection is None or flow.fault.direction != direction:
            target.sendall(data)
            return
        struck = flow.struck
        before, action, rest = flow.feed(data)
        if flow.struck and not struck and not injection.strike(self._proxy.name):
            self._flow, before, action, rest = None, data, None, b""
        if self._flow is flow and flow.struck and flow.fault.kind == "slow":
            _send_slowly(target, before, flow.fault.rate)
        else:
            target.sendall(before)
        if flow.struck and not struck and self._flow is flow and injection.on_call is not None:
            injection.on_call(self._proxy.name)
        if action in ("reset", "close"):
            self.end(reset=action == "reset")
        elif action == "stall":
            self._proxy.healed.wait()
        target.sendall(rest)


def _listener(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=256)


def _send_slowly(target: socket.socket, data: bytes, rate: float) -> None:
    size = max(1, int(rate * SLICE_S))
    for at in range(0, len(data), size):
        target.sendall(data[at : at + size])
        time.sleep(SLICE_S)


def _reset(end: socket.socket) -> None:
    """End a connection with a TCP reset, and wake the thread that reads it."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _close(end)


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RD)  # wakes the thread that reads; sends nothing
    with suppress(OSError):
        end.close()
