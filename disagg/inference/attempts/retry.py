"""The retry policy: which hosts to try for one request, in which order, and what a failure rules out. Pure.

    prefill host fails   -> once more, on another prefill host if there is one -> the decode host computes the prompt
    prefill host is busy -> another one -> wait for it: to compute the prompt elsewhere would slow down everybody
    decode host fails    -> the next decode host that serves the model -> a whole-request host, if nothing of the answer
                            has arrived yet -> a prefill host, alone
    whole-request host fails -> another one; in mid-answer the request fails, as no server goes on at a token
    decode host is busy  -> another one -> wait for it
    request is too large -> another decode host, whose KV memory may be larger
    request is wrong     -> fail, if the host that was to answer finds so
    no host is up        -> wait a while for one
    the model is on no host, or no host can load it -> fail, with the reason
    no host ever was up, and nothing listens on any of their ports -> fail at once: the fleet is not started

An answer that was cut off goes on with the next attempt. `attempts` is the whole table for one look at the fleet. A
failure does not change it; it rules out attempts that would fail in the same way. If none is left, `after` decides
between waiting for another look and giving up.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from disagg.config import Host
from disagg.errors import (
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    HandoffError,
    InvalidAnswer,
    KVMemoryExceeded,
    Overloaded,
    RequestEndedHosts,
    RequestError,
    ServerNotRunning,
    ServerRefused,
    ServerSilent,
    ServerUnavailable,
)
from disagg.inference.attempt import Attempt, Reason
from disagg.inference.hosts.route import Ranking
from disagg.inference.hosts.view import LASTING
from disagg.inference.policy import RetryPolicy

STATED = 6  # hosts that an error names
LOOK_AGAIN_S = 0.25  # while no host is up: costs nothing but a look at the view


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed, and the host to blame: the prefill or the decode host. begun: some of the answer had
    arrived."""

    attempt: Attempt
    side: Literal["prefill", "decode"]
    error: DisaggError
    begun: bool = False

    @property
    def final(self) -> bool:
        """Whether no other attempt could succeed. The request is too late, the host that was to answer finds that it is
        wrong, or no host can go on after what a whole-request host has sent. A prefill host that finds the request
        wrong may merely be configured in another way than the others."""
        wrong = isinstance(self.error, RequestError) and self.answering and not self.too_large
        wrong = wrong or isinstance(self.error, RequestEndedHosts)
        cut = self.attempt.method == "whole" and self.begun
        return wrong or cut or isinstance(self.error, DeadlineExceeded)

    @property
    def too_large(self) -> bool:
        """Whether the request never fits the KV memory of the host; it may fit that of another one."""
        return isinstance(self.error, KVMemoryExceeded)

    @property
    def busy(self) -> bool:
        return isinstance(self.error, Overloaded)

    @property
    def passing(self) -> bool:
        """Whether the host may be well again in a moment."""
        lasting = ServerRefused | InvalidAnswer
        return isinstance(self.error, ServerUnavailable | Cancelled) and not isinstance(self.error, lasting)

    @property
    def answering(self) -> bool:
        """Whether the host to blame is the one that was to generate the answer."""
        return self.side == "decode" or self.attempt.method == "prefill-alone"

    @property
    def host(self) -> Host:
        """The host to blame."""
        host = self.attempt.prefill if self.side == "prefill" else self.attempt.decode
        assert host is not None, "a host that failed was tried"
        return host


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that is kept, and of its causes. Their frames hold all that the attempt had, such
    as its prompt."""
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            errors += (one.__cause__, one.__context__)


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, then look at the fleet again. reason: what is waited for. limited: by `Timeouts.none_up`, else by the
    deadline only. error: to raise if the time is over. detail: more of the reason, which may differ at every look."""

    seconds: float
    reason: str
    limited: bool
    error: DisaggError
    detail: str = ""


def attempts(ranking: Ranking, policy: RetryPolicy) -> Iterator[Attempt]:
    """Every attempt that the policy allows for hosts ranked so, best first."""
    prefills, alone = [choice.host for choice in ranking.prefill], ranking.candidates.alone
    reason: Reason = "first choice"
    for decode in ranking.decode:
        if not ranking.candidates.prefill:
            yield Attempt("decode-alone", decode.host, None, reason)
        else:
            for prefill in (prefills * policy.prefill_attempts)[: policy.prefill_attempts]:
                yield Attempt("disaggregated", decode.host, prefill, reason)
                reason = "prefill failed"
            if policy.on_kv_failure == "fallback":
                yield Attempt("fallback", decode.host, None, "prefill failed" if prefills else "no prefill host is up")
        reason = "decode host failed"
    reason = "first choice" if alone else "no decode host is left"
    for whole in ranking.whole:
        yield Attempt("whole", whole.host, None, reason)
    for prefill in prefills:
        if prefill.answers:
            yield Attempt("prefill-alone", None, prefill, reason)


def remaining(
    ranking: Ranking, policy: RetryPolicy, failures: Sequence[Failure], *, begun: bool = False
) -> Iterator[Attempt]:
    """The attempts that no failure rules out. `failures` may grow between two attempts. begun: some of the answer had
    arrived before them."""
    for attempt in attempts(ranking, policy):
        if any(_same(failure, attempt) for failure in failures):
            continue
        if attempt.method == "whole" and (begun or any(failure.begun for failure in failures)):
            continue
        if _allowed(attempt, ranking, policy, failures):
            yield attempt


