"""The PrefillRuns of engines whose vLLM sends KV itself: a prompt whose KV is sent, and a prompt with its answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, Protocol

import numpy
import numpy.typing

from disagg import logs
from disagg.api.delivery import KVProgress, KVReport
from disagg.api.events import FinishReason
from disagg.api.sampling import Sampling
from disagg.engines.base import PrefillTiming, Token
from disagg.engines.sending.reports import Awaited, Reports
from disagg.errors import Cancelled, DisaggError, PeerLost
from disagg.kv.frames import Header
from disagg.kv.sent import ComputeStep, SentKV
from disagg.kv.transfer import Transfer

REPORT_S = 5.0  # after a transfer's deadline


class Engine(Protocol):
    """What runs need of their engine."""

    def step(self) -> None: ...

    def drop(self, run: Run) -> None: ...


class Run:
    """A PrefillRun of a prompt of `tokens` tokens. name: the id that vLLM is given; id: the one that it makes of it.
    finished: vLLM has nothing more to do for it."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine = engine
        self._tokens = tokens
        self._computed = 0
        self._held: int | None = None
        self._started = time.monotonic()
        self._steps: list[ComputeStep] = []
        self.name = secrets.token_hex(8)
        self.id = ""
        self.finished = False

    @property
    def remaining(self) -> int:
        return self._tokens - self._computed

    @property
    def done(self) -> bool:
        return self.finished

    @property
    def held(self) -> int:
        return self._held or 0

    @property
    def timing(self) -> PrefillTiming:
        """The prompt's steps. Its share of each step's time is that of its tokens."""
        return PrefillTiming(self._started, self._computed - self.held, tuple(self._steps))

    def step(self, max_tokens: int | None = None) -> None:
        """One step of all runs; vLLM's own bounds hold for its tokens."""
        self._engine.step()

    def close(self) -> None:
        self._engine.drop(self)

    def note(self, began: float, ended: float, share: KVProgress) -> None:
        """A step that had this prompt has ended."""
        if self._held is None:
            self._held, self._started = min(share.before, self._tokens), began
        if self.remaining:
            self._computed = min(share.after, self._tokens)
            self._steps.append(ComputeStep(began, ended, share.share))

    def take(self, output: Any, began: float, ended: float) -> None:
        """What vLLM has for this request after a step. Does not raise: the step is also that of others."""
        self.finished = bool(output.finished)

    def fail(self, error: DisaggError) -> None:
        """vLLM will have nothing more for this request."""
        self.finished = True


class SentPromptRun(Run):
    """A SendingRun: the KV of the prompt leaves from vLLM's workers, which report to `awaited`."""

    def __init__(self, engine: Engine, tokens: int, awaited: Awaited, reports: Reports, deadline: float) -> None:
        super().__init__(engine, tokens)
        self._awaited, self._reports = awaited, reports
        self._deadline = deadline
        self._closed = False

    @property
    def timing(self) -> PrefillTiming:
        """vLLM goes on after the last rows, with a token that nobody needs: they are ready earlier, as
        is known once all workers have reported."""
        timing, ready = super().timing, self._awaited.computed
        if ready is None:
            return timing
        steps = tuple(replace(one, ended=min(one.ended, ready)) for one in timing.steps if one.began < ready)
        return replace(timing, steps=steps)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, also if the transfer has failed: `sent` then raises why."""
        done = self._awaited.done
        return self.finished or (done.done() and done.exception() is not None)

    def take(self, output: Any, began: float, ended: float) -> None:
        """No worker reports anything of a prompt that vLLM gave up before its first step."""
        super().take(output, began, ended)
        if (error := refusal(output.outputs[0].finish_reason)) is not None:
            self._awaited.fail(error)

    def fail(self, error: DisaggError) -> None:
        super().fail(error)
        self._awaited.fail(error)

    def sent(self) -> SentKV:
        try:
            reports = self._awaited.done.result(max(0.0, self._deadline - time.monotonic()) + REPORT_S)
        except FutureTimeout:
            raise PeerLost("vLLM did not report the end of a KV transfer by its deadline") from None
        if len(reports) > 1:
            logs.info("kv_of_ranks", kv_bytes=[report.kv_bytes for report in reports])
        sent = combined(reports)
        # A worker's steps end where its next ones begin, by its own clock: a little later than those of the engine.
        return replace(sent, hidden_s=min(sent.hidden_s, self.timing.compute_s))

    def close(self) -> None:
        """Workers that still send give the transfer up."""
        if not self._closed:
            self._closed = True
            try:
                super().close()
            finally:  # before the workers' connections end, which would fail it with PeerLost
                self._awaited.fail(Cancelled("the request was cancelled before its KV was sent"))
                self._reports.drop(self._awaited)


def combined(reports: Sequence[KVReport]) -> SentKV:
    """The parts of one transfer, which were sent at the same time. Its times are those of the part that was waited for
    the longest."""
    rates, last = [report.link_bytes_s for report in reports], max(reports, key=lambda report: report.exposed_s)
    return SentKV(
        payload_bytes=sum(report.kv_bytes for report in reports),
        hidden_s=last.hidden_s,
        exposed_s=last.exposed_s,
        link_bytes_s=None if None in rates else sum(rate for rate in rates if rate is not None),
        acknowledged=time.monotonic(),
    )


class EmptyRun:
    """A PrefillRun with nothing to do."""

    def __init__(self) -> None:
        self.remaining = self.held = 0
        self.done = True
        self.timing = PrefillTiming(time.monotonic(), 0)

    def step(self, max_tokens: int | None = None) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing is held."""


