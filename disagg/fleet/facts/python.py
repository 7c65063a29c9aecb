"""Run small Python programs on a host, with any python, before anything is deployed.

A program is one file of this package that needs only the standard library of Python 3.8 and is never imported. It is
sent through standard input, so that a process list does not show it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from disagg.api.base import prepared
from disagg.config import Host
from disagg.errors import CommandFailed, FleetError
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.machine.machine import CommandResult, Machine, script

T = TypeVar("T")

OLDEST: Final = (3, 8)


@dataclass(frozen=True, slots=True)
class HostPython:
    """A host, its machine, and a Python on it."""

    host: Host
    machine: Machine
    python: str


def python_on(host: Host, facts: HostFacts) -> str | None:
    """A python to run programs with: its server's, else any that is new enough; None if there is none."""
    if own := server_python(host, facts):
        return own
    usable = [python for python in facts.pythons if python.version >= OLDEST]
    return next((python.path for python in sorted(usable, key=lambda one: not one.configured)), None)


def server_python(host: Host, facts: HostFacts) -> str | None:
    """The python that runs the host's server, with disagg's packages; None if nothing complete is deployed."""
    return deployed_python(facts) if host.server_kind.deployed else sys.executable


def deployed_python(facts: HostFacts) -> str | None:
    """The python of the current release's environment; None if nothing complete is deployed."""
    environment = facts.environment_of(facts.current) if facts.current else ""
    return f"{facts.paths.environment(environment)}/bin/python" if facts.environments.get(environment) else None


def run_program(
    machine: Machine,
    python: str,
    program: Path,
    argv: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    on_line: Callable[[str], None] | None = None,
) -> CommandResult:
    """Run a program to its end. environment: for secrets too. Raises CommandFailed if it fails."""
    variables = {**(environment or {}), "DISAGG_PROGRAM": program.read_text(encoding="utf-8")}
    result = machine.run(
        [python, *argv], script=script("python.sh"), environment=variables, timeout=timeout, on_line=on_line
    )
    if not result.ok:
        raise CommandFailed(f"{machine.name}: {result.reason(1)}", exit_status=result.code, stdout=result.stdout)
    return result


def last_json(result: CommandResult, machine: Machine, kind: type[T]) -> T:
    """The last line of a program's output, a `kind` as JSON. Raises FleetError if it is not."""
    try:
        return _converted(result.stdout, kind)
    except msgspec.ValidationError as error:
        raise FleetError(f"{machine.name}: a program printed malformed JSON: {error}", _hint(machine)) from None
    except ValueError:
        raise FleetError(f"{machine.name}: a program printed no JSON", _hint(machine)) from None


def json_or_none(output: str, kind: type[T]) -> T | None:
    """The last line of this output, a `kind` as JSON; None if it is not."""
    try:
        return _converted(output, kind)
    except ValueError:
        return None


def _converted(output: str, kind: type[T]) -> T:
    """Raises ValueError if the last line is not JSON, and its subclass ValidationError if it does not fit `kind`."""
    # Not msgspec's decoder: it refuses the NaN and Infinity that Python's json prints, as a model's config may have.
    return msgspec.convert(json.loads(output.strip().rpartition("\n")[2]), prepared(kind))


def _hint(machine: Machine) -> str:
    return f"check that python works there: disagg ssh {machine.name}"
