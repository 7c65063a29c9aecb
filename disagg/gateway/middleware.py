"""What every request passes through first: it gets its id, and a place."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disagg import logs
from disagg.gateway.answer import json_response
from disagg.gateway.dialects.openai import error_body
from disagg.gateway.dialects.problems import Problem
from disagg.http import requests
from disagg.http.protocol import connection_of


class RequestMiddleware:
    """Outermost ASGI layer: every request has an id, the caller's or a new one, and its answer names it. On a
    connection for which there was no place, everything but /health is refused."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        scope[requests.REQUEST_ID_KEY] = request_id = requests.request_id(request)
        logs.request_id.set(request_id)
        named = [(requests.REQUEST_ID.lower().encode(), request_id.encode())]
        if trace := requests.traceparent(request):
            named.append((requests.TRACEPARENT.encode(), trace.encode()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *named]
            await send(message)

        connection = connection_of(scope)
        if connection is not None and connection.surplus and scope["path"] != "/health":
            await respond(_NO_PLACE)(scope, receive, send_with_id)
            return
        with suppress(Exception):  # Starlette raises it again after _on_bug, which has logged and answered it
            await self._app(scope, receive, send_with_id)


_NO_PLACE = Problem(
    503,
    "server_error",
    "too_many_connections",
    "the gateway has no place for more connections: try again in a moment",
    headers={"Retry-After": "1", "Connection": "close"},
)


def respond(problem: Problem) -> Response:
    """A problem as OpenAI's clients read it."""
    return json_response(error_body(problem), problem.status, problem.headers)
