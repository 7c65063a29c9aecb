"""The retry policy: which hosts to try for one request, in which order, and what a failure rules out. Pure.

    prefill host fails  -> once more, on another prefill host if there is one -> the decode host computes the prompt
    decode host fails   -> the next decode host that serves the model

`attempts` is the whole table. A failure does not change it; it rules out attempts that would fail in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from disagg.config import Host
from disagg.errors import Cancelled, DisaggError, Overloaded, RequestError, ServerSilent, ServerUnavailable
from disagg.inference.metrics import Method
from disagg.inference.route import Route

Reason = Literal["first choice", "prefill failed", "decode host failed"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """prefill_attempts: hand-offs that are tried per decode host before it computes the prompt itself."""

    prefill_attempts: int = 2


DEFAULT_POLICY = RetryPolicy()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to run a request. `reason`: why this one is tried."""

    method: Method
    decode: Host | None
    prefill: Host | None
    reason: Reason = "first choice"


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed before its first token, and the host to blame: the prefill or the decode host."""

    attempt: Attempt
    side: Literal["prefill", "decode"]
    error: DisaggError

    @property
    def retryable(self) -> bool:
        """Whether another attempt could succeed: not if the request itself is wrong or was cancelled."""
        if self.attempt.method == "prefill-alone":
            return False
        if self.side == "prefill":
            return not isinstance(self.error, RequestError | Cancelled)
        return isinstance(self.error, ServerUnavailable | Overloaded)

    def rules_out(self, later: Attempt) -> bool:
        """Whether `later` would fail in the same way: it uses a decode host that failed, or a prefill host that did
        not answer in time, so that asking it again would only take as long again."""
        if self.side == "decode":
            return later.decode == self.attempt.decode
        return isinstance(self.error, ServerSilent) and later.prefill == self.attempt.prefill


def attempts(route: Route, policy: RetryPolicy) -> Iterator[Attempt]:
    """Every attempt that the policy allows for this route, best first.

    A route without decode hosts runs on its first prefill host alone, one without prefill hosts on a decode host alone.
    """
    if not route.decode:
        yield Attempt("prefill-alone", None, route.prefill[0])
        return
    reason: Reason = "first choice"
    for decode in route.decode:
        if not route.prefill:
            yield Attempt("decode-alone", decode, None, reason)
        else:
            for prefill in (route.prefill * policy.prefill_attempts)[: policy.prefill_attempts]:
                yield Attempt("disaggregated", decode, prefill, reason)
                reason = "prefill failed"
            yield Attempt("fallback", decode, None, reason)
        reason = "decode host failed"


def remaining(table: Iterator[Attempt], failures: Sequence[Failure]) -> Iterator[Attempt]:
    """The attempts of `table` that no failure rules out. `failures` may grow between two attempts."""
    for attempt in table:
        if not any(failure.rules_out(attempt) for failure in failures):
            yield attempt
