"""TCP connections that begin with a secret key. A client without it can neither take part nor block for long."""

from __future__ import annotations

import hmac
import socket
import time

from disagg.bench.handoff.transport import STEP_TIMEOUT_S
from disagg.errors import PeerLost

_KEY_TIMEOUT_S = 5.0  # for a new connection to send the key


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
        received = _read(connection, len(key), min(deadline, time.monotonic() + _KEY_TIMEOUT_S))
        if hmac.compare_digest(received, key.encode()):
            return connection
        connection.close()
    raise PeerLost(f"no sender with this benchmark's key connected within {timeout_s:g} s")


def address_family(host: str) -> socket.AddressFamily:
    """IPv6 if `host` is an IPv6 address, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
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
