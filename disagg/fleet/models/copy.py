"""Copy one model from host to host: an HTTP server on the source, a client on the target, both for this copy only."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from disagg.config import Host
from disagg.errors import CommandFailed, FleetError
from disagg.fleet.facts.python import run_program
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.listening import OnLine, listening
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
    token = secrets.token_hex(32)
    with listening(
        source.machine, lambda on_line: _serve(source, held, token, on_line), start_timeout=_START_S
    ) as port:
        return _fetch(source, target, (source.host.kv_address, str(port), root), token, on_bytes)


def _serve(source: CopyEnd, held: StoredModel, token: str, on_line: OnLine) -> None:
    """Run the serving program until the machine is closed."""
    argv, secret = (source.host.kv_address, held.root, held.revision), {"DISAGG_COPY_TOKEN": token}
    try:
        run_program(source.machine, source.python, SERVE, argv, environment=secret, timeout=_LONGEST_S, on_line=on_line)
    except CommandFailed as error:
        reason = _fields(error.stdout.strip().rpartition("\n")[2]).get("error")
        if not reason:
            raise
        raise FleetError(f"{source.host.name}: cannot serve the model: {reason}") from error


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
