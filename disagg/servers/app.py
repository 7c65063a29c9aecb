"""The ASGI application around a service: fleet token, bounded bodies, request ids, and every error as JSON."""

from __future__ import annotations

import json
from functools import partial
from typing import TypeVar

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from disagg import logs
from disagg.api import openapi
from disagg.api.base import Contract
from disagg.api.calls import server_document
from disagg.api.requests import MAX_LEASES, CountBody, LeaseBody, PromptBody
from disagg.api.status import Liveness
from disagg.errors import Cancelled, DisaggError
from disagg.http import requests
from disagg.http.server import application, error_handlers, error_response, json_response, of_the_fleet
from disagg.http.stream import unless_disconnected
from disagg.servers.host import gpu
from disagg.servers.host.service import AnyService, ServiceCall
from disagg.servers.sse import TIMES, EventStream, StreamTimes
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
    return application(routes, error_handlers(host.on_error), host.refusal)


class _Application:
    """What each path answers."""

    def __init__(self, service: AnyService, tokens: Tokens, times: StreamTimes) -> None:
        self._service, self._tokens, self._times = service, tokens, times
        self._gauge = gpu.Gauge()
        self._document = json.dumps(server_document(service.role)).encode()

    def refusal(self, request: Request) -> Response | None:
        return of_the_fleet(request, self._tokens.accepts, self._error)

    async def answer(self, endpoint: ServiceCall[PromptBody], request: Request) -> Response:
        """The events of the service."""
        service = self._service
        body = requests.parsed(endpoint.body, await self._prompt(request))
        beats, retry_after_s = lambda: service.progress.beats, lambda: service.retry_after_s
        return EventStream(partial(endpoint.events, body), self._error, beats, retry_after_s, self._times)

    async def count(self, request: Request) -> Response:
        body = requests.parsed(CountBody, await self._prompt(request))
        return json_response(
            await unless_disconnected(self._service.count_tokens(body), request.receive, "POST /count")
        )

    async def lease(self, request: Request) -> Response:
        hint = f"name at most {MAX_LEASES} requests at a time"
        named = requests.parsed(LeaseBody, await requests.body(request, requests.BodyBounds(), hint))
        return json_response(self._service.extend_leases(named.request_ids))

    async def health(self, request: Request) -> Response:
        body = self._service.health()
        whole = structs.replace(body, tokens=self._tokens.digests)
        status = 503 if body.status in ("stalled", "error") else 200
        return json_response(whole if self._authorized(request) else Liveness(body.status), status)

    async def load(self, _: Request) -> Response:
        return json_response(self._service.load_figures())

    async def status(self, _: Request) -> Response:
        service = self._service
        utilisation = await self._gauge.read(service.info.backend) if service.info else None
        return json_response(structs.replace(service.status(utilisation), tokens=self._tokens.digests))

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
