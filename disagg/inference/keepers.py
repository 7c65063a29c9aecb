"""What callers ask of the hosts with several models: load and unload a model, keep it for a time, pull and delete its
files. Their keepers are asked, each of which has the models of one host."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from disagg.api.keeper import FOR_EVER_S, KeptModel, LoadEvent, PullEvent
from disagg.config import Host, Model
from disagg.config.addresses import same_machine
from disagg.errors import DisaggError, Overloaded, RequestError, UnknownModel
from disagg.inference.client import AsyncClient
from disagg.inference.hosts.view import FleetView
from disagg.inference.http import keeper_calls
from disagg.inference.several import together

MAX_PULLS: Final = 8
"""Pulls that one client follows at a time."""
MAX_KEEPING: Final = 256
"""Calls of `keep` that are on their way."""
_RANKS: Final[Mapping[str, int]] = {"ready": 0, "loading": 1, "draining": 2, "asleep": 3, "failed": 4, "absent": 5}

OnLoad = Callable[[Host, LoadEvent], None]
"""Called with a host, and how far it is with its load."""

log = logging.getLogger(__name__)


class Keepers:
    """The keepers of a fleet, asked with the connections of one client, on its event loop. among: the names of the
    tables that are asked, None: all. Every call raises RequestError if no host with several models has the model."""

    def __init__(self, client: AsyncClient, among: Collection[str] | None = None) -> None:
        self._client, self._among = client, among
        self._pulls = 0
        self._keeping: set[asyncio.Task[None]] = set()

    def of(self, model: Model) -> list[Host]:
        """The values of this model on hosts with several. Raises RequestError."""
        hosts = self._hosts(model)
        if kept := [host for host in hosts if host.keeper]:
            return kept
        names = ", ".join(host.name for host in hosts)
        if not names:
            raise RequestError(f"none of these hosts has {model.name}", "leave out --host and the like")
        raise RequestError(
            f"{model.name} is not loaded and unloaded on demand: {names} always has it",
            f'in hosts.toml, write models = ["{model.name}"] and ports = "8100-8131" instead of model',
        )

    async def load(
        self, model: Model, keep_alive_s: float | None = None, on_load: OnLoad = lambda _, __: None
    ) -> float:
        """Load a model, if it is not loaded; seconds that it took. On the hosts of `among`, else on one host of each
        role, unless one that always has it is up. keep_alive_s: how long it stays after its last request; None: as its
        hosts are configured. Closing it gives up the places in the keepers' queues."""
        began, view = time.monotonic(), self._client.view
        wanted = None if keep_alive_s is None else wire_s(keep_alive_s)

        async def one(host: Host) -> None:
            http, keeper = self._client.connections, self._keeper(host)
            async with aclosing(keeper_calls.load(http, keeper, host.model, wanted)) as events:
                async for event in events:
                    view.load_event(host, event)
                    on_load(host, event)
            await self._seen(host, keeper_calls.models(http, keeper))  # events do not say how long it stays

        hosts = self.of(model) if self._among is not None else to_load(self._hosts(model), view)
        await _all(map(one, hosts))
        return time.monotonic() - began

    async def unload(self, model: Model, *, force: bool = False) -> None:
        """Unload a model everywhere. Overloaded if requests use it, unless they are to fail."""
        http, hosts = self._client.connections, self.of(model)
        calls = (keeper_calls.unload(http, self._keeper(host), model.name, force=force) for host in hosts)
        await _all(map(self._seen, hosts, calls))

    async def pin(self, model: Model, *, pinned: bool) -> None:
        """Let a model stay loaded whatever others need, or no longer."""
        http, hosts = self._client.connections, self.of(model)
        calls = (keeper_calls.pin(http, self._keeper(host), model.name, pinned=pinned) for host in hosts)
        await _all(map(self._seen, hosts, calls))

    def keep(self, model: Model, keep_alive_s: float) -> None:
        """Let a model stay loaded for so long after its last request, also on hosts that a request has woken and not
        used. Does not wait; a keeper that cannot be asked goes on as it is configured."""
        for host in self._hosts(model):
            if not host.keeper or self._client.view.of(host.keeper).reachable == "down":
                continue
            if len(self._keeping) >= MAX_KEEPING:
                log.warning("keep_alive_left_out", extra={"fields": {"host": host.name}})
                return
            task = asyncio.ensure_future(self._keep(host, keep_alive_s))
            self._keeping.add(task)
            task.add_done_callback(self._keeping.discard)

    async def _keep(self, host: Host, keep_alive_s: float) -> None:
        try:
            keeper, wanted = self._keeper(host), wire_s(keep_alive_s)
            await self._seen(host, keeper_calls.keep(self._client.connections, keeper, host.model, wanted))
        except DisaggError as error:
            log.warning("keep_alive_failed", extra={"fields": {"host": host.name, "error": str(error)}})

    async def delete(self, model: Model) -> list[Host]:
        """Remove a model's files from all hosts that have them, which it returns. Those of one machine may share the
        files, which are removed once no process has them. Raises UnknownModel if no host has any."""
        hosts = [host for host in self.of(model) if self._state(host) != "absent"]
        if not hosts:
            raise UnknownModel(f"no host has the files of {model.name}", "pull it first")
        await self.unload(model)
        for host in hosts:
            call = keeper_calls.delete(self._client.connections, self._keeper(host), model.name)
            await self._seen(host, call)
        return hosts

    async def pull(self, model: Model) -> AsyncGenerator[tuple[Host, PullEvent]]:
        """Fetch a model's files to all its hosts; what each does. Hosts of one machine, whose files may be the same,
        take turns. Raises the first failure once all others are done."""
        hosts = self.of(model)
        if self._pulls >= MAX_PULLS:
            raise Overloaded(f"{MAX_PULLS} models are being pulled already", "try again when one is there")
        self._pulls += 1
        failures: list[DisaggError] = []
        try:
            machines: dict[str, list[Host]] = {}
            for host in hosts:
                machines.setdefault(same_machine(host.address), []).append(host)
            async with aclosing(together([self._pulled(one, failures) for one in machines.values()])) as events:
                async for event in events:
                    yield event
            if failures:
                raise failures[0]
        finally:
            self._pulls -= 1

    async def _pulled(
        self, hosts: Sequence[Host], failures: list[DisaggError]
    ) -> AsyncGenerator[tuple[Host, PullEvent]]:
        for host in hosts:
            try:
                async with aclosing(
                    keeper_calls.pull(self._client.connections, self._keeper(host), host.model)
                ) as events:
                    async for event in events:
                        yield host, event
            except DisaggError as error:
                failures.append(error)

    async def _seen(self, host: Host, call: Awaitable[tuple[KeptModel, ...]]) -> None:
        """Let the client's view know what the keeper states of its models, which it else learns when it next asks."""
        self._client.view.models_stated(host.keeper, await call)

    def _hosts(self, model: Model) -> list[Host]:
        hosts = (host for host in self._client.fleet.answering_hosts if host.model == model.name)
        return [host for host in hosts if self._among is None or host.table in self._among]

    def _keeper(self, host: Host) -> Host:
        return self._client.fleet.hosts[host.keeper]

    def _state(self, host: Host) -> str:
        kept = self._client.view.of(host.name).kept
        return "" if kept is None else kept.state


def to_load(hosts: Sequence[Host], view: FleetView) -> list[Host]:
    """Of the hosts of one model, those on which it is loaded: of each role the one that has it soonest, unless a host
    that always has it is up. Pure."""
    chosen: dict[str, tuple[tuple[float, ...], Host]] = {}
    for host in hosts:
        found = view.of(host.name)
        if not host.keeper and found.reachable != "up":
            continue
        rank, role = _rank(found.kept) if host.keeper else (-1.0,), host.roles[0]
        if role not in chosen or rank < chosen[role][0]:
            chosen[role] = (rank, host)
    return [host for _, host in chosen.values() if host.keeper]


def _rank(kept: KeptModel | None) -> tuple[float, ...]:
    return (9.0,) if kept is None else (_RANKS[kept.state], kept.evicts, kept.wait_s)


def wire_s(keep_alive_s: float) -> float:
    """Seconds as keepers are told them."""
    return FOR_EVER_S if math.isinf(keep_alive_s) else keep_alive_s


async def _all(calls: Iterable[Awaitable[Any]]) -> None:
    """Wait for all of them, then raise the first failure; a cancellation ends them all."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    for result in results:
        if isinstance(result, BaseException):
            raise result
