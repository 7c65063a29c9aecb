"""Whether an engine that runs also works: judged by its requests and by self-tests. Pure.

Times are time.monotonic().
"""

from __future__ import annotations

import asyncio

from disagg.errors import Cancelled, DisaggError, ModelError

FAILURES_IN_A_ROW = 3
IDLE_TEST_S = 60.0  # an engine that has shown nothing for this long is tested
FAULT_TEST_S = 5.0  # between two tests of an engine that does not work
TEST_LIMIT_S = 10.0
"""Of a test, unless the engine states another limit."""


class EngineHealth:
    """The fault of one engine, found by requests or by a self-test, and removed by a self-test only.

    Errors of a single request may be the request's; FAILURES_IN_A_ROW errors of the engine with no answer in between
    are the engine's.
    """

    def __init__(self, now: float) -> None:
        self.fault = ""
        self.dead = False
        self._failures = 0
        self._worked_at = now
        self._tested_at = float("-inf")

    def request_ended(self, error: BaseException | None, now: float) -> None:
        """A request was answered (None), or ended with an error."""
        if error is None:
            self._failures = 0
            self._worked_at = now
        elif is_engine_error(error):
            self._failures += 1
            if self._failures >= FAILURES_IN_A_ROW and not self.fault:
                self.fault = f"its last {self._failures} requests failed in the engine: {_reason(error)}"

    def test_due(self, now: float, busy: bool) -> bool:
        """Whether the engine is to be tested now. busy: it has requests, which test it."""
        if self.dead:
            return False
        if self.fault:
            return now - self._tested_at >= FAULT_TEST_S
        return not busy and now - max(self._worked_at, self._tested_at) >= IDLE_TEST_S

    def tested(self, error: BaseException | None, now: float) -> None:
        """A self-test ended. `now`: when."""
        self._tested_at = now
        if error is None:
            self.fault, self._failures, self._worked_at = "", 0, now
        else:
            self.fault = f"its self-test failed: {_reason(error)}"

    def died(self, why: str = "") -> None:
        """The engine, or its thread, has ended: only a restart helps. why: as the engine states it."""
        self.dead, self.fault = True, why or "its thread has ended"


def is_engine_error(error: BaseException) -> bool:
    """Whether the error may be the engine's: not the caller's, not another host's, not a cancellation."""
    if isinstance(error, DisaggError):
        return isinstance(error, ModelError)
    return not isinstance(error, asyncio.CancelledError | GeneratorExit)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return str(error) or "no answer in time"
    if isinstance(error, Cancelled):
        return "it is closed"
    return error.message if isinstance(error, DisaggError) else repr(error)