def _same(failure: Failure, later: Attempt) -> bool:
    """Whether `later` would fail in the same way. It uses a decode host that failed, or a prefill host that is busy,
    refuses the request, or did not answer in time, so that asking it again would only take as long again."""
    if failure.side == "decode":
        return later.decode == failure.attempt.decode
    if later.prefill != failure.attempt.prefill:
        return False
    if later.method == "prefill-alone":  # for a failed transfer the decode host may be to blame
        return failure.attempt.method == "prefill-alone" or not isinstance(failure.error, HandoffError)
    return isinstance(failure.error, ServerSilent | Overloaded | RequestError)


def _allowed(attempt: Attempt, ranking: Ranking, policy: RetryPolicy, failures: Sequence[Failure]) -> bool:
    hosts, undelivered = ranking.candidates, [failure for failure in failures if failure.side == "prefill"]
    if attempt.method == "disaggregated":
        return sum(not failure.busy for failure in undelivered) < policy.prefill_attempts
    if attempt.method == "fallback":
        return not any(failure.busy for failure in undelivered) and (
            bool(ranking.prefill) or not ranking.waits_for(hosts.prefill)
        )
    if attempt.method in ("whole", "prefill-alone") and hosts.alone is None:
        undone = [failure for failure in failures if failure.side == "decode" and not failure.busy]
        failed = {failure.host.name for failure in undone if not failure.too_large}
        return not ranking.waits_for(hosts.decode) and all(choice.host.name in failed for choice in ranking.decode)
    return True


def after(ranking: Ranking, policy: RetryPolicy, failures: Sequence[Failure], earlier: Sequence[Failure] = ()) -> Pause:
    """What follows if no attempt is left. Raises the request's error if waiting would not help.

    earlier: failures before the last look at the fleet, for the error.
    """
    hosts, role = ranking.candidates, ranking.candidates.alone or "decode"
    undelivered = [failure for failure in failures if failure.side == "prefill" and not failure.busy]
    busy = [failure for failure in failures if failure.busy]
    spent = len(undelivered) >= policy.prefill_attempts or not busy
    if policy.on_kv_failure == "fail" and hosts.alone is None and undelivered and spent:
        raise _kv_failure(undelivered)
    error = final_error(ranking, (*earlier, *failures))
    if ranking.unseen and ranking.unseen <= _not_running(failures) | ranking.refused:
        if not ranking.whole:
            error.hint = "the fleet is not started: run `disagg start`"
        raise error
    answering = {"decode": hosts.decode, "prefill": hosts.prefill, "whole": hosts.whole}[role]
    if ranking.cannot_serve(answering) and not failures:
        raise error
    if busy:
        error = Overloaded(f"every host was busy until the request's deadline: {_messages(busy)}", "try again later")
        seconds = min(float(failure.error.retry_after_s) for failure in busy if isinstance(failure.error, Overloaded))
        return Pause(seconds, f"{busy[0].host.name} is busy", False, error, busy[0].error.message)
    if waits := ranking.waits_for(hosts.decode) or ranking.waits_for(hosts.prefill):
        return Pause(LOOK_AGAIN_S, waits, False, error)
    if policy.on_kv_failure == "fail" and ranking.decode and not undelivered and not ranking.prefill:
        return Pause(LOOK_AGAIN_S, f"no prefill host of {hosts.model} is up", True, error)
    if all(failure.passing for failure in failures if failure.answering):
        return Pause(LOOK_AGAIN_S, f"no {role} host of {hosts.model} is up", True, error)
    raise error


def _not_running(failures: Sequence[Failure]) -> set[str]:
    return {failure.host.name for failure in failures if isinstance(failure.error, ServerNotRunning)}


def _kv_failure(failures: Sequence[Failure]) -> DisaggError:
    last = failures[-1].error
    return HandoffError(f"the KV hand-off failed: {_messages(failures)}", last.hint or "run `disagg status`")


def final_error(ranking: Ranking, failures: Sequence[Failure]) -> DisaggError:
    """The one error of a request for which no attempt is left."""
    hosts = ranking.candidates
    if hosts.alone in ("prefill", "whole"):
        missing = f"no {hosts.alone} host of {hosts.model} is up"
        return failures[-1].error if failures else ServerUnavailable(missing, _HINT)
    decode = [failure for failure in failures if failure.answering]
    if decode and all(failure.too_large for failure in decode):
        return decode[-1].error
    hint = next((failure.error.hint for failure in reversed(decode) if failure.error.hint), _hint(ranking))
    messages = _messages(decode) or _none_up(ranking)
    return ServerUnavailable(f"Decode server unavailable - request failed: {messages}", hint)


def _hint(ranking: Ranking) -> str:
    model = shlex.quote(ranking.candidates.model)
    states = {reason.partition(":")[0] for reason in ranking.left_out.values()}
    if states == {"absent"}:
        return f"disagg models pull {model}"
    if states and states <= {*LASTING}:
        return f"remove the cause, then run `disagg models load {model}`"
    return _HINT


_HINT = "run `disagg status`; `disagg start` starts what is stopped"


def _none_up(ranking: Ranking) -> str:
    left_out = [f"{name}: {reason}" for name, reason in islice(ranking.left_out.items(), STATED)]
    return f"no decode host of {ranking.candidates.model} is up" + (f" ({', '.join(left_out)})" if left_out else "")


def _messages(failures: Sequence[Failure]) -> str:
    """The message of each failure, once."""
    return "; ".join(dict.fromkeys(failure.error.message for failure in failures))
