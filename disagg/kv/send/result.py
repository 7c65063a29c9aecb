"""What a finished transfer took: the times of its frames, and what follows from them about the link."""

from __future__ import annotations

from dataclasses import dataclass

RATED_BYTES = 64 << 20  # for a rate: many times both ends' socket buffers, whose bytes are sent but not delivered


@dataclass(frozen=True, slots=True)
class Span:
    """The sending of one frame: time.monotonic() before and after, and its payload bytes."""

    began: float
    ended: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class SentKV:
    """What an acknowledged transfer took, beside the computation. See TransferResult."""

    payload_bytes: int
    hidden_s: float
    exposed_s: float
    link_bytes_s: float | None
    acknowledged: float


@dataclass(frozen=True, slots=True)
class TransferResult:
    """An acknowledged transfer. Times are time.monotonic() on the sending host.

    backlog: the spans from this index on were sent without waiting for KV between them.
    """

    acknowledged: float
    spans: tuple[Span, ...]
    backlog: int = 0

    @property
    def payload_bytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    @property
    def link_bytes_s(self) -> float | None:
        """Bytes per second of the link and the receiver. From the start of the last stretch without a wait for KV to
        the acknowledgement. None if that stretch is shorter than RATED_BYTES, as it is if the transfer kept up with the
        computation."""
        stretch = self.spans[self.backlog :]
        nbytes = sum(span.nbytes for span in stretch)
        return nbytes / (self.acknowledged - stretch[0].began) if nbytes >= RATED_BYTES else None

    def hidden_s(self, compute_ended: float) -> float:
        """Seconds spent sending before the compute ended: the part of the transfer that delays nothing."""
        return sum(max(0.0, min(span.ended, compute_ended) - span.began) for span in self.spans)

    def exposed_s(self, compute_ended: float) -> float:
        """Seconds from the end of compute to the acknowledgement: the part of the transfer that the user waits for."""
        return max(0.0, self.acknowledged - compute_ended)

    def sent(self, compute_ended: float) -> SentKV:
        """The transfer beside a computation that ended at this time."""
        hidden_s, exposed_s = self.hidden_s(compute_ended), self.exposed_s(compute_ended)
        return SentKV(self.payload_bytes, hidden_s, exposed_s, self.link_bytes_s, self.acknowledged)
