"""The two ends of a measurement: programs on two hosts, of which one listens and the other connects."""

from __future__ import annotations

import contextvars
import json
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Thread

from disagg.config import Host
from disagg.errors import FleetError
from disagg.fleet.machine import interruption
from disagg.fleet.machine.base import Machine

OnLine = Callable[[str], None]
"""Told every line that a program prints."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One end of a link: the host, its machine, and a python on it."""

    host: Host
    machine: Machine
    python: str


class Listening:
    """The receiving program, run by a thread of its own: it prints {"port"} once it listens.

    run: runs it to its end on `machine`; raises where it fails. timeout: seconds that it may take for anything.
    """

    def __init__(self, machine: Machine, run: Callable[[OnLine], object], timeout: float) -> None:
        self._machine = machine
        self._timeout = timeout
        self._said: Queue[int | BaseException] = Queue()
        context = contextvars.copy_context()  # an interruption reaches the new thread as well
        self._thread = Thread(target=context.run, args=(self._run, run), name=f"receive {machine.name}", daemon=True)
        self._thread.start()

    def port(self) -> int:
        """Where it listens; raises what keeps it from that."""
        waited = 0.0
        while waited < self._timeout:
            try:
                said = self._said.get(timeout=interruption.POLL_S)
            except Empty:
                interruption.check()
                waited += interruption.POLL_S
                continue
            if isinstance(said, BaseException):
                raise said
            return said
        raise FleetError(f"{self._machine.name}: the link's probe does not start", "")

    def finish(self) -> None:
        """Wait for its end, which is near."""
        self._thread.join(self._timeout)

    def give_up(self) -> None:
        """LinkEnd the program: a receiver whose sender failed would wait."""
        if self._thread.is_alive():
            self._machine.close()
            self._thread.join(self._timeout)

    def _run(self, run: Callable[[OnLine], object]) -> None:
        try:
            run(self._hear)
        except BaseException as error:  # noqa: BLE001  # carried to the thread that waits for the port
            self._said.put(error)

    def _hear(self, line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        if isinstance(said, dict) and isinstance(said.get("port"), int):
            self._said.put(said["port"])
