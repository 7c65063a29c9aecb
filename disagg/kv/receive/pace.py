"""How long the receiving end waits for what, and when a sender is given up because it sends and gets nowhere. Pure, but
for the counts that connections keep.

A link that is slow is no reason: its transfer goes on, and its caller is warned. This is for a peer that trickles, or
sends idle frames for ever: without a bound its request would last until its deadline, while another host is free. It is
waited for as long as the KV would take to come in another way, so that a request takes at most about twice that.

    bytes arrive at `least_bytes_s` or more               -> it goes on
    the rest would arrive sooner than in another way      -> it goes on
    idle frames, and the engine finishes pieces of work   -> it goes on, BUSY times as long as otherwise
    the sender waits until it may send the next chunk     -> it goes on
    nothing arrives at all                                -> not judged here: `stall_s` bounds it
    else, for as long as another way would take           -> SenderTooSlow; `busy_s` if none is known
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from disagg.errors import SenderTooSlow
from disagg.units import seconds, size

BUSY: Final = 4
"""An engine that works for other prompts is waited for so many times as long: to compute this prompt elsewhere would
slow down what runs there."""
SIGNS: Final = 2
"""Frames or pieces without which a sender is not judged: one that is silent may be stopped, or its link cut."""


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """Bounds of the receiving end, in seconds where it says _s; the deadline of a ticket bounds the whole. preamble_s:
    a newcomer has so long for its preamble, then proof_s for its proof. header_s: a sender has so long for its whole
    header. stall_s: a connection may be so long without any byte or idle frame, of which a sender that waits for KV
    sends four per second. linger_s: a peer has so long to read the last reply.

    A sender that sends and gets nowhere is given up, see `Pace`. patience_s: the least time below least_bytes_s bytes
    per second. busy_s: the same if no other way is known in which the KV could come, and the least time for which an
    engine that works for other prompts is waited for.

    connections: so many may have a proven ticket at the same time; one more is refused with Overloaded. newcomers: so
    many may be open that have named no valid ticket yet; newcomers_per_address: so many of them from one address. One
    newcomer more ends the oldest one. Of those that have named a ticket and not proven it there are at most
    `connections`, too."""

    preamble_s: float = 2.0
    proof_s: float = 5.0
    header_s: float = 5.0
    stall_s: float = 5.0
    linger_s: float = 1.0
    patience_s: float = 0.5
    least_bytes_s: float = 16384.0
    busy_s: float = 10.0
    connections: int = 256
    newcomers: int = 128
    newcomers_per_address: int = 16


@dataclass(slots=True)
class Arrived:
    """What has come on one connection; written by its thread. nbytes: bytes of payload. beats: what its last idle frame
    states. signs: idle frames, and pieces of payload. waits: whether the sender may send nothing for now."""

    nbytes: int = 0
    beats: int = 0
    signs: int = 0
    waits: Callable[[], bool] = lambda: False

    def piece(self, view: memoryview) -> None:
        """A piece of payload."""
        self.nbytes += len(view)
        self.signs += 1

    def idle(self, beats: int) -> None:
        """An idle frame."""
        self.beats = beats
        self.signs += 1


@dataclass(slots=True)
class Pace:
    """How one transfer gets on. elsewhere_s: seconds in which its KV would come in another way; None if there is none
    that is known. expected: bytes of all of it. Times are time.monotonic()."""

    elsewhere_s: float | None = None
    expected: int = 0
    connections: list[Arrived] = field(default_factory=list)
    _good: float = 0.0  # when enough bytes had arrived last
    _worked: float = 0.0  # when the engine had finished something, or `_good`
    _nbytes: int = 0  # at `_good`
    _signs: int = 0  # at `_worked`
    _beats: tuple[int, ...] = ()

    def join(self, expected: int, now: float, waits: Callable[[], bool] = lambda: False) -> Arrived:
        """One more connection brings a part of these bytes. waits: see `Arrived`."""
        if not self.connections:
            self.expected, self._good, self._worked = expected, now, now
        self.connections.append(arrived := Arrived(waits=waits))
        self._beats = (*self._beats, arrived.beats)  # that there is a connection is no progress of the engine
        return arrived

    def problem(self, now: float, limits: ReceiveLimits) -> SenderTooSlow | None:
        """Why the sender is given up now; None if it gets on."""
        if not self.connections:
            return None
        patience_s = self._patience_s(limits)
        nbytes = sum(one.nbytes for one in self.connections)
        signs = sum(one.signs for one in self.connections)
        beats = tuple(one.beats for one in self.connections)
        waits = any(one.waits() for one in self.connections)
        if waits or nbytes - self._nbytes >= limits.least_bytes_s * patience_s:
            self._good = self._worked = now
            self._nbytes, self._signs, self._beats = nbytes, signs, beats
        if beats != self._beats and now - self._good < max(limits.busy_s, BUSY * patience_s):
            self._worked, self._signs, self._beats = now, signs, beats
        waited_s = now - self._worked
        if waited_s < patience_s or signs - self._signs < SIGNS or self._soon_done(nbytes, now):
            return None
        return SenderTooSlow(
            f"the KV comes too slowly: {size(nbytes)} of {size(self.expected)}, and in the last "
            f"{seconds(now - self._good)} {size(nbytes - self._nbytes)}",
            "check the prefill host and the link to it; `disagg doctor` measures both",
        )

    def _patience_s(self, limits: ReceiveLimits) -> float:
        if self.elsewhere_s is None:
            return limits.busy_s
        return max(limits.patience_s, self.elsewhere_s)

    def _soon_done(self, nbytes: int, now: float) -> bool:
        """Whether the rest, at the pace since `_good`, arrives before it would in another way."""
        rate = (nbytes - self._nbytes) / max(now - self._good, 1e-3)
        rest = max(1, self.expected - nbytes)
        return self.elsewhere_s is not None and rate > 0 and rest / rate <= self.elsewhere_s
