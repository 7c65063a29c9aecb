"""Whether a `vllm serve` gets on: each request, by the time without a message about it; and whether it answers at all,
asked every second beside them.

A process that is stopped, or that hangs, keeps its connections: a request to it would wait until its own limits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from disagg.engines.sending.runs import Run
from disagg.engines.vllm.served.calls import Call
from disagg.errors import DisaggError, ModelError

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


HEALTH: Final = "/health"
EVERY_S: Final = 1.0
LIMIT_S: Final = 8.0
"""How long an answer may take: a server that tokenises long prompts, or writes many answers, may take seconds."""
FAILURES: Final = 2
"""Failures in a row after which the server is given up."""


class Pulse:
    """Asks on a thread of its own until `close`, or until a server has not answered. ask: once, within so many seconds;
    raises DisaggError without an answer. on_end: called once with the last error."""

    def __init__(
        self,
        ask: Callable[[float], object],
        on_end: Callable[[DisaggError], None],
        *,
        every_s: float = EVERY_S,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._ask, self._on_end = ask, on_end
        self._every_s, self._limit_s = every_s, limit_s
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="vllm-pulse", daemon=True).start()

    def close(self) -> None:
        """Ask no more. Does not wait; `on_end` is not called by what is asked just now."""
        self._closed.set()

    def _run(self) -> None:
        failures = 0
        while not self._closed.wait(self._every_s):
            try:
                self._ask(self._limit_s)
                failures = 0
            except DisaggError as error:
                failures += 1
                if failures >= FAILURES:
                    if not self._closed.is_set():
                        self._on_end(error)
                    return
