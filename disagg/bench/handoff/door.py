"""Who may connect: whoever begins with the key. A stranger can neither end a rehearsal nor hold it up for long."""

from __future__ import annotations

import hmac
import socket
import time

from disagg.bench.handoff.way import PATIENCE_S
from disagg.errors import PeerLost

_KNOCK_S = 5.0  # that a new connection may take to say the key


def knock(host: str, port: int, key: str) -> socket.socket:
    """Connect and say the key. PeerLost where nobody listens."""
    try:
        connection = socket.create_connection((host, port), timeout=PATIENCE_S)
        connection.sendall(key.encode())
    except OSError as error:
        raise PeerLost(f"cannot connect to {host}:{port}: {error}", "is there a firewall on the way?") from error
    return connection


def admit(listener: socket.socket, key: str, patience_s: float) -> socket.socket:
    """The first connection that says the key; others are closed. PeerLost where none does within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        if hmac.compare_digest(_said(connection, len(key), min(deadline, time.monotonic() + _KNOCK_S)), key.encode()):
            return connection
        connection.close()
    raise PeerLost(f"no sender with this rehearsal's key came within {patience_s:g} s")


def _said(connection: socket.socket, count: int, deadline: float) -> bytes:
    """The first `count` bytes, or fewer where they do not all come in time."""
    said = b""
    try:
        while len(said) < count and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            piece = connection.recv(count - len(said))
            if not piece:
                break
            said += piece
    except OSError:  # silent for too long, or gone: not the one who is waited for
        pass
    return said
