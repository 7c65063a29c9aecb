"""What people and programs look at: every GET, and the dashboard's page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disagg.api import openapi
from disagg.api.base import InvalidValue
from disagg.api.gateway import HistoryAnswer, HistoryEntry, HistoryQuery
from disagg.config import Fleet
from disagg.errors import Overloaded, RequestError
from disagg.gateway import dashboard as files
from disagg.gateway.answer import json_response
from disagg.gateway.clients.access import Access, may_use, require_model
from disagg.gateway.clients.keys import Key
from disagg.gateway.document import gateway_document
from disagg.gateway.health import GatewayHealth
from disagg.gateway.models import ModelLists, version
from disagg.gateway.refusals import of_anthropic
from disagg.gateway.watch.entry import without_texts
from disagg.gateway.watch.gateway import METRICS_TYPE, GatewayWatch
from disagg.gateway.watch.history import Filter, history_path, read
from disagg.http.server import Handler
from disagg.inference.client import AsyncClient

MAX_ANSWER: Final = 8 << 20  # bytes of entries in one answer to GET /api/history
READERS: Final = 2  # threads that read the history
MAX_READING: Final = 32  # callers that wait for them, or are served


class Views:
    """The handlers of every GET. A key sees the models that it is for, with its own requests; with `monitor`, with
    all."""

    def __init__(
        self, client: AsyncClient, access: Access, serving: GatewayHealth, watch: GatewayWatch, lists: ModelLists
    ) -> None:
        self._client, self._access = client, access
        self._serving, self._watch, self._lists = serving, watch, lists
        self._readers = ThreadPoolExecutor(READERS, "history")
        self._reading = 0
        self._documents = {keyless: json_response(gateway_document(keyless=keyless)) for keyless in (True, False)}

    @property
    def _fleet(self) -> Fleet:
        return self._client.fleet

    def routes(self) -> list[Route]:
        """The routes."""
        lists, key = self._lists, self._access.key

        def listed(request: Request) -> Mapping[str, Any]:
            return (lists.of_anthropic if of_anthropic(request) else lists.of_openai)(key(request))

        def one(request: Request) -> Mapping[str, Any]:
            form = lists.one_of_anthropic if of_anthropic(request) else lists.one_of_openai
            return form(key(request), request.path_params["model"])

        handlers = {
            "/health": self._health,
            openapi.PATH: self._openapi,
            "/metrics": self._metrics,
            "/v1/models": _json(listed),
            "/v1/models/{model:path}": _json(one),
            "/models": _json(listed),
            "/models/{model:path}": _json(one),
            "/api/tags": _json(lambda request: lists.tags(key(request))),
            "/api/ps": _json(lambda request: lists.running(key(request))),
            "/api/version": _json(lambda _: version()),
            "/api/v1/models": _json(lambda request: lists.of_lm_studio(key(request))),
            "/api/live": self._live,
            "/api/history": self._history,
        }
        return [*(Route(path, handler, methods=["GET"]) for path, handler in handlers.items()), *files.routes()]

    async def _health(self, request: Request) -> Response:
        body = self._serving.answer(request)
        return json_response(body.to_json(), 200 if body.status == "ok" else 503)

    async def _openapi(self, _: Request) -> Response:
        return self._documents[self._access.keyless]

    async def _metrics(self, request: Request) -> Response:
        key = self._access.key(request)
        return Response(self._watch.metrics(of_keys=key is None or key.monitor), media_type=METRICS_TYPE)

    async def _live(self, request: Request) -> Response:
        key = self._access.key(request)
        visible = _visible(self._fleet, key)
        seen = None if len(visible) == len(self._fleet.models) else frozenset(visible)
        still = partial(self._access.still, request, key)
        return self._watch.feed.watch(seen, key.id if key else None, still, own=key is not None and not key.monitor)

    async def _history(self, request: Request) -> Response:
        key = self._access.key(request)
        wanted = _filter(self._fleet, key, request.query_params)
        recorder = self._watch.recorder
        path = recorder.path if recorder else history_path(self._fleet)
        stopped = recorder.stopped if recorder else "this gateway keeps no history"
        page = await self._read(partial(_page, path, wanted, key, stopped))
        return Response(page, media_type="application/json")

    async def _read(self, page: Callable[[], bytes]) -> bytes:
        """Read the history on one of its own threads. The default ones are left to what requests need them for: names
        of hosts are looked up there. A caller that leaves while it waits gives up its place."""
        if self._reading >= MAX_READING:
            raise Overloaded(f"{self._reading} callers read the history", "try again in a moment")
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, page)
        finally:
            self._reading -= 1


def _json(body: Callable[[Request], Mapping[str, Any]]) -> Handler:
    async def answer(request: Request) -> Response:
        return json_response(body(request))

    return answer


def _page(path: Path, wanted: Filter, key: Key | None, stopped: str | None) -> bytes:
    """The body of an answer to GET /api/history. A caller sees the texts of its own key's requests
    only, also one that sees the requests of all."""
    own = (key.name, key.id) if key else (None, None)

    def shown(entry: HistoryEntry) -> HistoryEntry:
        return entry if (entry.key, entry.key_id) == own else without_texts(entry)

    return HistoryAnswer(read(path, wanted, shown, MAX_ANSWER), stopped).to_bytes()


def _visible(fleet: Fleet, key: Key | None) -> tuple[str, ...]:
    return tuple(model.name for model in fleet.models.values() if may_use(key, model))


def _filter(fleet: Fleet, key: Key | None, query: Mapping[str, str]) -> Filter:
    """The filter of GET /api/history. Raises RequestError, UnknownModel and ModelNotAllowed."""
    try:
        asked = HistoryQuery.from_query(query)
    except InvalidValue as error:
        raise RequestError(str(error)) from None
    models = _visible(fleet, key) if asked.model is None else (require_model(fleet, key, asked.model).name,)
    own = None if key is None or key.monitor else key.id
    return Filter(models, asked.state, asked.since, asked.before, asked.limit, own)
