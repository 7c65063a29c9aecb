"""Copy one model from host to host: an HTTP server on the source, a client on the target, both for this copy only."""

from __future__ import annotations

import contextvars
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, Final

from disagg.config import Host
from disagg.errors import CommandFailed, DisaggError, FleetError
from disagg.fleet.facts.python import run_program
from disagg.fleet.machine import interruption
from disagg.fleet.machine.base import Machine
from disagg.fleet.models.inventory import StoredModel

SERVE: Final = Path(__file__).with_name("serve_program.py")
FETCH: Final = Path(__file__).with_name("fetch_program.py")
_LONGEST_S: Final = 24 * 3600.0
_START_S: Final = 120.0

OnBytes = Callable[[int, int], None]
"""Called with the bytes copied so far and in total."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """bytes: of the model. resumed: of these, bytes that an earlier run had copied. repaired: files that were copied
    twice because the first copy was damaged."""

    bytes: int
    resumed: int
    repaired: int


@dataclass(frozen=True, slots=True)
class CopyEnd:
    """A host to copy from or to, and a Python on it."""

    host: Host
    machine: Machine
    python: str


def copy(
    source: CopyEnd, target: CopyEnd, held: StoredModel, root: str, on_bytes: OnBytes = lambda done, total: None
) -> CopyResult:
    """Copy the model `held` of the source to the folder `root` of the target.

    The source's machine must be used by this copy only: it is closed at the end, which ends the server. Raises
    FleetError if the copy fails; files that arrived stay, and the next copy resumes from them.
    """
    server = _Server(source, held)
    try:
        port = server.port()
        return _fetch(source, target, (source.host.kv_address, str(port), root), server.token, on_bytes)
    finally:
        server.end()


def _fetch(source: CopyEnd, target: CopyEnd, argv: Sequence[str], token: str, on_bytes: OnBytes) -> CopyResult:
    def on_line(line: str) -> None:
        fields = _fields(line)
        if "done" in fields:
            on_bytes(int(fields["done"]), int(fields["total"]))

    secret = {"DISAGG_COPY_TOKEN": token}
    try:
        result = run_program(
            target.machine, target.python, FETCH, argv, environment=secret, timeout=_LONGEST_S, on_line=on_line
        )
    except CommandFailed as error:
        raise _explained(error, source.host, target.host) from error
    fields = _fields(result.stdout.strip().rpartition("\n")[2])
    return CopyResult(int(fields.get("copied", 0)), int(fields.get("resumed", 0)), int(fields.get("repaired", 0)))


def _explained(error: CommandFailed, source: Host, target: Host) -> FleetError:
    output = error.stdout.strip()
    words = _fields(output.rpartition("\n")[2]).get("error")
    if not words:
        return error
    return CommandFailed(
        f"{target.name}: copying from {source.name} ({source.kv_address}) failed: {words}",
        "files that arrived are kept: run the same command again to resume",
        exit_status=error.exit_status,
        stdout=error.stdout,
    )


def _fields(line: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


class _Server:
    """The serving program, run by its own thread."""

    def __init__(self, place: CopyEnd, held: StoredModel) -> None:
        self.token = secrets.token_hex(32)
        self._place = place
        self._events: Queue[int | DisaggError] = Queue()
        argv = (place.host.kv_address, held.root, held.revision)
        context = contextvars.copy_context()  # an interruption reaches the new thread as well
        self._thread = Thread(target=context.run, args=(self._run, argv), name=f"serve {place.host.name}", daemon=True)
        self._thread.start()

    def _run(self, argv: tuple[str, ...]) -> None:
        place, secret = self._place, {"DISAGG_COPY_TOKEN": self.token}
        try:
            run_program(
                place.machine,
                place.python,
                SERVE,
                argv,
                environment=secret,
                timeout=_LONGEST_S,
                on_line=self._on_line,
            )
        except DisaggError as error:  # also raised when `end` closes the connection, and then not read
            self._events.put(error)

    def _on_line(self, line: str) -> None:
        fields = _fields(line)
        if isinstance(fields.get("port"), int):
            self._events.put(fields["port"])
        elif "error" in fields:
            self._events.put(FleetError(f"{self._place.host.name}: cannot serve the model: {fields['error']}"))

    def port(self) -> int:
        """The port it listens on; raises the error that prevents it."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            interruption.check()
            try:
                event = self._events.get(timeout=interruption.POLL_S)
            except Empty:
                continue
            if isinstance(event, DisaggError):
                raise event
            return event
        raise FleetError(f"{self._place.host.name}: its copy server did not start", "is its disk hung?")

    def end(self) -> None:
        self._place.machine.close()
        self._thread.join(10.0)
