"""What a client does beside its requests while some run: it reads the load of hosts, and extends the leases there. Of a
host with several models it asks the keeper, and the process of each model that is loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

from disagg.api.requests import MAX_LEASES, LeaseBody
from disagg.api.status import LeaseAnswer, Load
from disagg.config import Host
from disagg.errors import ConfigError, DisaggError, RequestError, ServerNotRunning, ServerRefused
from disagg.inference.hosts.view import FleetView
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.whole.request import MODELS

INTERVAL_S = 1.0
PATIENCE_S = 4.0  # an answer within it counts, however many misses precede it: a slow host is not down for ever
FIRST_S = 0.25  # the first request has the machine to itself
IDLE_S = 10.0  # after the last request
WHOLE_INTERVAL_S = 10.0  # of whole-request hosts, which are others' servers
PER_INTERVAL = 64  # hosts asked in one interval; of larger fleets each is asked in turn
BEATS_PER_LEASE = 4
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Use:
    """The hosts that some requests may use. requests: that run now. last: time.monotonic() when one ended."""

    hosts: Sequence[Host]
    requests: int = 0
    last: float = 0.0


class Refresher:
    """One client's reader of GET /load. keepers: the hosts with several models, by name."""

    def __init__(self, http: Connections, view: FleetView, keepers: Mapping[str, Host] = MappingProxyType({})) -> None:
        self._http, self._view, self._keepers = http, view, keepers
        self._uses: dict[tuple[str, ...], _Use] = {}  # by the names of their hosts: one or a few per model
        self._asked: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._task = Background(self._run)

    @contextmanager
    def using(self, hosts: Sequence[Host]) -> Iterator[None]:
        """A request that may use these hosts runs."""
        use = self._uses.setdefault(tuple(host.name for host in hosts), _Use(hosts))
        use.requests += 1
        self._task.ensure_running()
        try:
            yield
        finally:
            use.requests -= 1
            use.last = time.monotonic()

    async def read(self, hosts: Iterable[Host], seconds: float = INTERVAL_S) -> None:
        """Ask these hosts now. Returns when each has answered or failed to, after `seconds` at the latest; what comes
        later counts too."""
        if asking := [self._ask_once(host) for host in hosts]:
            await asyncio.wait(asking, timeout=seconds)

    async def ask_keeper(self, host: Host, seconds: float = INTERVAL_S) -> None:
        """Ask the keeper of the host's model now. An answer that was asked for before may be out of date."""
        keeper = self._keepers[host.keeper]
        if (running := self._asking.get(keeper.name)) is not None:
            await asyncio.wait((running,), timeout=seconds)
        await asyncio.wait((self._ask_once(keeper),), timeout=seconds)

    def stale(self, hosts: Iterable[Host]) -> list[Host]:
        """Those of these hosts whose keeper was not asked for an INTERVAL_S."""
        now = time.monotonic()
        return [host for host in hosts if host.keeper and now - self._asked.get(host.keeper, -inf) > INTERVAL_S]

    async def stop(self) -> None:
        await self._task.stop()
        if asking := list(self._asking.values()):
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)

    def due(self, now: float) -> list[Host]:
        """The hosts in use whose interval is over, those first that were not asked for the longest time. Half an
        INTERVAL_S is no reason to leave one to the next look."""
        stale = [
            host
            for name, host in self._used(now).items()
            if name not in self._asking and now - self._asked.get(name, -inf) >= _interval_s(host) - INTERVAL_S / 2
        ]
        return sorted(stale, key=lambda host: self._asked.get(host.name, 0.0))[:PER_INTERVAL]

    def _used(self, now: float) -> dict[str, Host]:
        """The hosts that some request uses, or did until lately, by name. In place of those whose model has no process
        their keepers, each of which states all of its models."""
        uses = [use for use in self._uses.values() if use.requests or now - use.last < IDLE_S]
        hosts = (host for use in uses for host in use.hosts)
        asked = (self._keepers[host.keeper] if self._view.of(host.name).must_load else host for host in hosts)
        return {host.name: host for host in asked}

    async def _run(self) -> None:
        await asyncio.sleep(FIRST_S)
        while self._used(began := time.monotonic()):
            await self.read(self.due(began))
            await asyncio.sleep(max(0.0, began + INTERVAL_S - time.monotonic()))

    def _ask_once(self, host: Host) -> asyncio.Task[None]:
        """The task that asks the host: a new one, unless one runs."""
        if (running := self._asking.get(host.name)) is not None:
            return running
        self._asked[host.name] = time.monotonic()
        self._asking[host.name] = task = asyncio.get_running_loop().create_task(self._ask(host))
        task.add_done_callback(lambda _: self._asking.pop(host.name))
        return task

    async def _ask(self, host: Host) -> None:
        """Ask one host: a miss for every INTERVAL_S without an answer, and for a failure."""
        if host.keeper in self._keepers:
            if not await self._has_process(host):
                return
            host = self._view.addressed(host)
        answer = asyncio.ensure_future(self._load(host))
        try:
            for _ in range(int(PATIENCE_S / INTERVAL_S)):
                await asyncio.wait((answer,), timeout=INTERVAL_S)
                if answer.done():  # also if it came during a wait that this process overslept
                    break
                self._view.missed(host.name)
        finally:
            answer.cancel()
            await asyncio.wait((answer,))
        if answer.cancelled():
            return
        try:
            load = answer.result()
            if host.name in self._keepers and load is not None:
                self._view.keeper_answered(host.name, load)
            else:
                self._view.answered(host.name, load)
        except DisaggError as error:
            self._view.missed(host.name, refused=isinstance(error, ServerNotRunning))

    async def _has_process(self, host: Host) -> bool:
        """Ask the keeper of the host's model, once for all of its models. Returns whether there is a process to ask: a
        model that was ready is asked meanwhile, whether its keeper answers or not."""
        asking = self._ask_once(self._keepers[host.keeper])
        seen = self._view.of(host.name)
        if seen.kept is None or seen.must_load:
            await asyncio.wait((asking,))
            if (seen := self._view.of(host.name)).kept is None or seen.must_load:
                self._view.follow_keeper(host)
                return False
        return True

    async def _load(self, host: Host) -> Load | None:
        """The host's load; None if it answers without: a whole-request host, or one of another version."""
        if host.whole:  # whatever it answers, and if its key cannot be read: a request finds out why it is refused
            with suppress(ConfigError, ServerRefused):
                await host_calls.get_whole(self._http, host, MODELS, PATIENCE_S)
            return None
        try:
            body = await host_calls.get(self._http, host, "/load", timeout=PATIENCE_S)
        except RequestError:
            return None
        return Load.received(body, host.name)


