"""Requests to keepers, each of which has the models of one host: loads and unloads, files, and what it has."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec

from disagg.api.base import Contract
from disagg.api.event_stream import EventReader
from disagg.api.events import ERROR, ErrorEvent
from disagg.api.keeper import (
    DeleteBody,
    KeepBody,
    KeptModel,
    LoadEvent,
    LoadModelBody,
    ModelsAnswer,
    PinBody,
    PullBody,
    PullEvent,
    UnloadBody,
)
from disagg.api.status import Load
from disagg.config import Host
from disagg.errors import DisaggError, ProtocolError, ServerUnavailable
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections, HostRequest
from disagg.inference.policy import DEFAULT_POLICY, Timeouts

CHANGE_S: Final = 60.0
"""How long each step of an answer to a change of a model may take: the keeper waits until its process has ended."""

E = TypeVar("E", LoadEvent, PullEvent)


async def models(http: Connections, keeper: Host, *, timeout: float = CHANGE_S) -> tuple[KeptModel, ...]:
    """What the keeper states of its models. Raises the keeper's own error, or ServerUnavailable."""
    return Load.received(await host_calls.get(http, keeper, "/load", timeout=timeout), keeper.name).models


async def load(
    http: Connections,
    keeper: Host,
    model: str,
    keep_alive_s: float | None = None,
    timeouts: Timeouts = DEFAULT_POLICY.timeouts,
) -> AsyncGenerator[LoadEvent]:
    """Load a model; what the keeper states of it, until the model is ready. Closing the generator gives the place in
    the keeper's queue up. Raises the keeper's own error, ServerSilent if it states nothing for too long, and
    ServerUnavailable."""
    request = HostRequest(keeper, "POST", "/models/load", LoadModelBody(model, keep_alive_s).to_bytes())
    async with aclosing(_stated(http, request, LoadEvent, timeouts)) as events:
        async for event in events:
            yield event
            if event.state == "ready":
                return
    raise _cut_off(keeper)


async def pull(
    http: Connections, keeper: Host, model: str, timeouts: Timeouts = DEFAULT_POLICY.timeouts
) -> AsyncGenerator[PullEvent]:
    """Fetch a model's files to the keeper's host. Closing the generator ends the fetch. Raises as `load` does."""
    request = HostRequest(keeper, "POST", "/models/pull", PullBody(model).to_bytes())
    async with aclosing(_stated(http, request, PullEvent, timeouts)) as events:
        async for event in events:
            yield event


async def unload(http: Connections, keeper: Host, model: str, *, force: bool = False) -> tuple[KeptModel, ...]:
    """Unload a model; what its keeper states of all afterwards. Overloaded if requests use it, without `force`."""
    return await _change(http, keeper, "/models/unload", UnloadBody(model, force))


async def pin(http: Connections, keeper: Host, model: str, *, pinned: bool) -> tuple[KeptModel, ...]:
    """Pin a model, or no longer; what its keeper states of all afterwards."""
    return await _change(http, keeper, "/models/pin", PinBody(model, pinned))


async def keep(http: Connections, keeper: Host, model: str, keep_alive_s: float) -> tuple[KeptModel, ...]:
    """Set how long a loaded model stays after its last request; what its keeper states of all afterwards."""
    return await _change(http, keeper, "/models/keep", KeepBody(model, keep_alive_s))


async def delete(http: Connections, keeper: Host, model: str) -> tuple[KeptModel, ...]:
    """Remove a model's files from the keeper's host; what it states of all models afterwards."""
    return await _change(http, keeper, "/models/delete", DeleteBody(model))


async def _change(http: Connections, keeper: Host, path: str, body: Contract) -> tuple[KeptModel, ...]:
    answer = await host_calls.post(http, keeper, path, body, timeout=CHANGE_S)
    return ModelsAnswer.received(answer, keeper.name).models


async def _stated(http: Connections, request: HostRequest, kind: type[E], timeouts: Timeouts) -> AsyncGenerator[E]:
    """The events of this kind that a keeper answers with, each as it arrives."""
    keeper = request.host
    reader = EventReader()
    arrived: list[tuple[str, bytes]] = []

    def read(piece: bytes) -> bool:
        arrived.extend(reader.feed(piece))
        if reader.unread > host_calls.MAX_EVENT_BYTES:
            raise ProtocolError(f"{keeper.name} sent an event of over {host_calls.MAX_EVENT_BYTES} bytes")
        return bool(arrived)

    with host_calls.failures(keeper):
        exchange = await http.send(request, timeouts.connect)
    try:
        with host_calls.failures(keeper):
            head = await http.head(exchange, timeouts.silence, timeouts.connect)
            if head.status != HTTPStatus.OK:
                content = await exchange.content(host_calls.MAX_EVENT_BYTES, timeouts.silence)
                host_calls.raise_for(head, content, keeper)
        more = True
        while more:
            with host_calls.failures(keeper):
                more = await exchange.connection.follow(read, time.monotonic() + timeouts.silence)
            taken, arrived[:] = list(arrived), []
            for name, data in taken:
                with host_calls.failures(keeper):
                    if name == ERROR:
                        raise DisaggError.from_json(msgspec.json.decode(data, type=ErrorEvent).to_json())
                    event = msgspec.json.decode(data, type=kind) if name == kind.event else None
                if event is not None:
                    yield event
    finally:
        http.release(exchange)


def _cut_off(keeper: Host) -> ServerUnavailable:
    return ServerUnavailable(f"{keeper.name} closed the stream before the model was loaded", "see its log")
