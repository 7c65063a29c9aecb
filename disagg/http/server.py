"""One server: uvicorn with bounded connections, the middleware of its application, and an accept loop of our own.

uvicorn's accept loop is asyncio's, which logs one error per place in the backlog when the process has no descriptor
left: 39,880 lines in ten seconds. Its signal handlers end the process before its engine is closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disagg import logs
from disagg.api.base import Contract
from disagg.api.events import ErrorAnswer, ErrorEvent
from disagg.errors import DisaggError, FleetError, Overloaded, PortInUse, RequestError, Unauthorized
from disagg.http import requests
from disagg.http.lazy import READ_BYTES
from disagg.http.protocol import (
    KEEP_ALIVE_S,
    BoundedProtocol,
    ConnectionBounds,
    Encryption,
    connection_of,
    free_descriptor,
)

Handler = Callable[[Request], Awaitable[Response]]
ErrorHandlers = Mapping[Any, Callable[[Request, Exception], Response | Awaitable[Response]]]
"""Starlette's handlers, by the kind of the error."""
BACKLOG = 512
RETRY_S = 0.5
INTERNAL_ERROR = DisaggError("internal error in the server", "its log has the traceback")
KEEPALIVE_IDLE_S, KEEPALIVE_PROBE_S, KEEPALIVE_PROBES = 10, 3, 3
UNACKNOWLEDGED_S = 30
"""A caller that acknowledges nothing for this long is gone, e.g. its cable is cut."""


def _other_words(record: logging.LogRecord) -> bool:
    """False for uvicorn's line about requests that a stop cuts: each of them has a line of its own."""
    return not str(record.msg).startswith("Cancel %s running task(s)")


logging.getLogger("uvicorn.error").addFilter(_other_words)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on uvloop: waking up for a token and sending it takes half of what it does on asyncio's own loop."""
    uvloop.run(main)


class BoundedServer(uvicorn.Server):
    """Serves an application until `should_exit` or a signal. shutdown_s: for the last requests and their last bytes;
    what still runs then is cancelled. granian takes no less for an event (9.4 us at 32 streams, 84 at one; uvicorn 9.5
    and 78), and gives no access to its connections."""

    def __init__(self, app: ASGIApp, bounds: ConnectionBounds, shutdown_s: int, encryption: Encryption) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=shutdown_s,
            )
        )
        self._bounds, self._encryption = bounds, encryption
        self._read_buffer = memoryview(bytearray(READ_BYTES))
        self._accepting: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but a handled signal is not raised again: what the process holds must still be closed."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = []
        connections = self.server_state.connections
        for listener in sockets or []:
            listener.setblocking(False)
            accepting = accept(listener, self._protocol, lambda: free_descriptor(connections))
            self._accepting.append(asyncio.ensure_future(accepting))
        self.started = True

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            bounds=self._bounds,
            encryption=self._encryption,
            read_buffer=self._read_buffer,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.wait(self._accepting)
        await super().shutdown(sockets)


def application(
    routes: Sequence[Route],
    handlers: ErrorHandlers,
    refusal: Callable[[Request], Response | None],
    *,
    echo: bool = False,
) -> ASGIApp:
    """The application. refusal: what a request is answered instead of being served; None: it is served. echo: answers
    name the request's id and trace."""
    served = Starlette(routes=routes, exception_handlers=handlers)
    served.router.redirect_slashes = False  # it would redirect to whatever Host the caller names
    return RequestMiddleware(served, refusal, echo=echo)


def of_the_fleet(
    request: Request, accepts: Callable[[str], bool], error: Callable[[DisaggError], Response]
) -> Response | None:
    """What a request without the fleet's token is answered, unless it is for /health; and one on a connection for which
    there was no place, unless it is for health or load. None: it is served. accepts: whether a token is the fleet's."""
    connection, path = connection_of(request.scope), request.scope["path"]
    proven = accepts(requests.bearer(request))
    if connection is not None and proven:
        connection.owner.prove()
    if connection is not None and connection.surplus and path not in ("/health", "/load"):
        full = Overloaded("the server has no place for more connections", "try again in a moment")
        response = error(full)
        response.headers["Connection"] = "close"
        return response
    if path == "/health" or proven:
        return None
    hint = "send it as 'Authorization: Bearer TOKEN'; see token_file"
    return error_response(Unauthorized("the fleet token is missing or wrong", hint))


