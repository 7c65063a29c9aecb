"""The gateway's routes, and what every request passes through: request id, bounded body, one line of log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive

from disagg.api.requests import MAX_ANSWERS
from disagg.errors import Cancelled, DisaggError, RequestError
from disagg.gateway import hops, models
from disagg.gateway import parallel as body
from disagg.gateway.answer import AcceptedRequest, AnswerResponse, json_response
from disagg.gateway.clients.access import Access, require_model
from disagg.gateway.clients.keys import Key
from disagg.gateway.clients.limits import AnswerPlaces, KeyLimits, share_of
from disagg.gateway.dialects import anthropic, ollama
from disagg.gateway.dialects.base import Dialect, GatewayRequest, Head, read_fields
from disagg.gateway.dialects.chat import ChatCompletions
from disagg.gateway.dialects.completions import Completions
from disagg.gateway.dialects.ollama import error_body as ollama_error
from disagg.gateway.dialects.openai import error_body
from disagg.gateway.dialects.problems import INTERNAL, Problem, not_found, problem_of
from disagg.gateway.dialects.responses import Responses
from disagg.gateway.health import GatewayHealth
from disagg.gateway.parallel import ItemRun, ParallelResponse
from disagg.gateway.run import prompt_tokens, run, unless
from disagg.gateway.views import Views
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.request import Observers
from disagg.http import requests
from disagg.http.protocol import connection_of
from disagg.http.server import Handler, application
from disagg.http.stream import unless_disconnected
from disagg.inference.client import AsyncClient

log = logging.getLogger("disagg.gateway")


def build(client: AsyncClient, access: Access, serving: GatewayHealth, watch: GatewayWatch | None = None) -> ASGIApp:
    """The ASGI application of the gateway. The caller closes the client. watch: its observers; without, there is no
    history."""
    watch = watch or GatewayWatch(client)
    gateway = Gateway(client, access, watch.observers)
    started = time.time()
    routes = [
        Route("/api/chat", gateway.post(ollama.Chat()), methods=["POST"]),
        Route("/api/generate", gateway.post(ollama.Generate()), methods=["POST"]),
        Route("/api/show", gateway.about(started), methods=["POST"]),
        *Views(client, access, serving, watch, started).routes(),
    ]
    for prefix in ("/v1", ""):
        routes += [
            Route(f"{prefix}/chat/completions", gateway.post(ChatCompletions()), methods=["POST"]),
            Route(f"{prefix}/completions", gateway.post(Completions()), methods=["POST"]),
            Route(f"{prefix}/parallel", gateway.parallel(), methods=["POST"]),
            Route(f"{prefix}/responses", gateway.post(Responses()), methods=["POST"]),
            Route(f"{prefix}/messages", gateway.post(anthropic.Messages()), methods=["POST"]),
            Route(f"{prefix}/messages/count_tokens", gateway.count(anthropic.CountTokens()), methods=["POST"]),
        ]
    watch.board.serves(route.path for route in routes)
    handlers = {DisaggError: _on_error, HTTPException: _on_http_error, Exception: _on_bug}
    return application(routes, handlers, _refusal, echo=True)


class Gateway:
    """Answers requests in every dialect with one client."""

    def __init__(self, client: AsyncClient, access: Access, observers: Observers) -> None:
        self._client = client
        self._access = access
        self._observers = observers
        self._limits = KeyLimits()
        self._name = hops.new_name()
        self._places = AnswerPlaces(MAX_ANSWERS)  # of answers, and of counts
        self._body_bounds = requests.body_bounds(max(model.context for model in client.fleet.models.values()))

    def post(self, dialect: Dialect) -> Handler:
        """The endpoint of one dialect."""

        async def post(request: Request) -> Response:
            arrived = time.time()
            try:
                key = self._access.key(request)
                via = hops.passed_on(request.headers.getlist("via"), self._name)
                asked = self._admitted(key, dialect.read(await self._body(request)))
            except DisaggError as error:
                return self._refused(error, dialect.error)
            head = Head(asked, request.scope[requests.REQUEST_ID_KEY], arrived, via)
            return AnswerResponse(self._begin(key, dialect, head)) if asked.prompts else _unasked(dialect, head)

        return post

    def parallel(self) -> Handler:
        """POST /v1/parallel: each item as if it had been sent alone."""

        async def parallel(request: Request) -> Response:
            arrived = time.time()
            try:
                key = self._access.key(request)
                via = hops.passed_on(request.headers.getlist("via"), self._name)
                asked = body.read(await self._body(request))
            except DisaggError as error:
                return self._refused(error, error_body)
            request_id = request.scope[requests.REQUEST_ID_KEY]
            parts = [ItemRun(item, self._item(key, item, request_id, arrived, via)) for item in asked.items]
            return ParallelResponse(parts, request_id, arrived, stream=asked.stream)

        return parallel

    def _item(
        self, key: Key | None, item: body.RequestedItem, request_id: str, arrived: float, via: str
    ) -> AcceptedRequest | Problem:
        """The request of an item, which begins now; or why it does not."""
        try:
            if isinstance(item.request, DisaggError):
                raise item.request
            head = Head(self._admitted(key, item.request), body.item_id(request_id, item.index), arrived, via)
        except DisaggError as error:
            problem = problem_of(error)
            self._observers.refuse(problem)
            return problem
        return self._begin(key, item.dialect, head)

    def _begin(self, key: Key | None, dialect: Dialect, head: Head) -> AcceptedRequest:
        """Accept a request that has been admitted."""
        model = self._client.fleet.model(head.model).name
        name, key_id = (key.name, key.id) if key else (None, None)

        def charge(tokens: int) -> None:
            if key is not None:
                self._limits.spend(key, tokens, time.monotonic())

        observed = self._observers.accept(head, dialect.name, model, name, key_id, charge=charge)
        given_up: asyncio.Future[DisaggError] = asyncio.get_running_loop().create_future()
        give_back = self._places.take(key, head.request.choices, lambda: observed.waiting, given_up.set_result)
        events = unless(given_up, run(self._client, observed))
        return AcceptedRequest(dialect, observed, events, give_back, dialect.writer(head))

    def count(self, dialect: Dialect) -> Handler:
        """The endpoint that counts the tokens of a prompt, which the dialect reads."""

        async def count(request: Request) -> Response:
            try:
                key = self._access.key(request)
                asked = self._admitted(key, dialect.read(await self._body(request)))
                return await self._counted(key, asked, request.receive)
            except DisaggError as error:
                return self._refused(error, dialect.error)

        return count

    def about(self, created: float) -> Handler:
        """Ollama's POST /api/show. created: when the gateway started, in seconds since 1970."""

        async def about(request: Request) -> Response:
            try:
                key = self._access.key(request)
                asked = read_fields(ollama.ShowBody, await self._body(request), {})
                return json_response(models.shown(self._client.fleet, key, asked.named, created))
            except DisaggError as error:
                return self._refused(error, ollama_error)

        return about

    async def _counted(self, key: Key | None, asked: GatewayRequest, receive: Receive) -> Response:
        """The tokens of a prompt. It takes the place of an answer, and ends when its caller disconnects."""
        give_back = self._places.take(key, asked.choices)
        try:
            counted = await unless_disconnected(prompt_tokens(self._client, asked), receive, "the count")
            return json_response({"input_tokens": counted})
        except Cancelled:
            return Response(status_code=Cancelled.http_status)  # nobody reads it
        finally:
            give_back()

    def _refused(self, error: DisaggError, written: Callable[[Problem], Mapping[str, Any]]) -> Response:
        """The answer to a request that does not begin. The observers are notified."""
        problem = problem_of(error)
        self._observers.refuse(problem)
        return json_response(written(problem), problem.status, problem.headers)

    def _admitted(self, key: Key | None, asked: GatewayRequest) -> GatewayRequest:
        """The request, if this key may make it now. Clients with different keys share no held KV: whether a prompt is
        answered early would tell one what the other has asked."""
        require_model(self._client.fleet, key, asked.model)
        self._places.require(key, asked.choices)
        if key is None:
            return asked
        self._limits.admit(key, asked.choices, time.monotonic())
        return replace(asked, options={**asked.options, "cache_salt": key.id, "share": share_of(key).to_json()})

    async def _body(self, request: Request) -> Mapping[str, Any]:
        """The body, which must be a JSON object. Raises RequestError and BodyTooLarge."""
        data = await requests.body(request, self._body_bounds, "shorten the prompt")
        try:
            body = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the request body is not JSON: {_not_json(data, error)}") from None
        if not isinstance(body, dict):
            raise RequestError("the request body is not a JSON object")
        return body


