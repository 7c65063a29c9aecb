"""One action on many hosts at the same time.

`each` waits for all hosts, or until a timeout; `in_background` runs an action per host while the caller does something
else. Both interrupt the commands that machines still run when they are left early. `limited` bounds every `each` of a
command line: how many hosts at the same time, how long one of them may take.
"""

from __future__ import annotations

import contextvars
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Final, Generic, TypeVar

from disagg.config import Host
from disagg.errors import Cancelled, DisaggError, HostUnreachable
from disagg.fleet.machine import interruption
from disagg.fleet.machine.interruption import interrupted_by

T = TypeVar("T")

_CLEANUP_S = 25.0
"""How long interrupted actions may take to kill the commands that they run and to release their locks, which may wait
behind bytes that a slow link still carries (20 s, then that attempt fails)."""

PARALLEL: Final = 32
"""The most hosts on which an action runs at the same time."""


@dataclass(frozen=True, slots=True)
class FanOutLimits:
    """parallel: on how many hosts an action runs at the same time; None: PARALLEL, or all if the action has a timeout.
    host_s: the seconds that it may take on a host; None: only the action's own limits."""

    parallel: int | None = None
    host_s: float | None = None

    def at_once(self, hosts: int, timeout: float | None) -> int:
        """The number of hosts, of so many, on which an action runs at the same time. timeout: of each, if the action
        has one."""
        return min(hosts, self.parallel or (PARALLEL if timeout is None else hosts))


_limits: ContextVar[FanOutLimits] = ContextVar("limits", default=FanOutLimits())  # noqa: B039  # frozen


@contextmanager
def limited(limits: FanOutLimits) -> Iterator[None]:
    """Within, every `each` of this thread, and of actions that it runs, has these limits."""
    token = _limits.set(limits)
    try:
        yield
    finally:
        _limits.reset(token)


@dataclass(frozen=True, slots=True)
class HostOutcome(Generic[T]):
    """The result of an action on one host: `value`, or else `error`. timed_out: the action has not ended."""

    host: Host
    seconds: float
    value: T | None = None
    error: DisaggError | None = None
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None


def each(hosts: Sequence[Host], action: Callable[[Host], T], *, timeout: float | None = None) -> list[HostOutcome[T]]:
    """Run the action for every host, within the limits of the command (`limited`); outcomes in the hosts' order.

    A DisaggError ends its own host only, and so does the end of a host's time. Ctrl-C interrupts the commands that
    machines run, with Cancelled, and is raised again when they have ended; so is an interruption of this thread, which
    may be that of another `each`. Any other exception is a bug in the action; it is raised after the others end.

    timeout: seconds for each host, from its beginning; all begin at once then, unless `parallel` bounds them. A host
    that has not ended in time is interrupted and its thread left behind, since it may hang in the kernel; the next one
    begins in its place. Its outcome is `timed_out`. Ctrl-C leaves all of them behind.
    """
    limits = _limits.get()
    actions = _Actions(hosts, action, limits.at_once(len(hosts), timeout), limits.host_s, timeout)
    try:
        actions.run()
    except BaseException:  # also Ctrl-C: leave nothing running on any machine
        actions.interrupt(_CLEANUP_S if timeout is None else 0.0)
        raise
    outcomes = [actions.gathered[index] for index in range(len(hosts))]
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, HostOutcome)]


@contextmanager
def in_background(hosts: Sequence[Host], action: Callable[[Host], None]) -> Iterator[None]:
    """Within, the action runs for every host in a thread of its own.

    Leaving interrupts what they wait for (`interruption`, and commands of machines, raise Cancelled) and waits for
    their end, at most `_CLEANUP_S`.
    """
    stop = Event()

    def work(host: Host) -> None:
        with interrupted_by(stop):
            try:
                action(host)
            except Cancelled:
                return

    threads = [Thread(target=work, args=(host,), name=host.name, daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        deadline = time.monotonic() + _CLEANUP_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Actions(Generic[T]):
    """The actions of one `each`, at most `parallel` at the same time, each in a thread of its own."""

    def __init__(
        self,
        hosts: Sequence[Host],
        action: Callable[[Host], T],
        parallel: int,
        host_s: float | None,
        timeout: float | None,
    ) -> None:
        self.gathered: dict[int, HostOutcome[T] | BaseException] = {}
        self._hosts, self._action, self._parallel = hosts, action, parallel
        self._host_s, self._timeout = host_s, timeout
        self._stops = [Event() for _ in hosts]
        self._waiting = deque(range(len(hosts)))
        self._running: dict[int, float] = {}  # when each is given up, by time.monotonic(); the first to begin first
        self._ended: SimpleQueue[tuple[int, HostOutcome[T] | BaseException]] = SimpleQueue()

    def run(self) -> None:
        """Run the actions until each has ended or was given up. Without a timeout, Cancelled if this thread is
        interrupted."""
        while self._waiting or self._running:
            if self._timeout is None:
                interruption.check()
            while self._waiting and len(self._running) < self._parallel:
                self._begin(self._waiting.popleft())
            index, due = next(iter(self._running.items()))
            if not self._take(min(due, time.monotonic() + interruption.POLL_S)) and time.monotonic() >= due:
                self._give_up(index)

    def interrupt(self, seconds: float) -> None:
        """Interrupt those that run, and wait for their end. None begins any more."""
        for stop in self._stops:
            stop.set()
        deadline = time.monotonic() + seconds
        while self._running and self._take(deadline):
            pass

    def _begin(self, index: int) -> None:
        host, stop = self._hosts[index], self._stops[index]

        def work() -> None:
            self._ended.put((index, _outcome(host, self._action, stop, self._host_s)))

        self._running[index] = math.inf if self._timeout is None else time.monotonic() + self._timeout
        # A daemon thread: one that hangs in the kernel must not keep an interrupted command from exiting.
        Thread(target=contextvars.copy_context().run, args=(work,), name=f"host {host.name}", daemon=True).start()

    def _take(self, deadline: float) -> bool:
        """Take what has ended next. False if nothing has until the deadline."""
        try:
            index, result = self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return False
        if self._running.pop(index, None) is not None:  # else it was given up
            self.gathered[index] = result
        return True

    def _give_up(self, index: int) -> None:
        self._stops[index].set()
        del self._running[index]
        self.gathered[index] = _late(self._hosts[index], self._timeout or 0.0)


def _outcome(
    host: Host, action: Callable[[Host], T], stop: Event, host_s: float | None
) -> HostOutcome[T] | BaseException:
    began = time.monotonic()
    try:
        if stop.is_set():
            raise Cancelled(f"{host.name}: interrupted before it began")
        with interrupted_by(stop, within=host_s, late=f"{host.name}: not done within {host_s or 0:g} s"):
            value = action(host)
        return HostOutcome(host, time.monotonic() - began, value=value)
    except DisaggError as error:
        return HostOutcome(host, time.monotonic() - began, error=error)
    except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
        return error


def _late(host: Host, timeout: float) -> HostOutcome[T]:
    error = HostUnreachable(f"{host.name}: no answer within {timeout:.1f} s", "disagg doctor")
    return HostOutcome(host, timeout, error=error, timed_out=True)
