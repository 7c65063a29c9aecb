"""What watches a server beside serving: a round of checks every second on the event loop, and a thread that ends the
process if its engine or its event loop does not come back.

A service manager starts the process again. systemd, and disagg's own supervisor, are also notified every few seconds
that the thread runs, and restart a process that is stopped altogether. The process of one model of a host with several
tells the host's keeper instead, and ends with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Final, NamedTuple

from disagg import logs
from disagg.api.base import InvalidValue
from disagg.api.names import KEEPER_VARIABLE
from disagg.api.status import ProcessOrder, ProcessReport
from disagg.errors import ServerUnavailable
from disagg.http.program import notify
from disagg.servers.host.service import AnyService

STOPPED_S = 3.0  # between two ticks: the process was stopped, or its machine slept
EXIT_CODE = 70
"""The exit code of a process that ended itself because its engine, or its event loop, did not come back."""
WATCH_S = 5.0
STUCK_S = 60.0
"""How long a problem that may pass lasts before the process ends."""
DEAD_S = 5.0
"""The same for a problem that cannot pass. Callers get their errors meanwhile."""
NOTIFIED_S = 90
"""A service manager that this thread has sent nothing for so long restarts the process."""
REPORT_S: Final = 0.5
_ORDER_BYTES: Final = 1 << 12
_PR_SET_PDEATHSIG: Final = 1  # of Linux's prctl.h


class Monitor:
    """Watches one service, every tick_s seconds. `ticks` counts up while the event loop runs. testing: the self-test
    that runs now."""

    def __init__(self, service: AnyService, tick_s: float = 1.0) -> None:
        self.ticks = 0
        self.testing: asyncio.Task[None] | None = None
        self._tick_s = tick_s
        self._service = service
        self._ticked = time.monotonic()
        self._stuck = False  # the threads that prepare requests

    async def run(self) -> None:
        """Tick until cancelled. A tick that fails is logged and does not end the next ones."""
        try:
            while True:
                await asyncio.sleep(self._tick_s)
                try:
                    self.tick(time.monotonic())
                except Exception as error:  # noqa: BLE001 - a bug in one check must not end all of them
                    logs.log.error("monitor_failed", exc_info=error)
        finally:
            if self.testing is not None:
                self.testing.cancel()

    def tick(self, now: float) -> None:
        """One round of checks."""
        self.ticks += 1
        service, stopped = self._service, now - self._ticked > STOPPED_S
        self._ticked = now
        if stopped:
            service.progress.excuse(now)
            service.work.excuse(now)
        service.leases.expire(now)
        logs.summarise()
        if service.state == "loading":
            service.progress.excuse(now)
        else:
            self._watch_engine(now)
            self._watch_work(now)

    def _watch_work(self, now: float) -> None:
        """While every thread that prepares requests is stuck, those that wait for one are sent elsewhere."""
        service, before = self._service, self._stuck
        stuck_s = service.work.stuck_s(now)
        self._stuck = stuck_s > 0
        if self._stuck and not before:
            logs.event(logging.ERROR, "request_work_stuck", seconds=round(stuck_s, 1))
            service.note_problem()
        elif before and not self._stuck:
            logs.info("request_work_goes_on")
        if self._stuck:
            text = f"the threads of {service.host.name} that prepare requests have been stuck for {stuck_s:.0f} s"
            self._end_requests(text, frozenset({"tokenising"}))

    def _watch_engine(self, now: float) -> None:
        service = self._service
        alive = service.engine_alive
        if not alive:
            service.engine_health.died(service.engine_failure)
        stalled_s = service.progress.stalled_s(now, service.busy)
        stalled = stalled_s > 0
        if stalled != service.stalled:
            service.stalled = stalled
            if stalled:
                logs.event(logging.ERROR, "engine_stalled", seconds=round(stalled_s, 1))
                service.note_problem()
            else:
                logs.info("engine_goes_on")
        if stalled:
            self._end_requests(f"the engine of {service.host.name} has made no progress for {stalled_s:.1f} s")
        elif not alive:
            self._end_requests(f"the engine of {service.host.name} has stopped")
        busy = bool(service.active) or stalled
        if self.testing is None and service.engine_health.test_due(now, busy):
            self.testing = asyncio.ensure_future(self._test_engine())

    def _end_requests(self, message: str, phases: Container[str] | None = None) -> None:
        """Answer all requests with an error, or all in these phases: none of them can go on here."""
        for caller in list(self._service.active.values()):
            if phases is None or caller.phase in phases:
                caller.end(ServerUnavailable(message, "ask another host; the server restarts itself"))

    async def _test_engine(self) -> None:
        """Let the engine compute a token. A failure, or no answer, is its fault until a later test passes."""
        health, limit_s = self._service.engine_health, self._service.test_limit_s
        error: BaseException | None = None
        try:
            async with asyncio.timeout(limit_s):
                await self._service.probe_engine()
        except TimeoutError:
            error = TimeoutError(f"no answer within {limit_s:g} s")
        except Exception as failure:  # noqa: BLE001 - whatever it is, the engine does not work
            error = failure
        finally:
            self.testing = None
        before = health.fault
        health.tested(error, time.monotonic())
        if health.fault:
            self._service.note_problem()
        if health.fault and not before:
            logs.log.error("self_test_failed", exc_info=error)
        elif before and not health.fault:
            logs.info("self_test_passed", after=before)


class Problems:
    """What is wrong with a service, as another thread sees it: its engine, or an event loop that does not run."""

    def __init__(self, service: AnyService, monitor: Monitor) -> None:
        self._service, self._monitor = service, monitor
        self._ticks = -1

    def __call__(self) -> Problem:
        """Calls neither the engine nor the event loop: both may be stuck."""
        before, self._ticks = self._ticks, self._monitor.ticks
        service = self._service
        if service.state != "loading" and before == self._ticks:
            return Problem(f"the event loop of {service.host.name} has not run", STUCK_S)
        return Problem(service.problem, DEAD_S if service.engine_health.dead else STUCK_S)


class Problem(NamedTuple):
    """What is wrong, "" if nothing is, and for how many seconds it may be."""

    text: str = ""
    patience_s: float = STUCK_S


class Watchdog:
    """problem: what is wrong now; called on the watchdog's thread. exit: ends the process."""

    def __init__(
        self,
        problem: Callable[[], Problem],
        exit: Callable[[int], object] = os._exit,
        keeper: KeeperConnection | None = None,
    ) -> None:
        self._problem = problem
        self._exit = exit
        self._keeper = keeper
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._bad_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def tick(self, elapsed: float) -> None:
        """Judge after `elapsed` seconds. More than two ticks count as two: the process, or its machine, was stopped."""
        problem = self._problem()
        self._bad_s = self._bad_s + min(elapsed, 2 * WATCH_S) if problem.text else 0.0
        if self._bad_s > problem.patience_s:
            self._end(problem)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(WATCH_S):
            now = time.monotonic()
            self.tick(now - before)
            before = now
            notify("WATCHDOG=1")
            if self._keeper is not None:
                self._keeper.beat()

    def _end(self, problem: Problem) -> None:
        hint = "the traces below show where it is stuck; a service manager starts it again"
        message = f"{problem.text} for {self._bad_s:.0f} s, so the server ends with code {EXIT_CODE}"
        logs.event(logging.ERROR, "watchdog", code="ModelError", message=message, hint=hint)
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(2)
        self._exit(EXIT_CODE)


