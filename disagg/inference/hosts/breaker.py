"""A circuit breaker: a host that fails gets no requests for a while, then one to find out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagg.errors import (
    Cancelled,
    CapabilityMissing,
    DeadlineExceeded,
    DisaggError,
    HandoffError,
    KVRefuted,
    Overloaded,
    ProtocolError,
    RequestError,
    SenderTooSlow,
    ServerUnavailable,
)

FIRST_S, LONGEST_S = 1.0, 30.0
FAILURES_IF_UNREACHABLE = 1
FAILURES_IF_IT_ANSWERS = 3  # one request that no engine can serve does not eject its host


@dataclass(frozen=True, slots=True)
class Breaker:
    """One host's breaker; every event gives its next value. Times are time.monotonic().

    failures, ejections: in a row. until: the host gets no requests before this time. probing: one request runs to find
    out whether the host is well again. answering: one has got a token since, so that others need not wait for its end;
    the next failure still ejects the host for longer. refuted: KV that it sent was, or it refuted others'; only KV that
    passes an audit is a success then.

    Requests may end long after the breaker has changed. `ejection` is what `until` was when a request began: one that
    began before the last ejection says nothing about the host since.
    """

    failures: int = 0
    ejections: int = 0
    until: float = 0.0
    probing: bool = False
    answering: bool = False
    refuted: bool = False

    def closed_for(self, now: float) -> float:
        """Seconds until the host may get a request; 0 if it may now."""
        return max(self.until - now, FIRST_S if self.probing else 0.0)

    def began(self) -> Breaker:
        """A request was sent to the host."""
        return replace(self, probing=True) if self.ejections and not self.answering else self

    def began_to_answer(self, ejection: float) -> Breaker:
        """The first token of a request's answer has arrived."""
        return replace(self, probing=False, answering=True) if self.ejections and ejection == self.until else self

    def ended(self, ejection: float) -> Breaker:
        """A request ended without a verdict about the host."""
        return replace(self, probing=False) if self.probing and ejection == self.until else self

    def succeeded(self, *, audited: bool = False) -> Breaker:
        """The host completed a request: all failures are forgotten. audited: KV that it sent or received was."""
        return replace(self, probing=False) if self.refuted and not audited else CLOSED

    def failed(self, error: DisaggError, now: float, jitter: float, ejection: float) -> Breaker:
        """The host failed a request. Each further ejection is twice as long, times 0.5 to 1.0 by `jitter` (0 to 1)."""
        if not counts(error):
            return self.ended(ejection)
        failures, refuted = self.failures + 1, self.refuted or isinstance(error, KVRefuted)
        unreachable = isinstance(error, ServerUnavailable)
        if not self.ejections and failures < (FAILURES_IF_UNREACHABLE if unreachable else FAILURES_IF_IT_ANSWERS):
            return replace(self, failures=failures, refuted=refuted)
        if ejection != self.until or now < self.until:  # it was under way or already decided on at the ejection
            still = self.probing and ejection != self.until
            return replace(self, failures=failures, refuted=refuted, probing=still)
        seconds = min(LONGEST_S, FIRST_S * 2**self.ejections) * (0.5 + jitter / 2)
        return Breaker(failures, self.ejections + 1, now + seconds, refuted=refuted)


CLOSED = Breaker()


def counts(error: DisaggError) -> bool:
    """Whether an error says something about the host. Not a failed transfer, for which either end may be to blame,
    unless it says who is."""
    if isinstance(error, KVRefuted | ProtocolError | SenderTooSlow):
        return True
    of_the_request = RequestError | CapabilityMissing | Cancelled | DeadlineExceeded | Overloaded
    return not isinstance(error, of_the_request | HandoffError)
