"""JSON lines between the two ends, over one TCP connection that only the holder of the token gets."""

from __future__ import annotations

import json
import socket
from types import TracebackType
from typing import Any, Self

from disagg.bench.handoff.door import admit, knock
from disagg.bench.handoff.way import LOADING_S, LONG_S
from disagg.errors import PeerLost

MAX_LINE_BYTES = 1 << 16


class Control:
    """One end of the thread of words. PeerLost where the other end goes away or stays silent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(LONG_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lines = connection.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lines.close()
        self._socket.close()

    def say(self, **words: Any) -> None:
        try:
            self._socket.sendall(json.dumps(words).encode() + b"\n")
        except OSError as error:
            raise PeerLost(f"the other end of the rehearsal went away: {error}") from error

    def hear(self) -> dict[str, Any]:
        try:
            line = self._lines.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise PeerLost(f"the other end of the rehearsal is silent: {error}") from error
        if not line.endswith(b"\n"):
            raise PeerLost("the other end of the rehearsal went away", "see what it printed")
        try:
            words = json.loads(line)
        except ValueError:
            words = None
        if not isinstance(words, dict):
            raise PeerLost("the other end of the rehearsal speaks another language", "deploy the same disagg to both")
        if "error" in words:
            raise PeerLost(f"the other end of the rehearsal failed: {words['error']}")
        return words


def accept(listener: socket.socket, token: str) -> Control:
    """Wait for the one who knows the token."""
    return Control(admit(listener, token, LOADING_S))


def connect(host: str, port: int, token: str) -> Control:
    """Introduce this end with the token."""
    return Control(knock(host, port, token))
