"""Models that are pulled and deleted, in the form of Ollama's API: the stream of a pull, and what cannot be pulled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.api.keeper import PullEvent
from disagg.config import Fleet, Host, Model
from disagg.errors import DisaggError, UnknownModel
from disagg.gateway.answer import STOPPED, Exchange, ResponseTimes, json_response, problem_response
from disagg.gateway.clients.access import require_model
from disagg.gateway.clients.keys import Key
from disagg.gateway.dialects.base import JSON_LINES, Reader, Written
from disagg.gateway.dialects.problems import problem_of
from disagg.inference.keepers import Keepers


async def pulling(keepers: Keepers, model: Model) -> AsyncGenerator[Written]:
    """The objects of Ollama's progress stream, while a model's files are fetched to its hosts."""
    yield {"status": "pulling manifest"}
    async with aclosing(keepers.pull(model)) as events:
        async for host, event in events:
            yield progress(host, event)
    yield {"status": "success"}


def progress(host: Host, event: PullEvent) -> Written:
    """One object of Ollama's progress stream. Its clients draw a line for each digest, so that those of two hosts must
    differ."""
    said = {"status": f"{host.table}: {event.status}"}
    if not event.total:
        return said
    digest = hashlib.sha256(f"{host.table}/{event.digest}".encode()).hexdigest()
    return {**said, "digest": f"sha256:{digest}", "total": event.total, "completed": event.completed}


def pulled_model(fleet: Fleet, key: Key | None, name: str) -> Model:
    """The model of this name or alias. Raises ModelNotAllowed, and UnknownModel with the lines to add for one that
    hosts.toml does not name."""
    try:
        return require_model(fleet, key, name)
    except UnknownModel:
        raise _unknown(fleet, name) from None


def _unknown(fleet: Fleet, name: str) -> UnknownModel:
    tables = [host.name for host in fleet.hosts.values() if host.keeps] or ["HOST"]
    source = name.removeprefix("hf.co/") if "/" in name else "OWNER/NAME"
    engines = dict.fromkeys(host.engine.name for host in fleet.hosts.values() if not host.gateway)
    sources = ", ".join(f"{engine} = {json.dumps(source, ensure_ascii=False)}" for engine in engines)
    quoted = json.dumps(name, ensure_ascii=False)  # also a string of TOML
    lines = [f"[models.{quoted}]", "context = 8192", f"sources = {{ {sources} }}"]
    lists = " and ".join(f"[hosts.{table}]" for table in tables)
    return UnknownModel(
        f"no model is named {quoted} in hosts.toml, and only those can be pulled",
        f"add {'; '.join(lines)}; then {quoted} to `models` of {lists}, and run `disagg deploy`",
    )


class ProgressResponse(Response):
    """Objects as they come, a line each; or the last one alone. reader: in whose form a failure is written."""

    def __init__(self, objects: AsyncGenerator[Written], reader: Reader, times: ResponseTimes, *, stream: bool) -> None:
        super().__init__()
        self._objects, self._reader, self._times, self._stream = objects, reader, times, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send, JSON_LINES, self._times, stream=self._stream)
        cut, refusal = [self._reader.error(STOPPED)], problem_response(self._reader, STOPPED)
        await exchange.perform(self._perform(exchange), receive, cut, refusal, lambda: None)

    async def _perform(self, exchange: Exchange) -> None:
        last: Written = {}
        try:
            async with aclosing(self._objects) as objects:
                async for last in objects:
                    if self._stream:
                        await exchange.objects([last])
        except DisaggError as error:
            problem = problem_of(error)
            if exchange.started:
                await exchange.cut([self._reader.error(problem)])
            else:
                await exchange.respond(problem_response(self._reader, problem))
        else:
            await (exchange.complete(()) if self._stream else exchange.respond(json_response(last)))