def json_response(body: Contract, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body.to_bytes(), status, headers, "application/json")


def error_response(error: DisaggError, status: int | None = None, retry_after_s: int = 1) -> Response:
    """An error as JSON (ErrorAnswer), with its own HTTP status if no other is given. retry_after_s: for Overloaded."""
    event = ErrorEvent.of(error, retry_after_s)
    headers = {"Retry-After": str(event.retry_after_s)} if event.retry_after_s is not None else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(ErrorAnswer(event), status or error.http_status, headers)


def error_handlers(on_error: Callable[[Request, Exception], Awaitable[Response]]) -> ErrorHandlers:
    """Every error as JSON. on_error: answers a DisaggError."""
    return {DisaggError: on_error, HTTPException: _on_http_error, Exception: _on_bug}


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(
        RequestError(str(error.detail), "see docs/http-api.md for the endpoints"), error.status_code
    )
    response.headers.update(error.headers or {})
    return response


async def _on_bug(_: Request, error: Exception) -> Response:
    logs.log.error("internal_error", exc_info=error)
    return error_response(INTERNAL_ERROR)


class RequestMiddleware:
    """Outermost ASGI layer. Starlette's BaseHTTPMiddleware costs 76 us per request and 13 us per part of an answer."""

    def __init__(self, app: Starlette, refusal: Callable[[Request], Response | None], *, echo: bool) -> None:
        self.app = app
        self._refusal, self._echo = refusal, echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        scope[requests.REQUEST_ID_KEY] = request_id = requests.request_id(request)
        reset = logs.request_id.set(request_id)
        if self._echo:
            send = _named(send, request, request_id)
        try:
            if (refusal := self._refusal(request)) is not None:
                await refusal(scope, receive, send)
                return
            with suppress(Exception):  # Starlette raises it again after its handler, which has logged and answered it
                await self.app(scope, receive, send)
        finally:
            logs.request_id.reset(reset)


def _named(send: Send, request: Request, request_id: str) -> Send:
    named = [(requests.REQUEST_ID.lower().encode(), request_id.encode())]
    if trace := requests.traceparent(request):
        named.append((requests.TRACEPARENT.encode(), trace.encode()))

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *named]
        await send(message)

    return send_named


class ListenHints(NamedTuple):
    """What to do about a port that is in use, and about an address that is not this machine's."""

    port: str
    address: str


def listen(address: str, port: int, hints: ListenHints) -> socket.socket:
    """A listening socket. Port 0: any that is free. Raises PortInUse or FleetError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # asyncio sets TCP_NODELAY on accepted connections only if the protocol is named; else every answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} on {address} is in use", hints.port) from error
        hint = f"{hints.port}; one over 1023 needs no root" if error.errno == errno.EACCES else hints.address
        raise FleetError(f"cannot listen on {address}:{port}: {error.strerror or error}", hint) from error
    return listener


async def accept(
    listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], free_descriptor: Callable[[], bool]
) -> None:
    """Accept until cancelled. free_descriptor: closes the least useful connection; False if there is none.

    Nothing is awaited between accepting and passing on, as it is in `loop.sock_accept`: cancelled there, a connection
    would be left open without an owner.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            await _readable(listener)
            continue
        except OSError as error:  # no descriptor or memory is left, or the caller has gone already
            freed = free_descriptor()
            logs.event(logging.WARNING, "cannot_accept", reason=str(error), closed_an_idle_connection=freed)
            await asyncio.sleep(0.0 if freed else RETRY_S)
            continue
        try:
            set_options(connection)
            await loop.connect_accepted_socket(make_protocol, connection)
        except OSError:  # the caller has gone
            connection.close()


async def _readable(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(listener, wake)
    try:
        await ready
    finally:
        loop.remove_reader(listener)


def set_options(connection: socket.socket) -> None:
    """Let the kernel find out that a caller is gone, also while nothing is sent."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _options():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _options() -> list[tuple[int, int]]:
    options = [(socket.TCP_KEEPINTVL, KEEPALIVE_PROBE_S), (socket.TCP_KEEPCNT, KEEPALIVE_PROBES)]
    if sys.platform == "linux":
        return [
            *options,
            (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
            (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000),
        ]
    return [*options, (getattr(socket, "TCP_KEEPALIVE", 0x10), KEEPALIVE_IDLE_S)]  # macOS