def _unasked(dialect: Dialect, head: Head) -> Response:
    """The answer to a request that asks for none, as Ollama's do that load a model."""
    writer = dialect.writer(head)
    if head.request.stream:
        return Response(dialect.framing.join(writer.end(())), media_type=dialect.framing.media_type)
    return json_response(writer.whole(()))


_NO_PLACE: Final = Problem(
    503,
    "server_error",
    "too_many_connections",
    "the gateway has no place for more connections: try again in a moment",
    headers={"Retry-After": "1", "Connection": "close"},
)


def _refusal(request: Request) -> Response | None:
    """What is answered on a connection for which there was no place, unless it is /health."""
    connection = connection_of(request.scope)
    full = connection is not None and connection.surplus and request.scope["path"] != "/health"
    return respond(_NO_PLACE) if full else None


def respond(problem: Problem) -> Response:
    """A problem as OpenAI's clients read it."""
    return json_response(error_body(problem), problem.status, problem.headers)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, DisaggError)
    return respond(problem_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return respond(not_found(request.scope["path"]))
    allowed = (error.headers or {}).get("Allow", "")
    message = f"{request.method} {request.scope['path']} is not served" + (f": use {allowed}" if allowed else "")
    return respond(Problem(error.status_code, "invalid_request_error", None, message, headers=error.headers or {}))


async def _on_bug(_: Request, error: Exception) -> Response:
    log.error("internal_error", exc_info=error)
    return respond(INTERNAL)


def _not_json(data: bytes, error: Exception) -> str:
    """What is wrong with a body, where msgspec's own text would mislead."""
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return f"byte {wrong.start} is not UTF-8"
    cut = "truncated" in str(error) and data.rstrip().endswith(b"}")
    return "a \\u escape in it is no character" if cut else str(error)
