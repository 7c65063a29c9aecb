"""Rehearse a hand-off: `python -m disagg.bench.handoff` at both ends of a link, and the figures it gives.

Between two hosts of the fleet it runs in their deployed environments; else both ends are processes of this machine.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from disagg.config import Host
from disagg.errors import DisaggError, FleetError
from disagg.fleet.facts.host import read_host_facts
from disagg.fleet.facts.python import deployed_python
from disagg.fleet.link.ends import Listening, OnLine
from disagg.fleet.machine.base import CommandResult, Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.process import python_command

MODULE: Final = "disagg.bench.handoff"
LOOPBACK: Final = "127.0.0.1"
_LOADING_S: Final = 120.0  # frameworks, on a cold disk


@dataclass(frozen=True, slots=True)
class Order:
    """What is rehearsed: KV of `tokens` tokens of a model with these layers (window None: full attention).

    device: where the prefill host holds it. timeout: seconds for all of it.
    """

    windows: tuple[int | None, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    tokens: int
    rounds: int
    device: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where one end runs. argv: up to the module's name; address: where the decode host takes KV."""

    machine: Machine
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    address: str


def here(name: str) -> Place:
    """This machine, over loopback."""
    argv, environment = python_command(None)
    return Place(LocalMachine(name), tuple(argv), environment, LOOPBACK)


def at(host: Host) -> Place:
    """A host of the fleet. HostUnreachable where it cannot be reached, FleetError where nothing is deployed there."""
    if host.local:
        argv, environment = python_command(host.python)
        return Place(LocalMachine(host.name), tuple(argv), environment, host.kv_address)
    reached = machine_for(host)
    facts = read_host_facts(reached, host)
    python = deployed_python(facts)
    if python is None or facts.current is None:
        raise FleetError(f"{host.name}: nothing is deployed there", f"disagg deploy --host {host.name}")
    release = {"PYTHONPATH": facts.layout.release(facts.current)}
    return Place(reached, (python, "-P", "-m"), release, host.kv_address)


def rehearse(sender: Place, receiver: Place, order: Order) -> dict[str, Any]:
    """The figures that the sending end measured: see servers/rehearsal/run.py. Raises what either end tells."""
    body = {
        "token": secrets.token_hex(32),
        "host": receiver.address,
        "windows": order.windows,
        "kv_heads": order.kv_heads,
        "head_dim": order.head_dim,
        "dtype": order.dtype,
        "tokens": order.tokens,
        "rounds": order.rounds,
        "device": order.device,
    }
    limit = order.timeout + _LOADING_S
    listening = Listening(receiver.machine, lambda hear: _run(receiver, "receive", body, limit, hear), limit)
    try:
        port = listening.port()
        figures = _run(sender, "send", {**body, "port": port}, limit)
    except BaseException:
        listening.give_up()
        raise
    listening.finish()
    return figures


def _run(place: Place, end: str, body: Mapping[str, Any], timeout: float, hear: OnLine | None = None) -> dict[str, Any]:
    environment = {**place.environment, "DISAGG_REHEARSAL": json.dumps(body)}
    argv = [*place.argv, MODULE, end]
    return _said(place.machine, place.machine.run(argv, environment=environment, timeout=timeout, on_line=hear))


def _said(reached: Machine, result: CommandResult) -> dict[str, Any]:
    """The last line as JSON; raises the error in it."""
    lines = result.stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except ValueError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("error"), dict):
        error = DisaggError.from_json(said["error"])
        error.message = f"{reached.name}: {error.message}"
        raise error
    if not result.ok or not isinstance(said, dict):
        words = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:] or [f"exit code {result.code}"]
        raise FleetError(
            f"{reached.name}: the rehearsal ended early: {words[0]}", "is torch (prefill) or mlx (decode) there?"
        )
    return said
