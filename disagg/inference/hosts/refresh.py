"""Keeps the view of the fleet fresh: GET /load of each host of the models in use, while requests run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf

from disagg.api.status import Load
from disagg.config import Host
from disagg.errors import ConfigError, DisaggError, RequestError, ServerNotRunning, ServerRefused
from disagg.inference.hosts.background import Background
from disagg.inference.hosts.view import FleetView
from disagg.inference.http import calls, whole
from disagg.inference.http.connections import Connections
from disagg.whole.request import MODELS

INTERVAL_S = 1.0
PATIENCE_S = 4.0  # an answer within it counts, however many misses precede it: a slow host is not down for ever
FIRST_S = 0.25  # the first request has the machine to itself
IDLE_S = 10.0  # after the last request
WHOLE_INTERVAL_S = 10.0  # of whole-request hosts, which are others' servers
PER_INTERVAL = 64  # hosts asked in one interval; of larger fleets each is asked in turn


@dataclass(slots=True)
class _Use:
    """The hosts that some requests may use. requests: that run now. last: time.monotonic() when one ended."""

    hosts: Sequence[Host]
    requests: int = 0
    last: float = 0.0


class Refresher:
    """One client's reader of GET /load."""

    def __init__(self, http: Connections, view: FleetView) -> None:
        self._http, self._view = http, view
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
        """By name: the hosts that some request uses, or did until lately."""
        uses = [use for use in self._uses.values() if use.requests or now - use.last < IDLE_S]
        return {host.name: host for use in uses for host in use.hosts}

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
            self._view.answered(host.name, answer.result())
        except DisaggError as error:
            self._view.missed(host.name, refused=isinstance(error, ServerNotRunning))

    async def _load(self, host: Host) -> Load | None:
        """The host's load; None if it answers without: a whole-request host, or one of another version."""
        if host.whole:  # whatever it answers, and if its key cannot be read: a request finds out why it is refused
            with suppress(ConfigError, ServerRefused):
                await whole.get(self._http, host, MODELS, PATIENCE_S)
            return None
        try:
            body = await calls.get(self._http, host, "/load", timeout=PATIENCE_S)
        except RequestError:
            return None
        return Load.received(body, host.name)


def _interval_s(host: Host) -> float:
    return WHOLE_INTERVAL_S if host.whole else INTERVAL_S
