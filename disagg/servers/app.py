"""The ASGI application around a service: fleet token, bounded bodies, request ids, and every error as JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
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
from disagg.api.requests import MAX_LEASES, LeaseBody, PromptBody
from disagg.api.status import Liveness
from disagg.errors import Cancelled, DisaggError, Overloaded, RequestError, Unauthorized
from disagg.http import requests
from disagg.http.protocol import connection_of
from disagg.http.server import Handler, application
from disagg.http.stream import unless_disconnected
from disagg.servers.host import gpu
from disagg.servers.host.service import AnyService, ServiceCall
from disagg.servers.sse import INTERNAL_ERROR, EventStream
from disagg.token import Tokens

Received = TypeVar("Received", bound=Contract)


def build(service: AnyService, tokens: Tokens) -> ASGIApp:
    """The ASGI application of one server."""
    routes = [
        Route("/health", _health(service, tokens), methods=["GET"]),
        Route("/load", _load(service), methods=["GET"]),
        Route("/status", _status(service, tokens), methods=["GET"]),
        Route("/lease", _lease(service), methods=["POST"]),
        Route("/count", _count(service), methods=["POST"]),
        Route(openapi.PATH, _document(service), methods=["GET"]),
        *(Route(one.path, _post(one, service), methods=["POST"]) for one in service.endpoints()),
    ]
    handlers = {DisaggError: _on_error(service), HTTPException: _on_http_error, Exception: _on_bug}
    return application(routes, handlers, lambda request: _refusal(request, service, tokens))


def _refusal(request: Request, service: AnyService, tokens: Tokens) -> Response | None:
    """What a request without the fleet's token is answered, unless it is for /health; and one on a connection for which
    there was no place, unless it is for health or load."""
    connection, proven = connection_of(request.scope), authorized(request, tokens)
    if connection is not None:
        if proven:
            connection.owner.prove()
        if connection.surplus and request.scope["path"] not in ("/health", "/load"):
            return _no_place(service.retry_after_s)
    if request.scope["path"] == "/health" or proven:
        return None
    hint = "send it as 'Authorization: Bearer TOKEN'; see token_file"
    return error_response(Unauthorized("the fleet token is missing or wrong", hint))


def _no_place(retry_after_s: int) -> Response:
    """503 on a connection that closes after it."""
    full = Overloaded("the server has no place for more connections", "try again in a moment")
    response = error_response(full, retry_after_s=retry_after_s)
    response.headers["Connection"] = "close"
    return response


def authorized(request: Request, tokens: Tokens) -> bool:
    """Whether the request carries a token of the fleet, compared in constant time."""
    return tokens.accepts(requests.bearer(request))


def parse(kind: type[Received], data: bytes) -> Received:
    """The validated body. Raises a RequestError of one line that names the first bad field."""
    try:
        return kind.from_bytes(data)
    except InvalidValue as error:
        raise RequestError(f"bad request body: {error}", "see docs/http-api.md for the request bodies") from None


def error_response(error: DisaggError, status: int | None = None, retry_after_s: int = 1) -> Response:
    """An error as JSON (ErrorAnswer), with its own HTTP status if no other is given. retry_after_s: for Overloaded."""
    event = ErrorEvent.of(error, retry_after_s)
    headers = {"Retry-After": str(event.retry_after_s)} if event.retry_after_s is not None else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _json(ErrorAnswer(event), status or error.http_status, headers)


def _json(body: Contract, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body.to_bytes(), status, headers, "application/json")


def _post(endpoint: ServiceCall[PromptBody], service: AnyService) -> Handler:
    """A POST endpoint that answers with the events of the service. The model's context bounds the body's size."""

    async def post(request: Request) -> Response:
        body = parse(endpoint.body, await _prompt(service, request))
        events, answer_error = partial(endpoint.events, body), partial(_answer_error, service)
        return EventStream(events, answer_error, lambda: service.progress.beats, lambda: service.retry_after_s)

    return post


def _count(service: AnyService) -> Handler:
    async def count(request: Request) -> Response:
        body = parse(PromptBody, await _prompt(service, request))
        return _json(await unless_disconnected(service.count_tokens(body), request.receive, "POST /count"))

    return count


async def _prompt(service: AnyService, request: Request) -> bytes:
    """A body with a prompt, unless it is too large for the model's context."""
    context = service.model.context
    hint = f"shorten the prompt: {context} tokens of context cannot need more"
    return await requests.body(request, requests.body_bounds(context), hint)


def _lease(service: AnyService) -> Handler:
    async def lease(request: Request) -> Response:
        hint = f"name at most {MAX_LEASES} requests at a time"
        named = parse(LeaseBody, await requests.body(request, requests.BodyBounds(), hint))
        return _json(service.extend_leases(named.request_ids))

    return lease


def _health(service: AnyService, tokens: Tokens) -> Handler:
    async def health(request: Request) -> Response:
        body = service.health()
        whole = structs.replace(body, tokens=tokens.digests) if authorized(request, tokens) else Liveness(body.status)
        return _json(whole, _http_status(body))

    return health


def _load(service: AnyService) -> Handler:
    async def load(_: Request) -> Response:
        return _json(service.load_figures())

    return load


def _http_status(body: Liveness) -> int:
    return 503 if body.status in ("stalled", "error") else 200


def _status(service: AnyService, tokens: Tokens) -> Handler:
    gauge = gpu.Gauge()

    async def status(_: Request) -> Response:
        utilisation = await gauge.read(service.info.backend) if service.info else None
        return _json(structs.replace(service.status(utilisation), tokens=tokens.digests))

    return status


def _document(service: AnyService) -> Handler:
    body = json.dumps(server_document(service.role)).encode()

    async def document(_: Request) -> Response:
        return Response(body, media_type=openapi.JSON)

    return document


def _answer_error(service: AnyService, error: DisaggError) -> Response:
    return error_response(error, retry_after_s=service.retry_after_s)


def _on_error(service: AnyService) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def on_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, DisaggError)
        if isinstance(error, Cancelled):  # before there was a request, which would log its end itself
            logs.info("upload_cancelled", reason=str(error))
        return _answer_error(service, error)

    return on_error


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
