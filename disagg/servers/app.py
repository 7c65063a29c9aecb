"""The HTTP shell around a service: fleet token, bounded bodies, request ids, and every error as JSON."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.errors import BodyTooLarge, DisaggError, Overloaded, RequestError, Unauthorized
from disagg.servers import gpu, logs
from disagg.servers.answer import with_errors
from disagg.servers.schemas import Body, parse
from disagg.servers.service import Service
from disagg.servers.sse import Event, EventStream, read_body

BODY_S = 60.0  # for a whole request body to arrive
LEAST_BODY_LIMIT = 1 << 20
BODY_BYTES_PER_TOKEN = 64  # of context: several times what any tokenizer's average token takes, also as JSON
REQUEST_ID = "X-Request-Id"


def build(service: Service, token: str) -> Starlette:
    """The ASGI application of one server."""
    return Starlette(
        routes=[
            Route("/health", _health(service, token), methods=["GET"]),
            Route("/status", _status(service), methods=["GET"]),
            *service.routes(),
        ],
        middleware=[],
        exception_handlers={
            DisaggError: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
    )


class Gate:
    """Outermost ASGI layer: sets the request id, and lets no one past /health without the fleet's token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        scope["disagg.request_id"] = _request_id(request)
        reset = logs.request_id.set(scope["disagg.request_id"])
        try:
            if scope["path"] != "/health" and not authorized(request, self._token):
                error = Unauthorized(
                    "the fleet token is missing or wrong", "send it as 'Authorization: Bearer TOKEN'; see token_file"
                )
                await error_response(error)(scope, receive, send)
                return
            await self._app(scope, receive, send)
        finally:
            logs.request_id.reset(reset)


def authorized(request: Request, token: str) -> bool:
    """Whether the request carries the fleet's token, compared in constant time."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(), token.encode())


def endpoint(
    kind: type[Body], handle: Callable[[Request, Body], Awaitable[Response]], context: int
) -> Callable[..., object]:
    """A POST endpoint that hands a validated body to `handle`. `context` tokens bound the body's size."""
    limit = max(LEAST_BODY_LIMIT, BODY_BYTES_PER_TOKEN * context)

    async def serve(request: Request) -> Response:
        try:
            body = await read_body(request, limit, BODY_S)
        except TimeoutError:
            raise RequestError(f"the request body did not arrive within {BODY_S:g} s", "send it at once") from None
        if body is None:
            raise BodyTooLarge(
                f"the request body is over {limit} bytes, more than {context} tokens of context can need",
                "shorten the prompt",
            )
        return await handle(request, parse(kind, body))

    return serve


def stream(events: AsyncGenerator[Event, None]) -> EventStream:
    """An event stream whose failures are told: by HTTP status before the first event, as an `error` event after."""
    return EventStream(with_errors(events), lambda body: error_response(DisaggError.from_json(dict(body))))


def error_response(error: DisaggError) -> JSONResponse:
    """An error as `{"error": {"code", "message", "hint"}}` with its HTTP status."""
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": error.to_json()}, status_code=error.http_status, headers=headers)


def _request_id(request: Request) -> str:
    given = request.headers.get(REQUEST_ID, "")
    return given if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given) else secrets.token_hex(8)


def _health(service: Service, token: str) -> Callable[..., object]:
    async def health(request: Request) -> Response:
        body = service.health()
        return JSONResponse(body if authorized(request, token) else {"status": body["status"]})

    return health


def _status(service: Service) -> Callable[..., object]:
    async def status(_: Request) -> Response:
        busy = await asyncio.to_thread(gpu.utilisation, service.info.backend) if service.info else None
        return JSONResponse(service.status(busy))

    return status


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, DisaggError)
    return error_response(error)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    described = RequestError(str(error.detail), "see docs/http-api.md for the endpoints")
    return JSONResponse({"error": described.to_json()}, status_code=error.status_code, headers=error.headers)


async def _on_bug(_: Request, error: Exception) -> Response:
    logs.log.error("internal_error", exc_info=error)
    return error_response(DisaggError("internal error in the server", "its log has the traceback"))
