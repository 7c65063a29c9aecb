"""Extends the leases of requests that run: POST /lease to each host that works on them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from disagg.api.requests import MAX_LEASES, LeaseBody
from disagg.api.status import LeaseAnswer
from disagg.config import Host
from disagg.errors import DisaggError
from disagg.inference.hosts.background import Background
from disagg.inference.http import calls
from disagg.inference.http.connections import Connections

BEATS_PER_LEASE = 4
log = logging.getLogger(__name__)


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
        """By host: the requests that are older than the interval, whose leases have to be extended."""
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
                    answer = await calls.post(self._http, host, "/lease", body, timeout=self._every_s)
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
