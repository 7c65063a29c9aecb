"""Machines from hosts, and one action on many of them at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Generic, TypeVar

from disagg.config import Host
from disagg.errors import Cancelled, DisaggError
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.interruption import listening_to

T = TypeVar("T")

_FAREWELL_S = 10.0
"""How long an interrupted fleet may take to end what it had under way."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What became of one host: `value`, or else `error`."""

    host: Host
    seconds: float
    value: T | None = None
    error: DisaggError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


def machine(host: Host) -> Machine:
    """The machine behind a host, by its connector. Connects when first used; close it."""
    if host.connector == "local":
        from disagg.fleet.machine.local import LocalMachine

        return LocalMachine(host.name)
    from disagg.fleet.machine.ssh.machine import SSHMachine

    return SSHMachine(host)


def each(hosts: Sequence[Host], action: Callable[[Host], T], limit: int = 16) -> list[Outcome[T]]:
    """Run the action for every host, at most `limit` at the same time; outcomes in the hosts' order.

    A DisaggError ends its own host only. Ctrl-C makes commands that machines run give up, with Cancelled, and is
    raised again when all have. Any other exception is a fault of the action, raised when the others have ended.
    """
    stop = Event()
    waiting: SimpleQueue[int] = SimpleQueue()
    ended: SimpleQueue[tuple[int, Outcome[T] | BaseException]] = SimpleQueue()
    for index in range(len(hosts)):
        waiting.put(index)

    def work() -> None:
        with listening_to(stop):
            while True:
                try:
                    index = waiting.get_nowait()
                except Empty:
                    return
                ended.put((index, _outcome(hosts[index], action, stop)))

    # Daemons: a thread that hangs in the kernel must not keep an interrupted command from ending.
    for number in range(min(limit, len(hosts))):
        Thread(target=work, name=f"host {number}", daemon=True).start()
    outcomes: dict[int, Outcome[T]] = {}
    faults: list[BaseException] = []
    try:
        _gather(len(hosts), ended, outcomes, faults)
    except BaseException:
        stop.set()
        _gather(len(hosts), ended, outcomes, faults, time.monotonic() + _FAREWELL_S)
        raise
    if faults:
        raise faults[0]
    return [outcomes[index] for index in range(len(hosts))]


def _outcome(host: Host, action: Callable[[Host], T], stop: Event) -> Outcome[T] | BaseException:
    began = time.monotonic()
    try:
        if stop.is_set():
            raise Cancelled(f"{host.name}: interrupted before it began")
        value = action(host)
        return Outcome(host, time.monotonic() - began, value=value)
    except DisaggError as error:
        return Outcome(host, time.monotonic() - began, error=error)
    except BaseException as error:  # noqa: BLE001  # carried to the caller's thread and raised there
        return error


def _gather(
    count: int,
    ended: SimpleQueue[tuple[int, Outcome[T] | BaseException]],
    outcomes: dict[int, Outcome[T]],
    faults: list[BaseException],
    deadline: float | None = None,
) -> None:
    while len(outcomes) + len(faults) < count:
        try:
            index, result = ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Empty:
            return
        if isinstance(result, Outcome):
            outcomes[index] = result
        else:
            faults.append(result)
