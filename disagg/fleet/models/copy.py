"""Copy one model from host to host: an HTTP server on the source, a client on the target, both for this copy only."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from disagg.api.base import Contract
from disagg.config import Host
from disagg.errors import CommandFailed, FleetError
from disagg.fleet.facts.python import HostPython, json_or_none, last_json, run_program
from disagg.fleet.machine.listening import OnLine, listening
from disagg.fleet.models.inventory import ProgramFailure, StoredModel

SERVE: Final = Path(__file__).with_name("serve_program.py")
FETCH: Final = Path(__file__).with_name("fetch_program.py")
_LONGEST_S: Final = 24 * 3600.0
_START_S: Final = 120.0

OnBytes = Callable[[int, int], None]
"""Called with the bytes copied so far and in total."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What the fetching program prints at its end. bytes: of the model. resumed: of these, bytes of an earlier run.
    repaired: files that were copied twice because the first copy was damaged."""

    bytes: int
    resumed: int
    repaired: int


def copy(
    source: HostPython, target: HostPython, stored: StoredModel, root: str, on_bytes: OnBytes = lambda done, total: None
) -> CopyResult:
    """Copy the model `stored` of the source to the folder `root` of the target.

    The source's machine must be used by this copy only: it is closed at the end, which ends the server. Raises
    FleetError if the copy fails; files that arrived stay, and the next copy resumes from them.
    """
    token = secrets.token_hex(32)
    with listening(
        source.machine, lambda on_line: _serve(source, stored, token, on_line), start_timeout=_START_S
    ) as port:
        return _fetch(source, target, (source.host.kv_address, str(port), root), token, on_bytes)


def _serve(source: HostPython, stored: StoredModel, token: str, on_line: OnLine) -> None:
    """Run the serving program until the machine is closed."""
    argv, secret = (source.host.kv_address, stored.root, stored.revision), {"DISAGG_COPY_TOKEN": token}
    try:
        run_program(source.machine, source.python, SERVE, argv, environment=secret, timeout=_LONGEST_S, on_line=on_line)
    except CommandFailed as error:
        failure = json_or_none(error.stdout, ProgramFailure)
        if failure is None:
            raise
        raise FleetError(f"{source.host.name}: cannot serve the model: {failure.error}") from error


def _fetch(source: HostPython, target: HostPython, argv: Sequence[str], token: str, on_bytes: OnBytes) -> CopyResult:
    def on_line(line: str) -> None:
        if progress := json_or_none(line, _Progress):
            on_bytes(progress.done, progress.total)

    secret = {"DISAGG_COPY_TOKEN": token}
    try:
        result = run_program(
            target.machine, target.python, FETCH, argv, environment=secret, timeout=_LONGEST_S, on_line=on_line
        )
    except CommandFailed as error:
        raise _explained(error, source.host, target.host) from error
    return last_json(result, target.machine, CopyResult)


def _explained(error: CommandFailed, source: Host, target: Host) -> FleetError:
    failure = json_or_none(error.stdout, ProgramFailure)
    if failure is None:
        return error
    return CommandFailed(
        f"{target.name}: copying from {source.name} ({source.kv_address}) failed: {failure.error}",
        "files that arrived are kept: run the same command again to resume",
        exit_status=error.exit_status,
        stdout=error.stdout,
    )


class _Progress(Contract, frozen=True):
    """Printed by the fetching program every half second. Both are bytes."""

    done: int
    total: int
