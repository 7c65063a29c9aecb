"""The ASGI application around a service: fleet token, bounded bodies, request ids, and every error as JSON."""

from __future__ import annotations

import json
from functools import partial
from typing import TypeVar

from msgspec import structs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from disagg import logs
from disagg.api import openapi
from disagg.api.base import Contract, InvalidValue
from disagg.api.calls import server_document
from disagg.api.events import ErrorAnswer, ErrorEvent
from disagg.api.requests import MAX_LEASES, CountBody, LeaseBody, PromptBody
from disagg.api.status import Liveness
from disagg.errors import Cancelled, DisaggError, Overloaded, RequestError, Unauthorized
from disagg.http import requests
from disagg.http.protocol import connection_of
from disagg.http.server import application
from disagg.http.stream import unless_disconnected
from disagg.servers.host import gpu
from disagg.servers.host.service import AnyService, ServiceCall
from disagg.servers.sse import INTERNAL_ERROR, TIMES, EventStream, StreamTimes
from disagg.token import Tokens

Received = TypeVar("Received", bound=Contract)


def build(service: AnyService, tokens: Tokens, times: StreamTimes = TIMES) -> ASGIApp:
    """The ASGI application of one server. times: of the streams in which it answers."""
    host = _Application(service, tokens, times)
    routes = [
        Route("/health", host.health, methods=["GET"]),
        Route("/load", host.load, methods=["GET"]),
        Route("/status", host.status, methods=["GET"]),
        Route("/lease", host.lease, methods=["POST"]),
        Route("/count", host.count, methods=["POST"]),
        Route(openapi.PATH, host.openapi, methods=["GET"]),
        *(Route(one.path, partial(host.answer, one), methods=["POST"]) for one in service.endpoints()),
    ]
    handlers = {DisaggError: host.on_error, HTTPException: _on_http_error, Exception: _on_bug}
    return application(routes, handlers, host.refusal)


def error_response(error: DisaggError, status: int | None = None, retry_after_s: int = 1) -> Response:
    """An error as JSON (ErrorAnswer), with its own HTTP status if no other is given. retry_after_s: for Overloaded."""
    event = ErrorEvent.of(error, retry_after_s)
    headers = {"Retry-After": str(event.retry_after_s)} if event.retry_after_s is not None else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _json(ErrorAnswer(event), status or error.http_status, headers)


class _Application:
    """What each path answers."""

    def __init__(self, service: AnyService, tokens: Tokens, times: StreamTimes) -> None:
        self._service, self._tokens, self._times = service, tokens, times
        self._gauge = gpu.Gauge()
        self._document = json.dumps(server_document(service.role)).encode()

    def refusal(self, request: Request) -> Response | None:
        """What a request without the fleet's token is answered, unless it is for /health; and one on a connection for
        which there was no place, unless it is for health or load."""
        connection, proven, path = connection_of(request.scope), self._authorized(request), request.scope["path"]
        if connection is not None and proven:
            connection.owner.prove()
        if connection is not None and connection.surplus and path not in ("/health", "/load"):
            full = Overloaded("the server has no place for more connections", "try again in a moment")
            response = self._error(full)
            response.headers["Connection"] = "close"
            return response
        if path == "/health" or proven:
            return None
        hint = "send it as 'Authorization: Bearer TOKEN'; see token_file"
        return error_response(Unauthorized("the fleet token is missing or wrong", hint))

    async def answer(self, endpoint: ServiceCall[PromptBody], request: Request) -> Response:
        """The events of the service."""
        service = self._service
        body = _parsed(endpoint.body, await self._prompt(request))
        beats, retry_after_s = lambda: service.progress.beats, lambda: service.retry_after_s
        return EventStream(partial(endpoint.events, body), self._error, beats, retry_after_s, self._times)

    async def count(self, request: Request) -> Response:
        body = _parsed(CountBody, await self._prompt(request))
        return _json(await unless_disconnected(self._service.count_tokens(body), request.receive, "POST /count"))

    async def lease(self, request: Request) -> Response:
        hint = f"name at most {MAX_LEASES} requests at a time"
        named = _parsed(LeaseBody, await requests.body(request, requests.BodyBounds(), hint))
        return _json(self._service.extend_leases(named.request_ids))

    async def health(self, request: Request) -> Response:
        body = self._service.health()
        whole = structs.replace(body, tokens=self._tokens.digests)
        status = 503 if body.status in ("stalled", "error") else 200
        return _json(whole if self._authorized(request) else Liveness(body.status), status)

    async def load(self, _: Request) -> Response:
        return _json(self._service.load_figures())

    async def status(self, _: Request) -> Response:
        service = self._service
        utilisation = await self._gauge.read(service.info.backend) if service.info else None
        return _json(structs.replace(service.status(utilisation), tokens=self._tokens.digests))

    async def openapi(self, _: Request) -> Response:
        return Response(self._document, media_type=openapi.JSON)

    async def on_error(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, DisaggError)
        if isinstance(error, Cancelled):  # before there was a request, which would log its end itself
            logs.info("upload_cancelled", reason=str(error))
        return self._error(error)

    def _error(self, error: DisaggError) -> Response:
        return error_response(error, retry_after_s=self._service.retry_after_s)

    def _authorized(self, request: Request) -> bool:
        """Whether the request carries a token of the fleet, compared in constant time."""
        return self._tokens.accepts(requests.bearer(request))

    async def _prompt(self, request: Request) -> bytes:
        """A body with a prompt, unless it is too large for the model's context."""
        context = self._service.model.context
        hint = f"shorten the prompt: {context} tokens of context cannot need more"
        return await requests.body(request, requests.body_bounds(context), hint)


def _parsed(kind: type[Received], data: bytes) -> Received:
    """The validated body. Raises a RequestError of one line that names the first bad field."""
    try:
        return kind.from_bytes(data)
    except InvalidValue as error:
        raise RequestError(f"bad request body: {error}", "see docs/http-api.md for the request bodies") from None


def _json(body: Contract, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body.to_bytes(), status, headers, "application/json")


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
