"""The HTTP application of a keeper: what it states of its models, and what it is asked to do with them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

import psutil
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg import logs
from disagg.api import openapi
from disagg.api.base import Contract
from disagg.api.calls import keeper_document
from disagg.api.events import ErrorEvent
from disagg.api.keeper import (
    DeleteBody,
    KeepBody,
    LoadEvent,
    LoadModelBody,
    ModelsAnswer,
    PinBody,
    PullBody,
    PullEvent,
    UnloadBody,
)
from disagg.api.status import DeviceUse, Health, Liveness, Load, Memory, PendingRelease, Status
from disagg.config import served_digest
from disagg.errors import Cancelled, DisaggError
from disagg.http import requests
from disagg.http.server import (
    INTERNAL_ERROR,
    application,
    error_handlers,
    error_response,
    json_response,
    of_the_fleet,
)
from disagg.http.stream import EVENT_STREAM, BodyParts, event_bytes, running, unless_disconnected
from disagg.keeper.keeper import Keeper
from disagg.keeper.processes import added
from disagg.token import Tokens
from disagg.version import RELEASE_VARIABLE, VERSION, code_hash, pending_release

STALL_S = 30.0
Received = TypeVar("Received", bound=Contract)


def build(keeper: Keeper, tokens: Tokens) -> ASGIApp:
    """The ASGI application."""
    host = _Application(keeper, tokens)
    posts = {
        "/models/load": host.load_model,
        "/models/keep": host.keep,
        "/models/unload": host.unload,
        "/models/pin": host.pin,
        "/models/pull": host.pull,
        "/models/delete": host.delete,
    }
    gets = {"/health": host.health, "/load": host.load, "/status": host.status, openapi.PATH: host.openapi}
    routes = [
        *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
        *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
    ]
    return application(routes, error_handlers(host.on_error), host.refusal)


class _Application:
    """What each path answers."""

    def __init__(self, keeper: Keeper, tokens: Tokens) -> None:
        self._keeper, self._tokens = keeper, tokens
        self._boot_id, self._started = secrets.token_hex(8), time.monotonic()
        self._document = json.dumps(keeper_document()).encode()
        self._process = psutil.Process()

    def refusal(self, request: Request) -> Response | None:
        return of_the_fleet(request, self._tokens.accepts, error_response)

    async def health(self, request: Request) -> Response:
        whole = self._health()
        return json_response(whole if self._authorized(request) else Liveness(whole.status))

    async def load(self, _: Request) -> Response:
        keeper = self._keeper
        loads = [kept.child.report.load for kept in keeper.models if kept.child and kept.child.report]
        return json_response(
            Load(
                status="draining" if keeper.stopping else "ok",
                boot_id=self._boot_id,
                queue=sum(one.queue for one in loads),
                running=sum(one.running for one in loads),
                running_limit=max(1, sum(one.running_limit for one in loads)),
                queue_tokens=sum(one.queue_tokens for one in loads),
                kv_bytes=sum(one.kv_bytes for one in loads),
                kv_limit=sum(one.kv_limit for one in loads),
                kv_held_bytes=sum(one.kv_held_bytes for one in loads),
                models=keeper.stated(),
                budget_bytes=keeper.budget,
                used_bytes=keeper.used,
            )
        )

    async def status(self, _: Request) -> Response:
        keeper, memory = self._keeper, psutil.virtual_memory()
        reports = [kept.child.report for kept in keeper.models if kept.child and kept.child.report]
        counters = keeper.gone
        for one in reports:
            counters = added(counters, one.counters)
        return json_response(
            Status(
                **structs.asdict(self._health()),
                queue=sum(one.load.queue for one in reports),
                running=sum(one.load.running for one in reports),
                kv_bytes=sum(one.load.kv_bytes for one in reports),
                kv_held_bytes=sum(one.load.kv_held_bytes for one in reports),
                memory=Memory(memory.total, memory.available, self._process.memory_info().rss),
                device=DeviceUse(None, psutil.cpu_percent()),
                counters=counters,
                models=keeper.stated(),
                budget_bytes=keeper.budget,
                used_bytes=keeper.used,
            )
        )

    async def openapi(self, _: Request) -> Response:
        return Response(self._document, media_type=openapi.JSON)

    async def load_model(self, request: Request) -> Response:
        body = await _received(LoadModelBody, request)
        return _Events(partial(self._keeper.load, body.model, body.keep_alive_s))

    async def keep(self, request: Request) -> Response:
        body = await _received(KeepBody, request)
        self._keeper.keep(body.model, body.keep_alive_s)
        return self._models()

    async def unload(self, request: Request) -> Response:
        body = await _received(UnloadBody, request)
        work = self._keeper.unload(body.model, force=body.force)
        await unless_disconnected(work, request.receive, "POST /models/unload")
        return self._models()

    async def pin(self, request: Request) -> Response:
        body = await _received(PinBody, request)
        self._keeper.pin(body.model, pinned=body.pinned)
        return self._models()

    async def pull(self, request: Request) -> Response:
        body = await _received(PullBody, request)
        return _Events(partial(self._keeper.pull, body.model))

    async def delete(self, request: Request) -> Response:
        body = await _received(DeleteBody, request)
        await unless_disconnected(self._keeper.delete(body.model), request.receive, "POST /models/delete")
        return self._models()

    async def on_error(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, DisaggError)
        return error_response(error)

    def _models(self) -> Response:
        return json_response(ModelsAnswer(self._keeper.stated()))

    def _health(self) -> Health:
        keeper, host = self._keeper, self._keeper.host
        return Health(
            status="draining" if keeper.stopping else "ok",
            model="",
            role="decode" if "decode" in host.roles else "prefill",
            host=host.name,
            loaded=any(kept.state == "ready" for kept in keeper.models),
            simulated=host.simulated,
            version=VERSION,
            code=code_hash(),
            config=served_digest(keeper.fleet, host),
            release=os.environ.get(RELEASE_VARIABLE) or None,
            pending=PendingRelease(*newer) if (newer := pending_release()) else None,
            tokens=self._tokens.digests,
            boot_id=self._boot_id,
            uptime_s=round(time.monotonic() - self._started, 3),
            pid=os.getpid(),
        )

    def _authorized(self, request: Request) -> bool:
        """Whether the request carries a token of the fleet, compared in constant time."""
        return self._tokens.accepts(requests.bearer(request))


class _Events(Response):
    """Streams events. The response starts with the first one, so that an error before it has its own HTTP status; a
    later one is the last event. If the caller disconnects, what it waits for is given up."""

    def __init__(self, events: Callable[[], AsyncGenerator[LoadEvent, None] | AsyncGenerator[PullEvent, None]]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = BodyParts(scope, send, EVENT_STREAM, STALL_S)
        async with running(self._write(parts, scope, receive, send), requests.disconnected(receive)) as (writing, left):
            await asyncio.wait((writing, left), return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not writing.cancelled():
                with suppress(Cancelled):
                    writing.result()

    async def _write(self, parts: BodyParts, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    await parts.part(event_bytes(event.to_bytes(), event.event))
        except Cancelled:
            raise
        except Exception as failure:  # noqa: BLE001 - a bug: the caller gets an error, the log the traceback
            error = failure if isinstance(failure, DisaggError) else INTERNAL_ERROR
            if error is INTERNAL_ERROR:
                logs.log.error("internal_error", exc_info=failure)
            if not parts.started:
                await error_response(error)(scope, receive, send)
                return
            await parts.part(event_bytes(ErrorEvent.of(error).to_bytes(), ErrorEvent.event))
        await parts.end()


async def _received(kind: type[Received], request: Request) -> Received:
    hint = "these bodies name one model"
    return requests.parsed(kind, await requests.body(request, requests.BodyBounds(), hint))
