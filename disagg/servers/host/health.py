"""Whether an engine works: judged by its requests and self-tests, and by the pieces of work that it finishes.

Times are time.monotonic().
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from disagg.engines.model.matchers.link import fork_servers
from disagg.errors import Cancelled, DisaggError, ModelError

FAILURES_IN_A_ROW = 3
IDLE_TEST_S = 60.0  # an engine that has shown nothing for this long is tested
FAULT_TEST_S = 5.0  # between two tests of an engine that does not work
TEST_LIMIT_S = 10.0
"""How long a test may take, unless the engine states another limit."""


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


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """When an engine that has work and finishes no piece of it counts as stalled. The longest piece is one decode step,
    or one layer of a prompt's chunk, which take well under a second.

    quiet_s: without a piece while its processes compute nothing either: its GPU hangs, or its thread is stopped.
    computing_s: while they compute, as on a slow CPU, and for the first piece of an engine that has finished none for
    `idle_s`: its weights may have left the memory. computing: of one core, from which on processes compute. looked_s:
    without a piece until it is looked at whether they compute, which takes 30 ms on a host of 400 processes.
    """

    looked_s: float = 1.0
    quiet_s: float = 3.5
    computing_s: float = 10.0
    idle_s: float = 60.0
    computing: float = 0.05


def computed_s() -> float:
    """Processor time of this process and its children, in seconds, without that of the calling thread and of what
    compiles the forms of answers."""
    engines = [child for child in psutil.Process().children() if child.pid not in fork_servers]
    return time.process_time() - time.thread_time() + sum(map(_family_s, engines))


def _family_s(process: psutil.Process) -> float:
    try:
        return sum(map(_processor_s, (process, *process.children(recursive=True))))
    except psutil.Error:  # it has ended
        return 0.0


def _processor_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended
        return 0.0
    return float(times.user + times.system)


class EngineProgress:
    """Counts the beats of an engine: pieces of work that it has finished, for any request.

    `beat` is called on the engine's thread, `stalled_s` every second from one other thread. Time without work does not
    count. A stall lasts until the next beat: its requests are ended, so that nothing else would show it.
    """

    def __init__(self, policy: StallPolicy = StallPolicy(), computed: Callable[[], float] = computed_s) -> None:
        self.policy = policy
        self._computed = computed
        self._lock = threading.Lock()
        self._beats = 0
        self._beat_at = float("-inf")
        self._active_at = time.monotonic()  # of the last beat, or the last moment at which there was no work
        self._first_look = (0.0, 0.0, 0.0)  # `_active_at`, the time and the processor time when it was first seen
        self._stalled_since: float | None = None

    @property
    def beats(self) -> int:
        return self._beats

    def beat(self) -> None:
        """One more piece of work is finished."""
        with self._lock:
            self._beats += 1
            self._beat_at = self._active_at = time.monotonic()
            self._stalled_since = None

    def stalled_s(self, now: float, busy: bool) -> float:
        """Seconds for which a stalled engine has made no progress; 0 if it does not count as stalled. now:
        time.monotonic()."""
        if not busy:
            self.excuse(now)
        active_at = self._active_at
        stands_s = now - active_at
        stalled = stands_s > self.policy.computing_s or self._is_quiet(now, active_at)
        with self._lock:
            if stalled and self._stalled_since is None and active_at == self._active_at:
                self._stalled_since = active_at
            return 0.0 if self._stalled_since is None else now - self._stalled_since

    def excuse(self, now: float) -> None:
        """Do not count the time before `now`: there was no work, or the whole process was stopped."""
        with self._lock:
            self._active_at = max(self._active_at, now)

    def _is_quiet(self, now: float, active_at: float) -> bool:
        """Whether an engine that has worked lately, and finished no piece since `active_at`, has stood still for
        quiet_s without computing. The processor time is read only while it stands still, and without the lock: the
        engine's thread may go on meanwhile."""
        policy = self.policy
        if now - active_at <= policy.looked_s or active_at - self._beat_at > policy.idle_s:
            return False
        looked_for, looked_at, computed = self._first_look
        if looked_for != active_at:
            self._first_look = active_at, now, self._computed()
            return False
        if now - active_at <= policy.quiet_s:
            return False
        return self._computed() - computed < policy.computing * (now - looked_at)
