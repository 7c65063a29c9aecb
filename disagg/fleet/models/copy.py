"""Copy one model from a host to another: an HTTP server on the one, a client on the other, both for this copy only."""

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
"""OnBytes bytes here and bytes in all."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Bytes of the model; of those, bytes that an earlier run had brought; files that had to be brought twice because
    what was there of them was damaged."""

    bytes: int
    resumed: int
    repaired: int


@dataclass(frozen=True, slots=True)
class CopyEnd:
    """A host to copy from or to, and a python on it."""

    host: Host
    machine: Machine
    python: str


def copy(
    source: CopyEnd, target: CopyEnd, held: StoredModel, root: str, told: OnBytes = lambda done, total: None
) -> CopyResult:
    """Copy `held` of the source to the folder `root` of the target.

    The source's machine must be of this copy alone: it is closed at the end, which ends the server. FleetError where
    the copy cannot be made; what has arrived stays, and the next copy goes on from it.
    """
    server = _Server(source, held)
    try:
        port = server.port()
        return _fetch(source, target, (source.host.kv_address, str(port), root), server.token, told)
    finally:
        server.end()


def _fetch(source: CopyEnd, target: CopyEnd, argv: Sequence[str], token: str, told: OnBytes) -> CopyResult:
    def hear(line: str) -> None:
        said = _said(line)
        if "done" in said:
            told(int(said["done"]), int(said["total"]))

    secret = {"DISAGG_COPY_TOKEN": token}
    try:
        result = run_program(
            target.machine, target.python, FETCH, argv, environment=secret, timeout=_LONGEST_S, on_line=hear
        )
    except CommandFailed as error:
        raise _explained(error, source.host, target.host) from error
    said = _said(result.stdout.strip().rpartition("\n")[2])
    return CopyResult(int(said.get("copied", 0)), int(said.get("resumed", 0)), int(said.get("repaired", 0)))


def _explained(error: CommandFailed, source: Host, target: Host) -> FleetError:
    output = error.stdout.strip()
    words = _said(output.rpartition("\n")[2]).get("error")
    if not words:
        return error
    return CommandFailed(
        f"{target.name}: copying from {source.name} ({source.kv_address}) failed: {words}",
        "what has arrived is kept: run the same command again to go on from there",
        exit_status=error.exit_status,
        stdout=error.stdout,
    )


def _said(line: str) -> Mapping[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


class _Server:
    """The serving end, in a thread of its own."""

    def __init__(self, place: CopyEnd, held: StoredModel) -> None:
        self.token = secrets.token_hex(32)
        self._place = place
        self._news: Queue[int | DisaggError] = Queue()
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
                on_line=self._hear,
            )
        except DisaggError as error:  # also that it was ended, which nobody reads
            self._news.put(error)

    def _hear(self, line: str) -> None:
        said = _said(line)
        if isinstance(said.get("port"), int):
            self._news.put(said["port"])
        elif "error" in said:
            self._news.put(FleetError(f"{self._place.host.name}: cannot serve the model: {said['error']}"))

    def port(self) -> int:
        """Where it listens; raises what keeps it from that."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            interruption.check()
            try:
                news = self._news.get(timeout=interruption.POLL_S)
            except Empty:
                continue
            if isinstance(news, DisaggError):
                raise news
            return news
        raise FleetError(f"{self._place.host.name}: does not begin to serve the model", "is its disk hung?")

    def end(self) -> None:
        self._place.machine.close()
        self._thread.join(10.0)
