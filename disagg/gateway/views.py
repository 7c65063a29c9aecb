"""What people and programs look at: GET /api/live, GET /api/history, and the dashboard's page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disagg.api.base import InvalidValue
from disagg.api.gateway.history import HistoryAnswer, HistoryEntry, HistoryQuery
from disagg.config import Fleet
from disagg.errors import RequestError
from disagg.gateway.clients.access import Access, may_use, require_model
from disagg.gateway.clients.keys import Key
from disagg.gateway.dashboard import files
from disagg.gateway.history.entry import without_texts
from disagg.gateway.history.store import Filter, history_path, read
from disagg.gateway.watch import GatewayWatch

MAX_ANSWER: Final = 8 << 20  # bytes of entries in one answer to GET /api/history


def routes(fleet: Fleet, access: Access, watch: GatewayWatch) -> list[Route]:
    """The routes. A key sees the models that it is for, with all their requests."""

    async def live(request: Request) -> Response:
        key = access.key(request)
        visible = _visible(fleet, key)
        seen = None if len(visible) == len(fleet.models) else frozenset(visible)
        return watch.feed.watch(seen, key.id if key else None, lambda: access.still(request, key))

    async def history(request: Request) -> Response:
        key = access.key(request)
        wanted = _filter(fleet, key, request.query_params)
        path = watch.recorder.path if watch.recorder else history_path(fleet)
        stopped = watch.recorder.stopped if watch.recorder else "this gateway keeps no history"
        return Response(await asyncio.to_thread(_page, path, wanted, key, stopped), media_type="application/json")

    return [
        Route("/api/live", live, methods=["GET"]),
        Route("/api/history", history, methods=["GET"]),
        *files.routes(),
    ]


def _page(path: Path, wanted: Filter, key: Key | None, stopped: str | None) -> bytes:
    """The body of an answer to GET /api/history. A caller sees the texts of its own key's requests."""
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
    return Filter(models, asked.state, asked.since, asked.before, asked.limit)