class KeeperConnection:
    """The connection of this process, which has one model of a host with several, to the host's keeper. A keeper that
    is slow or stopped delays nothing here: what the connection takes no more is dropped."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._sending = threading.Lock()
        self._unsent = b""

    @staticmethod
    def of_environment() -> KeeperConnection | None:
        """None if this process has no keeper. Linux ends the process when its keeper ends, also one that is stopped or
        in native code."""
        number = os.environ.pop(KEEPER_VARIABLE, "")
        if not number:
            return None
        connection = socket.socket(fileno=int(number))
        connection.set_inheritable(False)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return KeeperConnection(connection)

    def beat(self) -> None:
        """This process runs. Called on the watchdog's thread."""
        self._send(b"\n")

    def report(self, report: ProcessReport) -> None:
        self._send(report.to_bytes() + b"\n")

    async def attend(self, report: Callable[[], ProcessReport], carry_out: Callable[[ProcessOrder], None]) -> None:
        """Report until cancelled, and carry out orders. When the keeper ends, so does this process, at once: what it
        holds would be held beside that of its successor."""
        loop, ordered, unread = asyncio.get_running_loop(), asyncio.Event(), bytearray()

        def read() -> None:
            try:
                data = self._connection.recv(_ORDER_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                logs.event(logging.ERROR, "keeper_ended", message="its keeper has ended, and this process with it")
                os._exit(EXIT_CODE)
            unread.extend(data)
            *lines, rest = bytes(unread).split(b"\n")
            unread[:] = rest[-_ORDER_BYTES:]
            for line in lines:
                with suppress(InvalidValue):
                    carry_out(ProcessOrder.from_bytes(line))
            ordered.set()

        loop.add_reader(self._connection, read)
        try:
            while True:
                self.report(report())
                ordered.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_S):
                        await ordered.wait()
        finally:
            loop.remove_reader(self._connection)

    def _send(self, line: bytes) -> None:
        with self._sending, suppress(OSError):
            if not self._unsent:
                self._unsent = line
            self._unsent = self._unsent[self._connection.send(self._unsent) :]


def notify_ready() -> None:
    """Notify the service manager that this process is ready, and of the longest time between its later notifications.
    Not before the model is loaded: native code that loads it may hold up every thread for minutes."""
    notify(f"READY=1\nWATCHDOG_USEC={NOTIFIED_S * 1_000_000}")
