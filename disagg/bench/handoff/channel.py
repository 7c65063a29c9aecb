"""Typed messages between the two ends, as JSON lines over one TCP connection that begins with a secret key: a client
without it can neither take part nor block for long.

Each round: Offer ->, <- Connected, Ready ->, (the transfer), Received ->, Digest ->, <- Next.  (->: to the sender)
"""

from __future__ import annotations

import hmac
import json
import socket
import time
from typing import Self, TypeVar

from disagg.api.base import Contract
from disagg.errors import PeerLost

MAX_LINE_BYTES = 1 << 16
_MAX_ERROR_CHARS = 2000
Message = TypeVar("Message", bound=Contract)
STEP_TIMEOUT_S = 60.0  # for a single step of the other end
LOAD_TIMEOUT_S = 120.0  # for loading its frameworks from a cold disk
ROUND_TIMEOUT_S = 600.0  # for one round of the slowest transport over a slow link
_KEY_TIMEOUT_S = 5.0  # for a new connection to send the key


class Connected(Contract, frozen=True, forbid_unknown_fields=True):
    """The sender has connected."""


class Ready(Contract, frozen=True, forbid_unknown_fields=True):
    """The receiver has accepted the connection: the clock may start."""


class Received(Contract, frozen=True):
    """All tensors are ready for the decode engine: the clock stops. cpu_s: CPU time of the receiver."""

    cpu_s: float


class Digest(Contract, frozen=True):
    """XXH3-128 of the received tensors, in hex."""

    digest: str


class Next(Contract, frozen=True, forbid_unknown_fields=True):
    """The sender has read the digest."""


class MessageChannel:
    """One end of the connection. PeerLost if the other end disconnects, fails or sends nothing in time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(ROUND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lines = connection.makefile("rb")

    @classmethod
    def accept(cls, listener: socket.socket, token: str) -> Self:
        """Wait for the end that sends the token."""
        return cls(accept_with_key(listener, token, LOAD_TIMEOUT_S))

    @classmethod
    def connect(cls, host: str, port: int, token: str) -> Self:
        """Connect and send the token."""
        return cls(connect_with_key(host, port, token))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def send(self, message: Contract) -> None:
        """Send one message."""
        self._write(message.to_json())

    def send_error(self, error: Exception) -> None:
        """Make the other end's next `receive` raise PeerLost with this error's text."""
        self._write({"error": str(error)[:_MAX_ERROR_CHARS]})

    def receive(self, kind: type[Message]) -> Message:
        """The next message, which must be a `kind`."""
        try:
            line = self._lines.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise PeerLost(f"the other end of the benchmark sent nothing: {error}") from error
        if not line.endswith(b"\n"):
            raise PeerLost("the other end of the benchmark disconnected", "see what it printed")
        try:
            body = json.loads(line)
            if isinstance(body, dict) and "error" in body:
                raise PeerLost(f"the other end of the benchmark failed: {body['error']}")
            return kind.from_json(body)
        except ValueError as error:
            raise PeerLost(
                f"the other end of the benchmark sent no {kind.__name__}: {error}", "deploy the same disagg to both"
            ) from error

    def _write(self, body: object) -> None:
        try:
            self._socket.sendall(json.dumps(body).encode() + b"\n")
        except OSError as error:
            raise PeerLost(f"the other end of the benchmark disconnected: {error}") from error


def connect_with_key(host: str, port: int, key: str) -> socket.socket:
    """Connect and send the key. PeerLost if nothing listens there."""
    try:
        connection = socket.create_connection((host, port), timeout=STEP_TIMEOUT_S)
        connection.sendall(key.encode())
    except OSError as error:
        raise PeerLost(f"cannot connect to {host}:{port}: {error}", "is there a firewall on the way?") from error
    return connection


def accept_with_key(listener: socket.socket, key: str, timeout_s: float) -> socket.socket:
    """The first connection that sends the key; others are closed. PeerLost if there is none within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (remaining := deadline - time.monotonic()) > 0:
        listener.settimeout(remaining)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        received = _read_key(connection, len(key), min(deadline, time.monotonic() + _KEY_TIMEOUT_S))
        if hmac.compare_digest(received, key.encode()):
            return connection
        connection.close()
    raise PeerLost(f"no sender with this benchmark's key connected within {timeout_s:g} s")


def address_family(host: str) -> socket.AddressFamily:
    """IPv6 if `host` is an IPv6 address, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _read_key(connection: socket.socket, count: int, deadline: float) -> bytes:
    """The first `count` bytes, or fewer if they do not arrive by the deadline."""
    received = b""
    try:
        while len(received) < count and (remaining := deadline - time.monotonic()) > 0:
            connection.settimeout(remaining)
            piece = connection.recv(count - len(received))
            if not piece:
                break
            received += piece
    except OSError:  # a timeout or a reset: the key is incomplete
        pass
    return received
