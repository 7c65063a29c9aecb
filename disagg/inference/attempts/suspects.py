"""Requests of one client that may have ended a host. Each goes on alone among them, on one more host.

A request without a token of a host whose process has ended is a suspect, unless it only waited in that host's queue. So
are honest ones that were there. If several went on at the same time and the next host ended, nobody would know which
it was. A suspect that gets a token is none any more; one whose second host ends is refused, also if it is sent again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from disagg.api.requests import PromptBody
from disagg.api.status import Load
from disagg.config import Host
from disagg.errors import DisaggError, PeerLost, RequestEndedHosts, ServerNotRunning, ServerSilent, ServerUnavailable
from disagg.inference.attempts.retry import Failure
from disagg.inference.hosts.view import FleetView
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.inference.policy import RetryPolicy
from disagg.strikes import Marks, marks, require_innocent

MAX_REFUSED: Final = 1024
LOOKS: Final = 20
BETWEEN_S: Final = 0.02  # looks at a host whose connections break


class Suspects:
    """The suspects of one client, of which one at a time is tried, and the requests that it refuses."""

    def __init__(self, http: Connections, view: FleetView) -> None:
        self.http, self.view = http, view
        self.trying = asyncio.Lock()
        self._refused: OrderedDict[str, float] = OrderedDict()  # by the mark of a request, or of a counted prompt

    def refuse(self, of: Marks, seconds: float) -> None:
        """Refuse this request for so long."""
        mark = of.request or of.prompt
        self._refused[mark] = time.monotonic() + seconds
        self._refused.move_to_end(mark)
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def refuses(self, of: Callable[[], Marks]) -> bool:
        now = time.monotonic()
        while self._refused and next(iter(self._refused.values())) <= now:
            self._refused.popitem(last=False)
        return bool(self._refused) and not self._refused.keys().isdisjoint((of().request, of().prompt))


@dataclass(slots=True)
class Suspicion:
    """What is known of one request. lost: hosts whose processes ended with it, with no token of them. struck: hosts
    have ended with it, or with one like it, and it is not refused."""

    suspects: Suspects
    body: PromptBody
    policy: RetryPolicy
    lost: list[str] = field(default_factory=list)
    struck: bool = False
    _trying: bool = False

    @property
    def standing(self) -> Literal["", "suspect", "innocent"]:
        """The `standing` of the request's body."""
        return "suspect" if self.lost else "innocent" if self.struck else ""

    def look(self) -> None:
        """Weigh what hosts state of the request. Raises RequestEndedHosts if this client refuses it, or it has too many
        strikes."""
        policy, verdicts = self.policy.strikes, self.suspects.view.verdicts
        if self.suspects.refuses(self._marks):
            raise RequestEndedHosts(
                f"hosts have ended while computing this request: it is refused for {policy.refused_s:.0f} s"
            )
        self.struck = bool(verdicts) and require_innocent(self._marks(), verdicts, policy, "hosts")

    async def broke_off(self, hosts: Iterable[tuple[Host, str]], error: DisaggError) -> None:
        """These hosts have failed so with the request. Raises RequestEndedHosts if they are too many whose processes
        have ended. Beside each host: the boot id of its start before, empty if it is not known."""
        http, view = self.suspects.http, self.suspects.view
        checks = [(host.name, has_ended(http, view, host, boot_id, self.policy.ended_s)) for host, boot_id in hosts]
        ended = await asyncio.gather(*(check for _, check in checks))
        self.lost += [name for (name, _), has in zip(checks, ended, strict=True) if has]
        if len(self.lost) >= self.policy.host_losses:
            self.suspects.refuse(self._marks(), self.policy.strikes.refused_s)
            names = " and ".join(dict.fromkeys(self.lost))
            raise RequestEndedHosts(
                f"{names} ended while computing this request: it is tried on no other host"
            ) from error

    async def take_turn(self, note: Callable[[str], object]) -> bool:
        """A suspect waits until no other one is tried, which it notes if that takes longer than a moment. Returns
        whether it may have waited."""
        if not self.lost or self._trying:
            return False
        try:
            async with asyncio.timeout(self.policy.timeouts.note):
                await self.suspects.trying.acquire()
        except TimeoutError:
            note(f"waiting: {self.lost[-1]} ended with this request and others, which are tried one at a time")
            await self.suspects.trying.acquire()
        self._trying = True
        return True

    def cleared(self) -> None:
        """A host has sent a token of the request."""
        self.lost.clear()
        self.end_turn()

    def end_turn(self) -> None:
        """Another suspect may go on."""
        if self._trying:
            self.suspects.trying.release()
            self._trying = False

    def _marks(self) -> Marks:
        return marks(self.body, self.suspects.http.token)


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
    A host that says nothing within so many seconds has not; its link may be cut. boot_id: the start before, empty if
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