def _interval_s(host: Host) -> float:
    return WHOLE_INTERVAL_S if host.whole else INTERVAL_S


class Heartbeat:
    """The leases of one client's requests. lease_s: of each."""

    def __init__(self, http: Connections, lease_s: float) -> None:
        self._http, self._every_s = http, lease_s / BEATS_PER_LEASE
        self._since: dict[str, dict[str, float]] = {}
        self._hosts: dict[str, Host] = {}
        self._begun: set[tuple[str, str]] = set()  # host and request: the host has had it
        self._task = Background(self._run)

    @contextmanager
    def lease(self, host: Host, request_id: str) -> Iterator[None]:
        """Extend the request's lease on this host until the block ends."""
        self._hosts[host.name] = host
        self._since.setdefault(host.name, {})[request_id] = time.monotonic()
        self._task.ensure_running()
        try:
            yield
        finally:
            self._drop(host, request_id)

    def due(self, now: float) -> dict[str, list[str]]:
        """The requests of each host that are older than the interval, whose leases have to be extended."""
        old = {
            host: [i for i, began in ids.items() if now - began >= self._every_s] for host, ids in self._since.items()
        }
        return {host: ids for host, ids in old.items() if ids}

    async def stop(self) -> None:
        await self._task.stop()

    async def _run(self) -> None:
        while any(self._since.values()):
            await asyncio.sleep(self._every_s)
            due = self.due(time.monotonic())
            await asyncio.gather(*(self._extend(self._hosts[name], ids) for name, ids in due.items()))

    async def _extend(self, host: Host, request_ids: Sequence[str]) -> None:
        """A host that does not answer is not an error here: the requests there find out by themselves."""
        try:
            for first in range(0, len(request_ids), MAX_LEASES):
                body = LeaseBody(tuple(request_ids[first : first + MAX_LEASES]))
                async with asyncio.timeout(self._every_s):  # that of `post` bounds each of its steps, not their sum
                    answer = await host_calls.post(self._http, host, "/lease", body, timeout=self._every_s)
                self._note(host, body.request_ids, LeaseAnswer.received(answer, host.name).unknown)
        except (DisaggError, TimeoutError) as error:
            log.debug("leases of %s: %s", host.name, error)

    def _note(self, host: Host, request_ids: Sequence[str], unknown: Sequence[str]) -> None:
        """Extend no more what has ended on the host: a prefill host is done long before the answer is. What the host
        has never had may still be on its way to it."""
        self._begun |= {(host.name, one) for one in request_ids if one not in unknown and one in self._since[host.name]}
        for one in unknown:
            if (host.name, one) in self._begun:
                self._drop(host, one)

    def _drop(self, host: Host, request_id: str) -> None:
        self._since[host.name].pop(request_id, None)
        self._begun.discard((host.name, request_id))


class Background:
    """Runs `work` in a task of its own, at most once at a time. `work` returns when it has nothing left to do."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def ensure_running(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Cancel the task if it runs; returns when it has ended."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait((self._task,))
