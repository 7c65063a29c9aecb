"""The gateway's routes, and what every POST passes through: key, body, model, limits, a place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from disagg.api.requests import MAX_ANSWERS
from disagg.errors import Cancelled, DisaggError
from disagg.gateway import models
from disagg.gateway import parallel as several
from disagg.gateway.answer import AcceptedRequest, AnswerResponse, ResponseTimes, json_response, problem_response
from disagg.gateway.clients.access import Access, chosen_model, kept_alive
from disagg.gateway.clients.kept import KeptResponses
from disagg.gateway.clients.keys import Key
from disagg.gateway.clients.limits import AnswerPlaces, KeyLimits, share_of
from disagg.gateway.clients.origins import CrossOrigin
from disagg.gateway.dialects import anthropic, managing, ollama
from disagg.gateway.dialects.base import CountingDialect, Dialect, GatewayRequest, Head, Reader, read_fields
from disagg.gateway.dialects.chat import ChatCompletions
from disagg.gateway.dialects.completions import Completions
from disagg.gateway.dialects.problems import Problem, problem_of
from disagg.gateway.dialects.responses import Responses
from disagg.gateway.dialects.tokens import Detokenize, InputTokens, Tokenize
from disagg.gateway.health import GatewayHealth
from disagg.gateway.parallel import ItemRun, ParallelResponse
from disagg.gateway.posted import Posted, PostReader
from disagg.gateway.refusals import HANDLERS, respond
from disagg.gateway.run import counted, run, unless
from disagg.gateway.views import Views
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.request import Observers
from disagg.http.protocol import connection_of
from disagg.http.server import Handler, application
from disagg.http.stream import unless_disconnected
from disagg.inference.client import AsyncClient


def build(
    client: AsyncClient,
    access: Access,
    serving: GatewayHealth,
    watch: GatewayWatch | None = None,
    *,
    answers: int = MAX_ANSWERS,
    times: ResponseTimes = ResponseTimes(),  # noqa: B008 - frozen
    keep_responses: int = 0,
) -> ASGIApp:
    """The ASGI application of the gateway. The caller closes the client. watch: its observers; without, there is no
    history. answers: that it computes at a time, and counts. keep_responses: see GatewaySettings."""
    watch = watch or GatewayWatch(client)
    gateway = Gateway(client, access, watch.observers, AnswerPlaces(answers), times)
    started, kept = time.time(), KeptResponses(keep_responses)
    keep = kept.keep if kept else None
    inputs = InputTokens(keep)
    routes = [
        Route("/api/chat", gateway.post(ollama.Chat()), methods=["POST"]),
        Route("/api/generate", gateway.post(ollama.Generate()), methods=["POST"]),
        Route("/api/show", gateway.about(started), methods=["POST"]),
        Route("/api/copy", gateway.copy(), methods=["POST"]),
        *Views(client.fleet, access, serving, watch, started).routes(),
    ]
    for prefix in ("/v1", ""):
        routes += [
            Route(f"{prefix}/chat/completions", gateway.post(ChatCompletions()), methods=["POST"]),
            Route(f"{prefix}/completions", gateway.post(Completions()), methods=["POST"]),
            Route(f"{prefix}/parallel", gateway.parallel(), methods=["POST"]),
            Route(f"{prefix}/responses", gateway.post(Responses(keep), kept.followed), methods=["POST"]),
            Route(f"{prefix}/responses/input_tokens", gateway.count(inputs, kept.followed), methods=["POST"]),
            Route(f"{prefix}/tokenize", gateway.count(Tokenize()), methods=["POST"]),
            Route(f"{prefix}/detokenize", gateway.count(Detokenize()), methods=["POST"]),
            Route(f"{prefix}/messages", gateway.post(anthropic.Messages()), methods=["POST"]),
            Route(f"{prefix}/messages/count_tokens", gateway.count(anthropic.CountTokens()), methods=["POST"]),
        ]
    watch.board.serves(route.path for route in routes)
    app = application(routes, HANDLERS, _refusal, echo=True)
    return CrossOrigin(app, access.origins) if access.origins else app


Followed = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""The body of a request that may follow another one of the key with this id, as if it stood alone."""


