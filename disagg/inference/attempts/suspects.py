"""Requests of one client that may have ended a host. Each goes on alone among them, on one more host.

A request without a token of a host whose process has ended is a suspect, unless it only waited in that host's queue. So
are honest ones that were there. If several went on at the same time and the next host ended, nobody would know which
it was. A suspect that gets a token is none any more; one whose second host ends is refused, also if it is sent again.
A request that hosts have computed lately for this client is no suspect, until they have ended with it as often.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from disagg.api.requests import PrefillBody, PromptBody
from disagg.api.status import Load
from disagg.config import Host
from disagg.errors import DisaggError, PeerLost, RequestEndedHosts, ServerNotRunning, ServerSilent, ServerUnavailable
from disagg.inference.attempts.retry import Failure
from disagg.inference.hosts.view import FleetView
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.inference.policy import RetryPolicy
from disagg.strikes import POLICY, Marks, StrikePolicy, Tally, marks, require_innocent

MAX_REFUSED: Final = 1024
LOOKS: Final = 20
BETWEEN_S: Final = 0.02  # looks at a host whose connections break


class Suspects:
    """The suspects of one client, of which one at a time is tried, and the requests that it refuses."""

    def __init__(self, http: Connections, view: FleetView, policy: StrikePolicy = POLICY) -> None:
        self.http, self.view = http, view
        self.trying = asyncio.Lock()
        self.computed = Tally(policy.computed, policy.refused_s)
        self._ended = Tally(policy.computed, policy.refused_s)  # marks, and each with the start that ended
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

    def ended(self, mark: str, start: str) -> bool:
        """This start of a host has ended with a request with this mark. Returns whether that proves nothing: hosts have
        computed it lately, and more often than they have ended with it. One end counts once, however many such requests
        were there."""
        now, end = time.monotonic(), f"{mark} {start}"
        counts = self._ended.counts((mark, end), now)
        if not counts[end]:
            self._ended.add((mark, end), now)
            counts[mark] += 1
        return self.computed.counts([mark], now)[mark] >= counts[mark]

    def acquit(self, of: Iterable[str]) -> None:
        """A host has computed a request with these marks, which is refused no longer."""
        for mark in filter(None, of):
            self.computed.add([mark], time.monotonic())
            self._refused.pop(mark, None)


@dataclass(slots=True)
class Suspicion:
    """What is known of one request. lost: hosts whose processes ended with it, with no token of them, and more often
    than it was computed lately. struck: hosts have ended with it, or with one like it, and it is not refused."""

    suspects: Suspects
    body: PromptBody
    policy: RetryPolicy
    lost: list[str] = field(default_factory=list)
    struck: bool = False
    _trying: bool = False
    _known: Marks | None = None

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
        if verdicts:
            of = self._marks()
            computed = self.suspects.computed.counts(of.all, time.monotonic())
            self.struck = require_innocent(of, verdicts, policy, "hosts", computed) or self.struck

    async def broke_off(self, asked: Iterable[Asked], error: DisaggError) -> None:
        """These hosts have failed so with the request. Raises RequestEndedHosts if they are too many whose processes
        have ended."""
        http, view, asked = self.suspects.http, self.suspects.view, list(asked)
        checks = (has_ended(http, view, one.host, one.boot_id, self.policy.ended_s) for one in asked)
        for one, ended in zip(asked, await asyncio.gather(*checks), strict=True):
            if ended and self.suspects.ended(self._mark(one), one.start):
                self.struck = True
            elif ended:
                self.lost.append(one.host.name)
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
        self.suspects.acquit(self._marks().computed)

    def prompt_computed(self) -> None:
        """A prefill host has sent the KV of the prompt."""
        self.suspects.acquit([self._marks().prompt])

    def end_turn(self) -> None:
        """Another suspect may go on."""
        if self._trying:
            self.suspects.trying.release()
            self._trying = False

    def _mark(self, asked: Asked) -> str:
        """What that host has noted down of the request."""
        of = self._marks()
        return of.prompt if asked.prompt_alone else of.request or of.prompt

    def _marks(self) -> Marks:
        if self._known is None:  # they take as long as reading the body
            self._known = marks(self.body, self.suspects.http.token)
        return self._known


class Asked(NamedTuple):
    """A host that was asked. boot_id: its start before, empty if it is not known. prompt_alone: it computes nothing but
    the prompt."""

    host: Host
    boot_id: str
    prompt_alone: bool

    @property
    def start(self) -> str:
        """What tells this start from all others; nothing is equal to one that is not known."""
        return f"{self.host.name} {self.boot_id or secrets.token_hex(8)}"


def may_have_ended(
    failure: Failure, sent: Iterable[host_calls.EventCall], starts: Mapping[str, str], *, has_token: bool
) -> list[Asked]:
    """The hosts that the request may have ended, if its attempt failed so. A lost decode host may show first as the
    transfer's end. sent: the attempt's calls. starts: the boot ids of their hosts. has_token: it had brought one."""
    if has_token or not broke_off(failure.error) or failure.attempt.method == "whole":
        return []
    return [
        Asked(call.host, starts[call.host.name], isinstance(call.body, PrefillBody))
        for call in sent
        if call.written > 0 and call.phase != "queued"
    ]


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
