"""A request to a `vllm serve`, which may hang as any server may: its silence is then all that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from disagg.engines.vllm.runs import Run
from disagg.engines.vllm.served.calls import Call
from disagg.errors import ModelError

BEGIN_S: Final = 60.0
"""Until vLLM begins with a prompt: it may be computing long ones of other callers."""
SILENCE_S: Final = 30.0
"""Between two steps of a prompt, or two tokens of an answer, which take a few seconds at most."""
PASSED_OVER_S: Final = 300.0
"""For the next message about a request while vLLM computes others: it may have taken this one's blocks for them,
and computes its prompt again when they end."""
SLOWEST_TOKENS_S: Final = 50.0
"""At which prompts are computed. Of one with an answer, nothing comes until its first token."""


@dataclass(slots=True, eq=False)
class Request:
    """Of a run. heard: when its newest message came, or else it was sent. limit_s: for the next message. Times are
    time.monotonic()."""

    run: Run
    call: Call
    heard: float
    limit_s: float

    def note(self, now: float) -> None:
        """A message about it has come."""
        self.heard, self.limit_s = now, SILENCE_S

    def judge(self, now: float, latest: float) -> None:
        """Fail the run if its next message is overdue. latest: when the newest step or token of any request came."""
        silent_s = now - self.heard
        busy = now - latest <= SILENCE_S
        limit_s = max(self.limit_s, PASSED_OVER_S) if busy else self.limit_s
        if silent_s > limit_s and not self.run.finished:
            message = f"vllm serve has made no progress with the request for {silent_s:.0f} s"
            self.run.fail(ModelError(message, "see its log, and start it again"))