def _alone(_: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    return body


def _id(key: Key | None) -> str:
    return key.id if key is not None else ""


class Gateway:
    """Answers requests in every dialect with one client. places: of answers, and of counts."""

    def __init__(
        self, client: AsyncClient, access: Access, observers: Observers, places: AnswerPlaces, times: ResponseTimes
    ) -> None:
        self._client, self._observers, self._places, self._times = client, observers, places, times
        self._limits = KeyLimits()
        self._reader = PostReader(access, max(model.context for model in client.fleet.models.values()))

    def post(self, dialect: Dialect, followed: Followed = _alone) -> Handler:
        """The endpoint of one dialect. followed: makes the body whole, if it says less than it means."""

        async def post(posted: Posted) -> Response:
            asked = self._admitted(posted.key, dialect.read(followed(_id(posted.key), self._named(posted.body))))
            head = Head(asked, posted.request_id, posted.created, posted.via, self._fingerprint)
            if not asked.prompts:
                return _unasked(dialect, head)
            return AnswerResponse(self._begin(posted.key, dialect, head), self._times)

        return self._handler(post, dialect)

    def parallel(self) -> Handler:
        """POST /v1/parallel: each item as if it had been sent alone."""

        async def parallel(posted: Posted) -> Response:
            items, stream = several.read(posted.body, self._named)
            parts = [ItemRun(item, self._item(posted, item)) for item in items]
            return ParallelResponse(parts, posted.request_id, posted.created, self._times, stream=stream)

        return self._handler(parallel, several.CHAT)

    def count(self, dialect: CountingDialect, followed: Followed = _alone) -> Handler:
        """The endpoint that counts the tokens of a prompt, which the dialect reads. The count takes the place of an
        answer, and ends when its caller disconnects."""

        async def count(posted: Posted) -> Response:
            asked = self._admitted(posted.key, dialect.read(followed(_id(posted.key), self._named(posted.body))))
            give_back = self._places.take(posted.key, asked.choices)
            try:
                counting = counted(self._client, asked, lists_tokens=dialect.lists_tokens)
                return json_response(dialect.counted(await unless_disconnected(counting, posted.receive, "the count")))
            except Cancelled:
                return Response(status_code=Cancelled.http_status)  # nobody reads it
            finally:
                give_back()

        return self._handler(count, dialect)

    def about(self, created: float) -> Handler:
        """Ollama's POST /api/show. created: when the gateway started, in seconds since 1970."""

        async def about(posted: Posted) -> Response:
            asked = read_fields(ollama.ShowBody, posted.body, {})
            return json_response(models.shown(self._client.fleet, posted.key, asked.named, created))

        return self._handler(about, ollama.Chat())

    def copy(self) -> Handler:
        """Ollama's POST /api/copy, which is refused."""

        async def copy(posted: Posted) -> Response:
            managing.refuse_copy(read_fields(managing.CopyBody, posted.body, {}))

        return self._handler(copy, ollama.Chat())

    def _named(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body with the fleet's default model, if it names none."""
        default = self._client.fleet.default_model
        return {**body, "model": default} if default is not None and body.get("model") is None else body

    def _handler(self, answer: Callable[[Posted], Awaitable[Response]], dialect: Reader) -> Handler:
        """dialect: in which a request that does not begin is refused. The observers are told."""

        async def handle(request: Request) -> Response:
            try:
                return await answer(await self._reader.read(request))
            except DisaggError as error:
                return problem_response(dialect, self._refused(error))

        return handle

    def _item(self, posted: Posted, item: several.RequestedItem) -> AcceptedRequest | Problem:
        """The request of an item, which begins now; or why it does not."""
        try:
            if isinstance(item.request, DisaggError):
                raise item.request
            asked = self._admitted(posted.key, item.request)
        except DisaggError as error:
            return self._refused(error)
        request_id = several.item_id(posted.request_id, item.index)
        head = Head(asked, request_id, posted.created, posted.via, self._fingerprint)
        return self._begin(posted.key, item.dialect, head)

    def _fingerprint(self, host: str) -> str:
        load = self._client.view.of(host).load
        return load.fingerprint if load is not None else ""

    def _refused(self, error: DisaggError) -> Problem:
        problem = problem_of(error)
        self._observers.refuse(problem)
        return problem

    def _admitted(self, key: Key | None, asked: GatewayRequest) -> GatewayRequest:
        """The request, if this key may make it now. Clients with different keys share no held KV: whether a prompt is
        answered early would tell one what the other has asked."""
        model, warning = chosen_model(self._client.fleet, key, asked.model)
        keep_alive_s, lowered = kept_alive(key, asked.keep_alive_s)
        left_out = (*filter(None, (warning, lowered)), *asked.left_out)
        asked = replace(asked, model=model, left_out=left_out, keep_alive_s=keep_alive_s)
        self._places.require(key, asked.choices)
        if key is None:
            return asked
        self._limits.admit(key, asked.choices, time.monotonic())
        return replace(asked, options={**asked.options, "cache_salt": key.id, "share": share_of(key).to_json()})

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
    return respond(request, _NO_PLACE) if full else None
