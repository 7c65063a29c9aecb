"""Run the hand-off benchmark, `python -m disagg.bench.handoff`, at both ends of a link.

Between two hosts of the fleet it runs in their deployed environments; otherwise both ends are processes here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import structs

from disagg.api.base import Contract
from disagg.api.handoff import ENVIRONMENT_VARIABLE, EndTask, HandoffFigures, HandoffSpec
from disagg.config import Host
from disagg.errors import DisaggError, FleetError
from disagg.fleet.facts.host import read_host_facts
from disagg.fleet.facts.python import deployed_python, json_or_none, last_json
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.listening import OnLine, listening
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import CommandResult, Machine
from disagg.fleet.machine.process import python_command

MODULE: Final = "disagg.bench.handoff"
LOOPBACK: Final = "127.0.0.1"
_LOADING_S: Final = 120.0  # for loading frameworks from a cold disk


@dataclass(frozen=True, slots=True)
class EndPlace:
    """Where one end runs. argv: the command up to the module's name. address: where this host receives KV."""

    machine: Machine
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    address: str


def on_this_machine(name: str) -> EndPlace:
    """This machine, over loopback."""
    argv, environment = python_command(None)
    return EndPlace(LocalMachine(name), tuple(argv), environment, LOOPBACK)


def on_host(host: Host) -> EndPlace:
    """A host of the fleet. HostUnreachable if it cannot be reached, FleetError if nothing is deployed there."""
    if not host.server_kind.deployed:
        argv, environment = python_command(host.python)
        return EndPlace(LocalMachine(host.name), tuple(argv), environment, host.kv_address)
    reached = machine_for(host)
    facts = read_host_facts(reached, host)
    python = deployed_python(facts)
    if python is None or facts.current is None:
        raise FleetError(f"{host.name}: nothing is deployed there", f"disagg deploy --host {host.name}")
    release = {"PYTHONPATH": facts.paths.release(facts.current)}
    return EndPlace(reached, (python, "-P", "-m"), release, host.kv_address)


def measure_handoff(sender: EndPlace, receiver: EndPlace, spec: HandoffSpec, timeout_s: float) -> HandoffFigures:
    """What the sending end measured. Raises the error of either end, with the end's name. timeout_s: for all of it."""
    task = EndTask(spec=spec, token=secrets.token_hex(32), host=receiver.address)
    limit = timeout_s + _LOADING_S
    with listening(
        receiver.machine,
        lambda on_line: _run(receiver, "receive", task, limit, on_line),
        start_timeout=limit,
        end_timeout=limit,
    ) as port:
        result = _run(sender, "send", structs.replace(task, port=port), limit)
    return last_json(result, sender.machine, HandoffFigures)


def _run(place: EndPlace, end: str, task: EndTask, timeout: float, on_line: OnLine | None = None) -> CommandResult:
    environment = {**place.environment, ENVIRONMENT_VARIABLE: json.dumps(task.to_json())}
    argv = [*place.argv, MODULE, end]
    result = place.machine.run(argv, environment=environment, timeout=timeout, on_line=on_line)
    if failure := json_or_none(result.stdout, _EndFailure):
        error = DisaggError.from_json(failure.error)
        error.message = f"{place.machine.name}: {error.message}"
        raise error
    if not result.ok:
        raise FleetError(
            f"{place.machine.name}: the hand-off benchmark ended early: {result.reason(1)}",
            "is torch (prefill) or mlx (decode) installed there?",
        )
    return result


class _EndFailure(Contract, frozen=True):
    error: dict[str, Any]
