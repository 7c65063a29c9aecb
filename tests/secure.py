"""TLS for servers that stand in for those of a fleet."""

from __future__ import annotations

import http.server
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from disagg.tls.certificate import ServerTLS, client_tls

READ_BYTES = 1 << 16
TOKENS = ("t", "token", "a-token", "test-token-of-sixteen-or-more")
"""Of the clients in these tests."""


@cache
def context(*tokens: str) -> ssl.SSLContext:
    """Of a server with these tokens; without any, with TOKENS."""
    return ServerTLS(lambda: tokens or TOKENS).context()


def accept(listener: socket.socket, *tokens: str) -> ssl.SSLSocket:
    """The next connection, with TLS."""
    return context(*tokens).wrap_socket(listener.accept()[0], server_side=True)


def connect(address: str, port: int, token: str, timeout: float = 60.0) -> ssl.SSLSocket:
    """A connection to a server of the fleet with this token."""
    return client_tls(token).secure(socket.create_connection((address, port), timeout))


@contextmanager
def in_thread(server: socketserver.TCPServer) -> Iterator[int]:
    """The port of a server that answers until the block ends, in a thread of this process."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    with server:
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


class SecureHTTPServer(http.server.ThreadingHTTPServer):
    """With TLS; the handshake is part of a connection's own thread."""

    def get_request(self) -> tuple[Any, Any]:
        plain, address = super().get_request()
        return context().wrap_socket(plain, server_side=True, do_handshake_on_connect=False), address


class SecureSocket:
    """TLS on a connected socket that one thread reads and another one writes. The handshake is part of making it."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self._plain, self._lock = plain, threading.Lock()
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sent, server_name is None, server_name)
        while not self._shaken():
            if not (data := plain.recv(READ_BYTES)):
                raise ConnectionError("closed during the handshake")
            self._received.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def recv(self, size: int) -> bytes:
        while True:
            with self._lock, suppress(ssl.SSLWantReadError):
                try:
                    return self._tls.read(size)
                except ssl.SSLZeroReturnError:
                    return b""
            if not (data := self._plain.recv(READ_BYTES)):
                return b""
            with self._lock:
                self._received.write(data)

    def sendall(self, data: bytes) -> None:
        with self._lock:
            rest = memoryview(data)
            while rest:
                rest = rest[self._tls.write(rest) :]
            data = self._sent.read()
        self._plain.sendall(data)

    def shutdown(self, how: int) -> None:
        if how == socket.SHUT_WR:
            with self._lock, suppress(ssl.SSLError):
                self._tls.unwrap()
            self._plain.sendall(self._sent.read())
        self._plain.shutdown(how)

    def _shaken(self) -> bool:
        try:
            self._tls.do_handshake()
            return True
        except ssl.SSLWantReadError:
            return False
        finally:
            self._plain.sendall(self._sent.read())
