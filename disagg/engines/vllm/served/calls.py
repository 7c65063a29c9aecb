"""HTTP requests to a `vllm serve`, each on a thread of its own, that can be ended at any time.

vLLM aborts a request whose connection is closed. http.client with blocking sockets: a request is few large pieces, and
a socket that is shut down wakes its thread at once.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from disagg.engines.vllm.served.forms import refusal
from disagg.errors import Cancelled, DeadlineExceeded, DisaggError, ModelError

CONNECT_S: Final = 3.0
MAX_BYTES: Final = 1 << 24
"""The longest answer, and the longest line of one that is streamed."""
_LEAST_S: Final = 0.001  # a socket's timeout; one of 0 would not block
_KEYED: Final = "/v1/"  # what vLLM answers only to those who have its key
_JSON: Final = {"Content-Type": "application/json"}


class VLLMServer:
    """Where a `vllm serve` listens. url: without a path. key: reads its key, "" if it needs none."""

    def __init__(self, url: str, key: Callable[[], str] = lambda: "") -> None:
        self.url = url
        self._key = key
        parts = urlsplit(url)
        self.address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        self._secure = parts.scheme == "https"

    def connect(self, timeout: float = CONNECT_S) -> http.client.HTTPConnection:
        """A connection to it. Raises OSError."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(*self.address, timeout=timeout)
        connection.connect()
        return connection

    def listens(self) -> bool:
        """Whether it accepts connections."""
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def lives(self, path: str, timeout: float) -> None:
        """Nothing, if it answers within so many seconds: a proxy before it may refuse the path. ModelError if it does
        not, or with an error of its own."""
        status, content = self._exchange("GET", path, None, timeout)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise refusal(status, content)

    def ask(self, method: str, path: str, body: bytes | None, timeout: float) -> bytes:
        """The content of an answer, within so many seconds for each part. ModelError if there is none."""
        status, content = self._exchange(method, path, body, timeout)
        if status != HTTPStatus.OK:
            raise refusal(status, content)
        return content

    def _exchange(self, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        """Status and content of an answer."""
        try:
            with (
                contextlib.closing(self.connect()) as connection,
                self.response(connection, method, path, body, timeout) as response,
            ):
                return response.status, response.read(MAX_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a chunk without a size
            raise unreachable(self.url, error) from error

    def response(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, timeout: float
    ) -> http.client.HTTPResponse:
        """Send a request, and wait for the beginning of its answer. Raises OSError and HTTPException, and ConfigError
        if its key cannot be read."""
        headers = _JSON if body is not None else {}
        if path.startswith(_KEYED) and (key := self._key()):
            headers = {**headers, "Authorization": f"Bearer {key}"}
        connection.sock.settimeout(timeout)
        connection.request(method, path, body, headers)
        return connection.getresponse()


class Call:
    """One POST. on_line: called for each line of a streamed answer. on_end: called once at the end, with the content of
    an answer that is not streamed, or with why there is none. first: called before the request; what it raises is its
    end. All on the call's thread."""

    def __init__(
        self,
        server: VLLMServer,
        path: str,
        body: bytes,
        *,
        deadline: float,
        on_end: Callable[[bytes | DisaggError], None],
        on_line: Callable[[bytes], None] | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        self._server, self._path, self._body = server, path, body
        self._deadline, self._on_end, self._on_line, self._first = deadline, on_end, on_line, first
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._closed = False
        threading.Thread(target=self._run, name="vllm-call", daemon=True).start()

    def close(self) -> None:
        """End the request: vLLM aborts it. Does not wait; `on_end` may still be called once."""
        with self._lock:
            self._closed = True
            if self._sock is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    self._sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            ended: bytes | DisaggError = self._exchange()
        except DisaggError as error:
            ended = error
        except Exception as error:  # noqa: BLE001 - without an end, whoever waits for it would wait for ever
            if isinstance(error, TimeoutError) and self._left() <= _LEAST_S:
                ended = DeadlineExceeded("vllm serve did not answer by the request's deadline", "raise the timeout")
            else:
                ended = unreachable(self._server.url, error)
        self._on_end(Cancelled("the request to vllm serve was ended") if self._closed else ended)

    def _exchange(self) -> bytes:
        if self._first is not None:
            self._first()
        with contextlib.closing(self._server.connect()) as connection:
            sock = connection.sock  # the connection lets go of it if the server closes it after this answer
            try:
                self._hold(sock)
                with self._server.response(connection, "POST", self._path, self._body, self._left()) as response:
                    if self._on_line is None or response.status != HTTPStatus.OK:
                        return _content(response)
                    while line := response.readline(MAX_BYTES):
                        self._on_line(line)
                        if response.isclosed():
                            break
                        sock.settimeout(self._left())
                    return b""
            finally:
                self._hold(None)

    def _hold(self, sock: socket.socket | None) -> None:
        """Have `close` shut this socket down. Raises Cancelled if it was called before."""
        with self._lock:
            self._sock = sock
            if self._closed and sock is not None:
                raise Cancelled("the request to vllm serve was ended")

    def _left(self) -> float:
        return max(_LEAST_S, self._deadline - time.monotonic())


def unreachable(url: str, error: Exception) -> DisaggError:
    """The error of a connection that could not be made, or broke."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ModelError(f"no vllm serve answers at {url}: {reason}", "start it, or see why it ended in its log")


def _content(response: http.client.HTTPResponse) -> bytes:
    content = response.read(MAX_BYTES)
    if response.status != HTTPStatus.OK:
        raise refusal(response.status, content)
    return content
