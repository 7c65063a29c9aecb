"""One HTTP GET with the standard library: importing httpx would cost `disagg status` 0.14 s of CPU."""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disagg.tls.certificate import client_tls, unchecked_context

MAX_BODY = 1 << 20
"""Bytes, of a server of disagg."""


Secure = Callable[[socket.socket], socket.socket]


class ReplyTimeout(TimeoutError):
    """The connection was made, and no complete answer arrived in time."""


@dataclass(frozen=True, slots=True)
class HTTPReply:
    """A whole HTTP answer. headers: with names in lower case. too_long: content is empty, for it is over the bound."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    too_long: bool = False


def get(address: str, port: int, path: str, token: str | None, timeout_s: float) -> tuple[int, dict[str, Any] | None]:
    """Status code and JSON object of a server's answer by TLS; the object is None if the body is anything else or over
    a MiB. The token is sent to a server that has proven that it has it; None: sent to none, and any server will do.

    Raises SSLError if the server does not prove itself, OSError if no connection is made, ReplyTimeout if nothing
    arrives over it, http.client.HTTPException if what arrives is not HTTP. Proxies of the environment are not used.
    """
    secure: Secure = client_tls(token).secure if token else unchecked_context().wrap_socket
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    reply = fetch(connection, path, token, timeout_s, secure=secure)
    return reply.status, _json_object(reply.content)


def fetch(
    connection: http.client.HTTPConnection,
    path: str,
    token: str | None,
    timeout_s: float,
    max_bytes: int = MAX_BODY,
    *,
    secure: Secure | None = None,
) -> HTTPReply:
    """The answer to a GET on a new connection, which is closed; raises as `get`. secure: puts TLS on it."""
    deadline = time.monotonic() + timeout_s
    try:
        connection.connect()
        try:
            if secure is not None:
                connection.sock.settimeout(_left(deadline))
                connection.sock = secure(connection.sock)
            connection.sock = _TimedSocket(connection.sock, deadline)
            return _exchange(connection, path, token, max_bytes)
        except TimeoutError as error:
            raise ReplyTimeout(str(error)) from error
        except ssl.SSLEOFError as error:
            raise ConnectionResetError("the server closed the connection") from error
    finally:
        connection.close()


def _exchange(connection: http.client.HTTPConnection, path: str, token: str | None, max_bytes: int) -> HTTPReply:
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
    with connection.getresponse() as response:
        headers = {name.lower(): value for name, value in response.getheaders()}
        body = b""
        while True:
            part = response.read1(1 << 16)
            body += part
            if not part:
                return HTTPReply(response.status, headers, body)
            if len(body) > max_bytes:
                return HTTPReply(response.status, headers, b"", too_long=True)


class _TimedSocket:
    """What http.client uses of a socket. All of it ends at the deadline, however slowly the other end sends."""

    def __init__(self, below: socket.socket, deadline: float) -> None:
        self._below, self._deadline = below, deadline

    def sendall(self, data: bytes) -> None:
        self._below.settimeout(_left(self._deadline))
        self._below.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._below, self._deadline))

    def close(self) -> None:
        self._below.close()


class _TimedReader(io.RawIOBase):
    """Keeps the socket open until it is closed itself, as a file of the socket does."""

    def __init__(self, socket: socket.socket, deadline: float) -> None:
        self._socket, self._file, self._deadline = socket, socket.makefile("rb", buffering=0), deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(_left(self._deadline))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ReplyTimeout("no complete response in time")
    return left


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
