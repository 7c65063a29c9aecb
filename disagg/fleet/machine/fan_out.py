"""One action on many hosts at the same time.

`each` waits for all hosts, or until a timeout; `in_background` runs an action per host while the caller does something
else. Both interrupt the commands that machines still run when they are left early. `limited` bounds every `each` of a
command line: how many hosts at the same time, how long one of them may take.
"""

from __future__ import annotations

import contextvars
import math
import time
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
"""On how many hosts an action runs at the same time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """parallel: on how many hosts an action runs at the same time; None: PARALLEL, or all if one time holds for all.
    host_s: the seconds that it may take on a host; None: only the action's own limits."""

    parallel: int | None = None
    host_s: float | None = None

    def of(self, hosts: int, timeout: float | None) -> tuple[int, float | None]:
        """How many of so many hosts at the same time; the seconds for all, if `timeout` is for so many at once."""
        parallel = min(hosts, self.parallel or (PARALLEL if timeout is None else hosts))
        return parallel, timeout and timeout * max(1, math.ceil(hosts / max(1, parallel)))


_limits: ContextVar[Limits] = ContextVar("limits", default=Limits())  # noqa: B039  # frozen


@contextmanager
def limited(limits: Limits) -> Iterator[None]:
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

    timeout: seconds for all hosts together, which all start at once then; or for each `parallel` of them. A host that
    has not ended in time is interrupted and its thread left behind, since it may hang in the kernel; its outcome is
    `timed_out`. Ctrl-C leaves all of them behind.
    """
    stop, limits = Event(), _limits.get()
    waiting: SimpleQueue[int] = SimpleQueue()
    ended: _Ended[T] = SimpleQueue()
    for index in range(len(hosts)):
        waiting.put(index)

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except Empty:
                return
            ended.put((index, _outcome(hosts[index], action, stop, limits.host_s)))

    parallel, timeout = limits.of(len(hosts), timeout)
    # Daemon threads: one that hangs in the kernel must not keep an interrupted command from exiting.
    for number in range(parallel):
        context = contextvars.copy_context()
        Thread(target=context.run, args=(work,), name=f"host {number}", daemon=True).start()
    gathered: dict[int, HostOutcome[T] | BaseException] = {}
    try:
        _gather(len(hosts), ended, gathered, None if timeout is None else time.monotonic() + timeout)
    except BaseException:
        stop.set()
        if timeout is None:
            _gather(len(hosts), ended, gathered, time.monotonic() + _CLEANUP_S)
        raise
    stop.set()
    outcomes = [gathered.get(index) or _late(host, timeout or 0.0) for index, host in enumerate(hosts)]
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


_Ended = SimpleQueue[tuple[int, HostOutcome[T] | BaseException]]


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


def _gather(
    count: int, ended: _Ended[T], gathered: dict[int, HostOutcome[T] | BaseException], deadline: float | None
) -> None:
    """Take what has ended, until all have or the deadline has passed. Without a deadline, Cancelled if this thread is
    interrupted."""
    while len(gathered) < count:
        if deadline is None:
            interruption.check()
        wait = interruption.POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            index, result = ended.get(timeout=wait)
        except Empty:
            if deadline is None:
                continue
            return
        gathered[index] = result
