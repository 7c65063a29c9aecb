"""The gateway's routes, and what every POST passes through: key, body, model, limits, a place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from disagg.api.requests import MAX_ANSWERS
from disagg.config import Fleet, Model
from disagg.errors import Cancelled, DisaggError, ModelBusy
from disagg.gateway import parallel as several
from disagg.gateway.answer import AcceptedRequest, AnswerResponse, ResponseTimes, json_response, problem_response
from disagg.gateway.clients.access import (
    Access,
    chosen_model,
    kept_alive,
    may_load,
    require_admin,
    require_load,
    require_model,
)
from disagg.gateway.clients.kept import KeptResponses
from disagg.gateway.clients.keys import Key
from disagg.gateway.clients.limits import AnswerPlaces, KeyLimits, share_of
from disagg.gateway.clients.origins import CrossOrigin
from disagg.gateway.dialects import anthropic, managing, ollama
from disagg.gateway.dialects.base import (
    AnswerEvent,
    CountingDialect,
    Dialect,
    GatewayRequest,
    Head,
    Reader,
    read_fields,
)
from disagg.gateway.dialects.chat import ChatCompletions
from disagg.gateway.dialects.completions import Completions
from disagg.gateway.dialects.managing import NamedBody
from disagg.gateway.dialects.problems import Problem, problem_of
from disagg.gateway.dialects.responses import Responses
from disagg.gateway.dialects.tokens import Detokenize, InputTokens, Tokenize
from disagg.gateway.health import GatewayHealth
from disagg.gateway.models import ModelLists
from disagg.gateway.parallel import ItemRun, ParallelResponse
from disagg.gateway.posted import Posted, PostReader
from disagg.gateway.pulling import ProgressResponse, pulled_model, pulling
from disagg.gateway.refusals import HANDLERS, respond
from disagg.gateway.run import counted, run, unless
from disagg.gateway.views import Views
from disagg.gateway.watch.gateway import GatewayWatch
from disagg.gateway.watch.request import Observers
from disagg.http.protocol import connection_of
from disagg.http.server import Handler, application
from disagg.http.stream import unless_disconnected
from disagg.inference.client import AsyncClient
from disagg.inference.keepers import Keepers


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
    lists, kept = ModelLists(client, watch.hosts, time.time()), KeptResponses(keep_responses)
    gateway = Gateway(client, access, watch.observers, AnswerPlaces(answers), times, lists=lists)
    keep = kept.keep if kept else None
    inputs = InputTokens(keep)
    routes = [
        Route("/api/chat", gateway.post(ollama.Chat()), methods=["POST"]),
        Route("/api/generate", gateway.post(ollama.Generate()), methods=["POST"]),
        *gateway.managing(),
        *Views(client, access, serving, watch, lists).routes(),
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
        self,
        client: AsyncClient,
        access: Access,
        observers: Observers,
        places: AnswerPlaces,
        times: ResponseTimes,
        *,
        lists: ModelLists,
    ) -> None:
        self._client, self._observers, self._places, self._times = client, observers, places, times
        self._lists, self._keepers = lists, Keepers(client)
        self._limits = KeyLimits()
        self._reader = PostReader(access, lambda: max(model.context for model in self._fleet.models.values()))

    @property
    def _fleet(self) -> Fleet:
        """As the client has it now."""
        return self._client.fleet

    def post(self, dialect: Dialect, followed: Followed = _alone) -> Handler:
        """The endpoint of one dialect. followed: makes the body whole, if it says less than it means."""

        async def post(posted: Posted) -> Response:
            asked = self._admitted(posted.key, dialect.read(followed(_id(posted.key), self._named(posted.body))))
            head = Head(asked, posted.request_id, posted.created, posted.via, self._fingerprint)
            if not asked.prompts:
                with self._place(posted.key):
                    await unless_disconnected(self._loaded(asked), posted.receive, "the load")
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
            with self._place(posted.key, asked.choices):
                counting = counted(self._client, asked, lists_tokens=dialect.lists_tokens)
                return json_response(dialect.counted(await unless_disconnected(counting, posted.receive, "the count")))

        return self._handler(count, dialect)

    def managing(self) -> list[Route]:
        """The calls of Ollama and LM Studio that are about models themselves."""
        keepers = self._keepers

        async def show(posted: Posted) -> Response:
            return json_response(self._lists.shown(posted.key, read_fields(NamedBody, posted.body, {}).named))

        async def copy(posted: Posted) -> Response:
            managing.refuse_copy(read_fields(managing.CopyBody, posted.body, {}))

        async def pull(posted: Posted) -> Response:
            asked = read_fields(managing.PullBody, posted.body, {})
            require_admin(posted.key, "pull models")
            model = pulled_model(self._fleet, posted.key, asked.named)
            keepers.of(model)  # refused before a stream begins
            return ProgressResponse(pulling(keepers, model), OLLAMA, self._times, stream=asked.stream is not False)

        async def delete(posted: Posted) -> Response:
            asked = read_fields(NamedBody, posted.body, {})
            require_admin(posted.key, "delete models")
            await keepers.delete(require_model(self._fleet, posted.key, asked.named))
            return Response()

        async def load(posted: Posted) -> Response:
            asked = read_fields(managing.LoadBody, posted.body, {})
            model = require_model(self._fleet, posted.key, asked.model)
            managing.require_context(asked, model)
            require_load(posted.key, model, "load")
            with self._place(posted.key):
                seconds = await unless_disconnected(keepers.load(model), posted.receive, "the load")
            return json_response(managing.loaded_in_lm_studio(asked, model, seconds))

        async def unload(posted: Posted) -> Response:
            asked = read_fields(managing.UnloadBody, posted.body, {})
            model = require_model(self._fleet, posted.key, asked.instance_id)
            require_load(posted.key, model, "unload")
            await keepers.unload(model)
            return json_response({"instance_id": model.name})

        return [
            Route("/api/show", self._handler(show, OLLAMA), methods=["POST"]),
            Route("/api/copy", self._handler(copy, OLLAMA), methods=["POST"]),
            Route("/api/pull", self._handler(pull, OLLAMA), methods=["POST"]),
            Route("/api/delete", self._handler(delete, OLLAMA), methods=["DELETE"]),
            Route("/api/v1/models/load", self._handler(load, several.CHAT), methods=["POST"]),
            Route("/api/v1/models/unload", self._handler(unload, several.CHAT), methods=["POST"]),
        ]

    @contextmanager
    def _place(self, key: Key | None, answers: int = 1) -> Iterator[None]:
        """Have the places of so many answers within the block. Raises Overloaded if there are none."""
        self._places.require(key, answers)
        give_back = self._places.take(key, answers)
        try:
            yield
        finally:
            give_back()

    async def _loaded(self, asked: GatewayRequest) -> None:
        """Do what a request without a prompt asks for: load the model, or unload it, as soon as it is idle."""
        model = self._fleet.model(asked.model)
        if asked.keep_alive_s == 0:
            try:
                await self._keepers.unload(model)
            except ModelBusy:
                self._keepers.keep(model, 0)
        else:
            await self._keepers.load(model, asked.keep_alive_s)

    def _named(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body with the fleet's default model, if it names none."""
        default = self._fleet.default_model
        return {**body, "model": default} if default is not None and body.get("model") is None else body

    def _handler(self, answer: Callable[[Posted], Awaitable[Response]], dialect: Reader) -> Handler:
        """dialect: in which a request that does not begin is refused. The observers are told."""

        async def handle(request: Request) -> Response:
            try:
                return await answer(await self._reader.read(request))
            except Cancelled:
                return Response(status_code=Cancelled.http_status)  # nobody reads it
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
        model, warning = chosen_model(self._fleet, key, asked.model)
        if not asked.prompts and asked.keep_alive_s == 0:
            require_load(key, self._fleet.model(model), "unload")
        keep_alive_s, lowered = kept_alive(key, asked.keep_alive_s)
        left_out = (*filter(None, (warning, lowered)), *asked.left_out)
        asked = replace(asked, model=model, left_out=left_out, keep_alive_s=keep_alive_s)
        if not may_load(key) and self._lists.one(key, model).seen.state == "asleep":
            require_load(key, self._fleet.model(model), "load")
        self._places.require(key, asked.choices)
        if key is None:
            return asked
        self._limits.admit(key, asked.choices, time.monotonic())
        return replace(asked, options={**asked.options, "cache_salt": key.id, "share": share_of(key).to_json()})

    def _begin(self, key: Key | None, dialect: Dialect, head: Head) -> AcceptedRequest:
        """Accept a request that has been admitted."""
        model = self._fleet.model(head.model)
        name, key_id = (key.name, key.id) if key else (None, None)

        def charge(tokens: int) -> None:
            if key is not None:
                self._limits.spend(key, tokens, time.monotonic())

        observed = self._observers.accept(head, dialect.name, model.name, name, key_id, charge=charge)
        given_up: asyncio.Future[DisaggError] = asyncio.get_running_loop().create_future()
        give_back = self._places.take(key, head.request.choices, lambda: observed.waiting, given_up.set_result)
        events = unless(given_up, run(self._client, observed))
        if head.request.keep_alive_s is not None:
            events = self._kept(events, model, head.request.keep_alive_s)
        return AcceptedRequest(dialect, observed, events, give_back, dialect.writer(head))

    async def _kept(
        self, events: AsyncGenerator[AnswerEvent, None], model: Model, keep_alive_s: float
    ) -> AsyncGenerator[AnswerEvent, None]:
        """The events. After the last one the model's hosts are told how long it stays."""
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._keepers.keep(model, keep_alive_s)


OLLAMA: Final = ollama.Chat()
"""In whose form errors of Ollama's other calls are written."""


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
