"""The SendingRun of a prompt that a `vllm serve` computes."""

from __future__ import annotations

from disagg.api.delivery import KVProgress
from disagg.engines.vllm.reports import Awaited, Reports
from disagg.engines.vllm.rows import StepShare
from disagg.engines.vllm.runs import Engine, PromptRun, refusal
from disagg.engines.vllm.served.forms import START_COMMAND, finish_reason, order_answer
from disagg.errors import DisaggError, ModelError


class ServedPrompt(PromptRun):
    """A PromptRun whose steps are known from the workers' reports. A step lasts until the next one of the same prompt
    begins, or until the answer comes: the GPU may still compute when the worker has launched all of a step."""

    def __init__(self, engine: Engine, tokens: int, awaited: Awaited, reports: Reports, deadline: float) -> None:
        super().__init__(engine, tokens, awaited, reports, deadline)
        self._running: tuple[KVProgress, float] | None = None  # the newest step, and when it began

    def begin_step(self, progress: KVProgress, now: float) -> None:
        """A worker has begun a step. Those of several ranks are one."""
        if self.finished:
            return
        if self._running is None or progress.before >= self._running[0].after:
            self._end_step(now)
            self._running = progress, now

    def take_end(self, ended: bytes | DisaggError, now: float) -> None:
        """vLLM has answered: the prompt is computed, or will not be."""
        try:
            if isinstance(ended, DisaggError):
                raise ended
            if (answer := order_answer(ended)) is None:
                raise ModelError("this vllm serve has no connector of disagg", f"start it as in {START_COMMAND}")
            if answer.error is not None:
                raise DisaggError.from_json(answer.error)
            if (error := refusal(finish_reason(ended))) is not None:
                raise error
        except DisaggError as failure:
            self.fail(failure)
            return
        if self._running is None:  # no report has come before the answer
            self._running = KVProgress(0, self._tokens, 1.0), self._started
        self._end_step(now)
        self._computed = self._tokens
        self.finished = True

    def _end_step(self, now: float) -> None:
        if self._running is not None:
            step, began = self._running
            self.note(began, now, StepShare(step.before, step.after, step.share))
