"""How long requests wait and how often they are tried: the values, and the judge of a host by its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal

from disagg import strikes
from disagg.api.events import ProgressEvent
from disagg.config import Host
from disagg.errors import DisaggError, Overloaded, ServerSilent

OnKVFailure = Literal["fallback", "fail"]
"""If no prefill host delivers the KV: the decode host computes the prompt, or the request fails."""
SHARE: Final = 1 / 3
"""The most of the time that a request has left that an attempt waits in the queue of one host, or for its KV, if
another host of its role is up: the next attempt has the rest."""
LEAST_S: Final = 2.0
"""The least that such a wait is shortened to."""
COMPUTING: Final = ("computing the prompt", "generating")
"""The phases in which a request's host must make progress."""
QUEUED: Final = ("arriving", "tokenising", "queued")
"""The phases before a host has begun with a request."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every wait of a request, in seconds. The whole request has its own `timeout`, which bounds them all: the wait for
    busy hosts has no other bound. If another host could take over, SHARE bounds some waits for one, too: see `within`.

    connect: until a TCP connection is open. queue: until a host has begun with a request that it has accepted; then the
    host counts as busy. first_kv: until the KV begins to arrive at the decode host, once the prefill host computes.
    silence: between two events of a host that has accepted a request; hosts send one a second. Bytes that are no event,
    and events of unknown names, do not count. stall: a host computes
    and its engine finishes nothing. none_up: no host that can answer is up, or starting. note: after which a wait is
    stated on the stream. figures: for the prefill host's figures after the answer is complete. lease: a host ends a
    request that this client has not named for so long. slow_transfer: exposed transfer that earns a warning. blame: for
    the prefill host's own error after a decode host has reported a failed transfer.

    Of whole-request hosts, which send no progress: whole_connect, until a connection is open, with TLS. whole_first:
    request sent until the answer begins. whole_silence: between two pieces.
    """

    connect: float = 2.0
    queue: float = 300.0
    first_kv: float = 10.0
    silence: float = 4.0
    stall: float = 10.0
    none_up: float = 10.0
    note: float = 2.0
    figures: float = 5.0
    lease: float = 10.0
    slow_transfer: float = 1.0
    blame: float = 0.2
    whole_connect: float = 5.0
    whole_first: float = 300.0
    whole_silence: float = 30.0

    def within(self, left_s: float) -> Timeouts:
        """The waits of an attempt that another host may follow, for a request with `left_s` seconds left.

        Those after which the host counts as failed for all requests stay as long as by default at least: a request with
        little time would else have healthy hosts left out for everybody. `queue` stays: a place in a queue is kept if
        every other host is full, see ProgressJudge. So do the waits for an answer of whole-request hosts: they send no
        progress, and once an answer has begun no other host goes on with it."""
        most, usual = longest_wait_s(left_s), DEFAULT_POLICY.timeouts
        return replace(
            self,
            first_kv=min(self.first_kv, most),
            connect=min(self.connect, max(usual.connect, most)),
            silence=min(self.silence, max(usual.silence, most)),
            stall=min(self.stall, max(usual.stall, most)),
            whole_connect=min(self.whole_connect, max(usual.whole_connect, most)),
        )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a request is tried again, and how often. prefill_attempts: hand-offs per request before its prompt is
    computed by the decode host, if on_kv_failure is "fallback". local_prefill: the decode host may compute a prompt
    itself if that takes less time. retries_per_s: of one client, for hosts that were busy. host_losses: hosts whose
    processes may end with a request that has no token of them yet; ended_s: within which a host that broke off states
    that it was started again, which it may do while it loads. strikes: how many hosts
    a request may end, see disagg/strikes.py."""

    prefill_attempts: int = 2
    on_kv_failure: OnKVFailure = "fallback"
    local_prefill: bool = True
    retries_per_s: float = 20.0
    host_losses: int = 2
    ended_s: float = 5.0
    strikes: strikes.StrikePolicy = strikes.POLICY
    timeouts: Timeouts = Timeouts()


DEFAULT_POLICY = RetryPolicy()


def longest_wait_s(left_s: float) -> float:
    """The longest wait for one host if another could take over, for a request with `left_s` seconds left."""
    return max(LEAST_S, SHARE * left_s)


@dataclass(frozen=True, slots=True)
class QueueExit:
    """When a request leaves a host's queue: after `seconds` in it, if another host would begin with it at once.

    claim: takes a free place at another host of this one's role, which then is the request's; False if there is none.
    The other waits for one host are bounded by `Timeouts.within`.
    """

    seconds: float = inf
    claim: Callable[[], bool] = lambda: False


STAYS: Final = QueueExit()
"""The request waits in the queue until its own `Timeouts.queue`."""


@dataclass(slots=True)
class ProgressJudge:
    """Judges a host by the progress events of one request. No I/O, no clock; may claim a place elsewhere.

    queued_since: the host has not gone on with the request since then; None while it has. has_begun: it has gone on
    with it before. beats: as the last event stated them. stalled_since: they have not changed since then, while the
    request was computed.
    """

    host: Host
    timeouts: Timeouts
    queued_since: float | None
    queue_exit: QueueExit = STAYS
    has_begun: bool = False
    beats: int = -1
    stalled_since: float = 0.0

    def problem(self, event: ProgressEvent, now: float) -> DisaggError | None:
        """Why the host is given up; None if it gets on."""
        if event.beats != self.beats or event.phase not in COMPUTING:
            self.beats, self.stalled_since = event.beats, now
        if event.phase not in QUEUED:
            self.begun()
        elif self.queued_since is None:
            self.queued_since = now
        host, stalled_s = self.host, now - self.stalled_since
        queued_s = 0.0 if self.queued_since is None else now - self.queued_since
        if stalled_s >= self.timeouts.stall:
            return ServerSilent(
                f"{host.name} ({host.url}) is stuck: {event.phase}, and its engine has made no progress for "
                f"{stalled_s:.0f} s",
                f"run `disagg restart --host {host.table}`",
            )
        if queued_s >= self.timeouts.queue or self._begins_sooner_elsewhere(queued_s):
            return Overloaded(f"{host.name} has not begun with the request in {queued_s:.0f} s", "see `disagg status`")
        return None

    def begun(self) -> None:
        """The host has gone on with the request."""
        self.queued_since, self.has_begun = None, True

    def _begins_sooner_elsewhere(self, queued_s: float) -> bool:
        """Whether another host begins sooner. A place in a queue is given up only for a host that has room: at the end
        of another queue the request would wait again. A request that its host has gone on with stays: it may have KV
        there, and waits for its place in the batch."""
        return not self.has_begun and queued_s >= self.queue_exit.seconds and self.queue_exit.claim()
