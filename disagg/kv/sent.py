"""What a finished transfer took: the times of its frames, and what follows from them about the link and the prompt.

Hidden: sending while the prompt was computed. Exposed: the time in which the prompt waited for the link and was not
computed, and from the end of its computation to the acknowledgement. What is sent while the engine computes other
prompts, and this one waits for its turn, is neither.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

RATED_BYTES = 64 << 20  # for a rate: many times both ends' socket buffers, whose bytes are sent but not delivered


@dataclass(frozen=True, slots=True)
class Span:
    """The sending of one frame: time.monotonic() before and after, and its payload bytes."""

    began: float
    ended: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """A step of an engine that computed a part of a prompt, by time.monotonic(). share: the prompt's part of it; the
    rest went to others."""

    began: float
    ended: float
    share: float = 1.0

    @property
    def seconds(self) -> float:
        """What the prompt had of it."""
        return self.share * (self.ended - self.began)


@dataclass(frozen=True, slots=True)
class LinkWait:
    """A prompt that waited for the link: from `since`, time.monotonic(), it was not computed further until so many more
    bytes were sent."""

    since: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class SentKV:
    """What an acknowledged transfer took, beside the computation. waited_s: the part of exposed_s before the
    computation ended. acknowledged: time.monotonic(). link_bytes_s: the rate of the link, if the transfer was bound by
    it. carried_bytes_s: the link has at least this rate; None if the transfer was too short to tell."""

    payload_bytes: int
    hidden_s: float
    exposed_s: float
    link_bytes_s: float | None
    acknowledged: float
    waited_s: float = 0.0
    carried_bytes_s: float | None = None


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

    def sent(self, ended: float, steps: Sequence[ComputeStep], waits: Sequence[LinkWait] = ()) -> SentKV:
        """The transfer beside the computation of its prompt, which took these steps and ended then. waits: those of the
        computation for the link. Steps and waits in order; no two steps overlap."""
        waited_s = self._waited_s(ended, steps, waits)
        return SentKV(
            payload_bytes=self.payload_bytes,
            hidden_s=self._hidden_s(steps),
            exposed_s=waited_s + max(0.0, self.acknowledged - ended),
            link_bytes_s=self.link_bytes_s,
            acknowledged=self.acknowledged,
            waited_s=waited_s,
            carried_bytes_s=self._carried_bytes_s(ended, steps),
        )

    def _carried_bytes_s(self, ended: float, steps: Sequence[ComputeStep]) -> float | None:
        """Payload bytes per second of the time in which the prompt was computed or sent. A transfer that kept up has no
        other rate, and a link that was slow for a while would be taken to be so for as long as it keeps up."""
        if self.payload_bytes < RATED_BYTES:
            return None
        sending = sum(span.ended - span.began for span in self.spans)
        computing = sum(step.ended - step.began for step in steps)
        both = self._hidden_s([replace(step, share=1.0) for step in steps])
        last = max(ended, self.spans[-1].ended)
        return self.payload_bytes / (computing + sending - both + max(0.0, self.acknowledged - last))

    def _hidden_s(self, steps: Sequence[ComputeStep]) -> float:
        """Seconds of sending within the steps, of each the prompt's share."""
        seconds, first = 0.0, 0
        for step in steps:
            while first < len(self.spans) and self.spans[first].ended <= step.began:
                first += 1
            while first < len(self.spans) and (span := self.spans[first]).began < step.ended:
                seconds += step.share * (min(span.ended, step.ended) - max(span.began, step.began))
                if span.ended > step.ended:
                    break  # the rest of it may be in the next step
                first += 1
        return seconds

    def _waited_s(self, ended: float, steps: Sequence[ComputeStep], waits: Sequence[LinkWait]) -> float:
        """Seconds of waiting for the link. A wait lasts until its bytes are sent: after that the prompt waits for its
        turn; and not beyond the next step."""
        seconds, at = 0.0, 0
        for wait in waits:
            left = wait.nbytes
            while left > 0 and at < len(self.spans):
                left -= self.spans[at].nbytes if self.spans[at].ended > wait.since else 0
                at += 1
            sent = self.spans[at - 1].ended if at else wait.since
            following = bisect_left(steps, wait.since, key=lambda step: step.began)
            going_on = steps[following].began if following < len(steps) else ended
            seconds += max(0.0, min(sent, going_on) - wait.since)
        return seconds
