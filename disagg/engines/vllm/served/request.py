"""A request to a `vllm serve`. A server that hangs is recognised by the time without a message about the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from disagg.engines.vllm.runs import Run
from disagg.engines.vllm.served.calls import Call
from disagg.errors import ModelError

BEGIN_S: Final = 60.0
"""Limit until vLLM begins with a prompt: it may be computing long ones of other callers."""
SILENCE_S: Final = 30.0
"""Limit between two steps of a prompt, or two tokens of an answer, which take a few seconds at most."""
PREEMPTED_S: Final = 300.0
"""Limit until the next message about a request while vLLM computes others: it may have preempted this one, taken its
blocks for them, and compute its prompt again when they end."""
SLOWEST_TOKENS_S: Final = 50.0
"""The lowest speed, tokens per second, at which a prompt is computed. Of one with an answer, nothing comes until its
first token."""


@dataclass(slots=True, eq=False)
class Request:
    """The request of a run. latest_at: when its newest message came, or when it was sent if none has come. limit_s: for
    the next message. Times are time.monotonic()."""

    run: Run
    call: Call
    latest_at: float
    limit_s: float

    def note(self, now: float) -> None:
        """A message about it has come."""
        self.latest_at, self.limit_s = now, SILENCE_S

    def judge(self, now: float, latest: float) -> None:
        """Fail the run if its next message is overdue. latest: when the newest step or token of any request came."""
        silent_s = now - self.latest_at
        busy = now - latest <= SILENCE_S
        limit_s = max(self.limit_s, PREEMPTED_S) if busy else self.limit_s
        if silent_s > limit_s and not self.run.finished:
            message = f"vllm serve has made no progress with the request for {silent_s:.0f} s"
            self.run.fail(ModelError(message, "see its log, and start it again"))
