"""Requests of one client that may have ended a host. Each goes on alone among them, on one more host.

A request without a token of a host whose process has ended is a suspect, unless it only waited in that host's queue. So
are honest ones that were there. If several went on at the same time and the next host ended, nobody would know which
it was. A suspect that gets a token is none any more; one whose second host ends is refused, also if it is sent again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from disagg.api.status import Load
from disagg.config import Host
from disagg.errors import DisaggError, PeerLost, RequestEndedHosts, ServerNotRunning, ServerSilent, ServerUnavailable
from disagg.inference.attempts.retry import Failure
from disagg.inference.hosts.view import FleetView
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.inference.policy import RetryPolicy
from disagg.strikes import Marks, require_innocent

MAX_REFUSED: Final = 1024
LOOKS: Final = 20
BETWEEN_S: Final = 0.02  # looks at a host whose connections break


class Turn:
    """The turn of one suspect."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock: asyncio.Lock | None = lock

    def end(self) -> None:
        """The next suspect may go on. A second call does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class Suspects:
    """The suspects of one client, and the requests that it refuses."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._lock = asyncio.Lock()
        self._refused: OrderedDict[str, float] = OrderedDict()  # by the mark of a request, or of a counted prompt

    async def turn(self, waiting: Callable[[], None]) -> Turn:
        """Wait until no other suspect is tried. waiting: called if that takes longer than a moment."""
        try:
            async with asyncio.timeout(self._policy.timeouts.note):
                await self._lock.acquire()
        except TimeoutError:
            waiting()
            await self._lock.acquire()
        return Turn(self._lock)

    def refuse(self, of: Marks, hosts: Sequence[str]) -> RequestEndedHosts:
        """The error of a request that has ended these hosts, which is refused from now on."""
        mark = of.request or of.prompt
        self._refused[mark] = time.monotonic() + self._policy.strikes.refused_s
        self._refused.move_to_end(mark)
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        return RequestEndedHosts(
            f"{' and '.join(dict.fromkeys(hosts))} ended while computing this request: it is tried on no other host"
        )

    def require_innocent(self, of: Callable[[], Marks], view: FleetView) -> bool:
        """Whether the request has strikes. Raises RequestEndedHosts if this client refuses it, or they are too many.
        of: the request's marks, which are made only if there is something to compare them with."""
        now, policy = time.monotonic(), self._policy.strikes
        while self._refused and next(iter(self._refused.values())) <= now:
            self._refused.popitem(last=False)
        verdicts = view.verdicts
        if self._refused and not self._refused.keys().isdisjoint((of().request, of().prompt)):
            raise RequestEndedHosts(
                f"hosts have ended while computing this request: it is refused for {policy.refused_s:.0f} s"
            )
        return bool(verdicts) and require_innocent(of(), verdicts, policy, "hosts")


def may_have_ended(failure: Failure, sent: Iterable[host_calls.EventCall], *, has_token: bool) -> list[Host]:
    """The hosts that the request may have ended, if its attempt failed so. A lost decode host may show first as the
    transfer's end. sent: the attempt's calls. has_token: it had brought one."""
    if has_token or not broke_off(failure.error) or failure.attempt.method == "whole":
        return []
    return [call.host for call in sent if call.written > 0 and call.phase != "queued"]


def broke_off(error: DisaggError) -> bool:
    """Whether a request that has failed so may have ended its host."""
    return isinstance(error, ServerUnavailable | PeerLost) and not isinstance(error, ServerSilent)


async def has_ended(http: Connections, view: FleetView, host: Host, boot_id: str, seconds: float) -> bool:
    """Whether the process of a host has ended: nothing listens on its port, or another start of the server answers.
    A host that says nothing within so many seconds has not; its link may be cut. boot_id: of the start before, empty if
    it is not known."""
    try:
        async with asyncio.timeout(seconds):
            load = await _load(http, host, seconds)
    except ServerNotRunning:
        view.missed(host.name, refused=True)
        return True
    except (DisaggError, TimeoutError):
        return False
    view.answered(host.name, load)
    return bool(boot_id) and load.boot_id != boot_id


async def _load(http: Connections, host: Host, seconds: float) -> Load:
    """The host's load. A process that ends closes its sockets one after the other: its port may accept a connection
    that breaks at once."""
    for left in reversed(range(LOOKS)):
        try:
            return Load.received(await host_calls.get(http, host, "/load", timeout=seconds), host.name)
        except (ServerNotRunning, ServerSilent):
            raise
        except ServerUnavailable:
            if not left:
                raise
            await asyncio.sleep(BETWEEN_S)
    raise AssertionError("the last look returns or raises")
