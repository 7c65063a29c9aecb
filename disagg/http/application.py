"""The ASGI application of a server: routes, and what every request passes through first: it gets its id, or is
refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disagg import logs
from disagg.http import requests

Handler = Callable[[Request], Awaitable[Response]]
ErrorHandlers = Mapping[Any, Callable[[Request, Exception], Response | Awaitable[Response]]]
"""By the kind of the error, as Starlette has them."""


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


class RequestMiddleware:
    """Outermost ASGI layer."""

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
