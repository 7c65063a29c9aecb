"""How long each end of a transfer waits for what, and how much a peer may use. The whole transfer is bounded by its
deadline on the sender and by its ticket's on the receiver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SendLimits:
    """Seconds. connect_s: for the connection. answer_s: for the receiver's reply to the preamble, and to the header.
    stall_s: while bytes wait to be sent and the receiver takes none, or until it acknowledges the last one. idle_s:
    between two idle frames while there is no KV to send. max_queued_bytes: the most that may wait to be sent."""

    connect_s: float = 3.0
    answer_s: float = 5.0
    stall_s: float = 5.0
    idle_s: float = 0.25
    max_queued_bytes: int = 16 << 30


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """Seconds. preamble_s: for the preamble. proof_s: from then for the sender's proof. header_s: for the whole header.
    stall_s: without any byte or idle frame, of which a sender that waits for KV sends four per second. linger_s: for
    reading the last reply.

    A sender that sends and gets nowhere is given up, see `Pace`. patience_s: the least time below least_bytes_s bytes
    per second. busy_s: the same if no other way is known in which the KV could come, and the least time for which an
    engine that works for other prompts is waited for.

    connections: with a proven ticket, at the same time; one more is refused with Overloaded. newcomers: that have named
    no valid ticket yet; newcomers_per_address: of one address. One newcomer more ends the oldest one. Of those that
    have named a ticket and not proven it there are at most `connections`, too.
    """

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