class NothingToCompute(EmptyRun):
    """A SendingRun for a prompt whose KV the decode host has already, but for the last token: the transfer is empty."""

    def __init__(self, to: tuple[str, int], header: Header, deadline: float) -> None:
        self._transfer = Transfer(*to, header, deadline=deadline)
        super().__init__()
        self.held = header.tokens

    def sent(self) -> SentKV:
        return self._transfer.finish().sent(self.timing.started, ())

    def close(self) -> None:
        self._transfer.abort()


class AnswerRun(Run):
    """A PrefillRun of a prompt and its answer."""

    def __init__(self, engine: Engine, tokens: int, emit: Callable[[Token], None], sampling: Sampling) -> None:
        super().__init__(engine, tokens)
        self._emit = emit
        self._top = sampling.logprobs or 0
        self._timing: PrefillTiming | None = None
        self._failure: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the answer is complete; not if it has failed: its next step then raises why."""
        return self.finished and self._failure is None

    @property
    def remaining(self) -> int:
        """The last token of the prompt is computed with the first one of the answer."""
        return max(0, self._tokens - 1 - self._computed)

    @property
    def timing(self) -> PrefillTiming:
        """The prompt's timing, with the first token of the answer as its last step."""
        return self._timing or super().timing

    def step(self, max_tokens: int | None = None) -> None:
        if self._failure is not None:
            raise self._failure
        super().step(max_tokens)

    def take(self, output: Any, began: float, ended: float) -> None:
        super().take(output, began, ended)
        self._timing = self._timing or self.timing
        if self._failure is not None:
            return
        try:
            self._pass_on(output.outputs[0])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this run's own
            self._failure = error

    def fail(self, error: DisaggError) -> None:
        super().fail(error)
        self._failure = self._failure or error

    def _pass_on(self, answer: Any) -> None:
        if (error := refusal(answer.finish_reason)) is not None:
            raise error
        for index, (id, logprobs) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            last = self.finished and index == len(answer.token_ids) - 1
            reason: FinishReason = "length" if answer.finish_reason == "length" else "stop"
            ranked = sorted(logprobs.items(), key=lambda one: -one[1].logprob)[: self._top]
            top = tuple((other, value.logprob) for other, value in ranked)
            self._emit(Token(id, logprobs[id].logprob, top, reason if last else None))


class LogitsRun(Run):
    """A run of `tokens` that ends with the first token after them. row: the log-probabilities of all tokens there."""

    def __init__(self, engine: Engine, tokens: Sequence[int]) -> None:
        super().__init__(engine, len(tokens))
        self.tokens = tokens
        self._row: numpy.typing.NDArray[numpy.float32] | None = None

    @property
    def row(self) -> numpy.typing.NDArray[numpy.float32]:
        """[vocab]. DisaggError if vLLM ended the request without them."""
        if self._row is None:
            raise DisaggError("vLLM ended a request without log-probabilities", "see the server's log")
        return self._row

    def take(self, output: Any, began: float, ended: float) -> None:
        super().take(output, began, ended)
        found = output.outputs[0].logprobs
        if found:
            self._row = numpy.full(max(found.token_ids) + 1, -numpy.inf, numpy.float32)
            self._row[found.token_ids] = found.logprobs


def refusal(reason: str | None) -> DisaggError | None:
    """The error of a request that vLLM ended for this reason; None if it goes on, or is complete."""
    if reason not in ("error", "abort"):
        return None
    return DisaggError(f"vLLM ended the request with {reason!r}", "see the server's log")
