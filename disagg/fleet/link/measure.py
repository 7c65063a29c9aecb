"""Measure links between hosts: a bounded stream of bytes, and the network path it takes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from disagg.api.base import Contract
from disagg.config import Host
from disagg.config.addresses import same_machine
from disagg.errors import CommandFailed, DisaggError, FleetError, PeerLost
from disagg.fleet.facts.python import HostPython, json_or_none, last_json, run_program
from disagg.fleet.link.route import NetworkPath, read_path
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.listening import OnLine, listening

PROBE: Final = Path(__file__).with_name("probe_program.py")
_SLACK_S: Final = 20.0
_MAC_DENIED: Final = 65
"""EHOSTUNREACH of macOS, where Linux has 113."""


@dataclass(frozen=True, slots=True)
class MeasurementBounds:
    """A measurement ends at whichever comes first: seconds or bytes sent. 512 MiB last 0.45 s on 10 GbE."""

    seconds: float = 2.0
    bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A measured link. path: as the sender sees it. seconds: from the first to the last received byte. latency: seconds
    until the connection was made. error: set if nothing could be measured."""

    sender: str
    receiver: str
    target: str
    path: NetworkPath
    bytes: int = 0
    seconds: float = 0.0
    latency: float = 0.0
    error: DisaggError | None = field(default=None, compare=False)

    @property
    def bits_per_s(self) -> float | None:
        """Received bits per second; None if nothing was measured."""
        return 8 * self.bytes / self.seconds if self.bytes and self.seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        taken = self.path.outgoing
        return {
            "from": self.sender,
            "to": self.receiver,
            "target": self.target,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 6),
            "latency_s": round(self.latency, 6),
            "bits_per_s": self.bits_per_s,
            "interface": asdict(taken) if taken else None,
            "source": self.path.source,
            "gateway": self.path.gateway,
            "error": self.error.to_json() if self.error else None,
        }


def measure(sender: HostPython, receiver: HostPython, bounds: MeasurementBounds = MeasurementBounds()) -> MeasuredLink:
    """Measure the link from `sender` to the address where `receiver` takes KV.

    A failure of the link is the result's error. Raises HostUnreachable if a machine does not answer, FleetError if the
    probe cannot run. Another thread uses the receiver's machine meanwhile; if the sender fails it is closed, and
    connects again when it is used again.
    """
    target = receiver.host.kv_address
    path = read_path(sender.machine, target)
    token = secrets.token_hex(32)
    limit = bounds.seconds + _SLACK_S
    try:
        with listening(
            receiver.machine,
            lambda on_line: _receive(receiver, target, token, bounds, on_line),
            start_timeout=limit,
            end_timeout=limit,
        ) as port:
            sent = _send(sender, target, port, token, bounds)
    except CommandFailed as error:
        failure = _explained(error, sender.host, receiver.host)
        return MeasuredLink(sender.host.name, receiver.host.name, target, path, error=failure)
    names = (sender.host.name, receiver.host.name, target, path)
    return MeasuredLink(*names, sent.bytes, sent.seconds, sent.latency)


def measure_all(
    pairs: Sequence[tuple[Host, Host]],
    ends: Mapping[str, HostPython],
    bounds: MeasurementBounds = MeasurementBounds(),
    on_begin: Callable[[Host, Host], None] = lambda sender, receiver: None,
) -> list[MeasuredLink | DisaggError | None]:
    """Measure several links; results in the pairs' order, None where one of the `ends` is missing. Links that share a
    machine are measured one after the other, since measuring both at once would make each look slower. A DisaggError
    ends its own link only."""
    results: dict[int, MeasuredLink | DisaggError | None] = {}
    usable = [index for index, pair in enumerate(pairs) if all(host.name in ends for host in pair)]
    for batch in rounds([pairs[index] for index in usable]):
        by_sender = {pairs[usable[number]][0].name: usable[number] for number in batch}

        def one(host: Host, by_sender: Mapping[str, int] = by_sender) -> MeasuredLink:
            sender, receiver = pairs[by_sender[host.name]]
            on_begin(sender, receiver)
            return measure(ends[sender.name], ends[receiver.name], bounds)

        for outcome in each([pairs[index][0] for index in by_sender.values()], one):
            results[by_sender[outcome.host.name]] = outcome.value or outcome.error
    return [results.get(index) for index in range(len(pairs))]


def rounds(pairs: Sequence[tuple[Host, Host]]) -> list[list[int]]:
    """Indices of the pairs, put in order into rounds in which no machine occurs twice."""
    made: list[list[int]] = []
    busy: list[set[str]] = []
    for index, pair in enumerate(pairs):
        places = {same_machine(host.address) for host in pair}
        free = next((number for number, taken in enumerate(busy) if not places & taken), len(made))
        if free == len(made):
            made.append([])
            busy.append(set())
        made[free].append(index)
        busy[free] |= places
    return made


def _receive(receiver: HostPython, target: str, token: str, bounds: MeasurementBounds, on_line: OnLine) -> None:
    run_program(
        receiver.machine,
        receiver.python,
        PROBE,
        ("receive", target, str(bounds.seconds + _SLACK_S / 2)),
        environment={"DISAGG_LINK_TOKEN": token},
        timeout=bounds.seconds + _SLACK_S,
        on_line=on_line,
    )


def _send(sender: HostPython, target: str, port: int, token: str, bounds: MeasurementBounds) -> _Sent:
    result = run_program(
        sender.machine,
        sender.python,
        PROBE,
        ("send", target, str(port), str(bounds.seconds), str(bounds.bytes)),
        environment={"DISAGG_LINK_TOKEN": token},
        timeout=6 * bounds.seconds + _SLACK_S,
    )
    return last_json(result, sender.machine, _Sent)


class _Sent(Contract, frozen=True):
    """What the receiver counted, and the seconds until the connection was made."""

    bytes: int
    seconds: float
    latency: float


class _NetworkFailure(Contract, frozen=True):
    """errno: of the machine on which the probe failed."""

    error: str
    errno: int | None
    timeout: bool


def _explained(error: CommandFailed, sender: Host, receiver: Host) -> DisaggError:
    """The error that the probe printed, with a hint."""
    failure = json_or_none(error.stdout, _NetworkFailure)
    if failure is None:
        return error
    target = receiver.kv_address
    if error.message.startswith(f"{receiver.name}:"):
        return FleetError(
            f"{receiver.name}: cannot listen on {target}: {failure.error}",
            f"is that one of its addresses? correct data_address: disagg exec --host {receiver.name} -- ip addr",
        )
    ping = f"disagg exec --host {sender.name} -- ping -c 3 {target}"
    if failure.timeout:
        return PeerLost(
            f"{sender.name} cannot reach {receiver.name} at {target}: no answer: link down, or a firewall drops it",
            f"{ping}; if that works, let {sender.address} in through the firewall of {receiver.name}",
        )
    if failure.errno == _MAC_DENIED:
        return PeerLost(
            f"{sender.name} cannot reach {receiver.name} at {target}: errno 65, no route to host: macOS' Local Network "
            "Privacy denies it, or the link is down",
            f"{ping}; if that works: System Settings > Privacy & Security > Local Network",
        )
    return PeerLost(f"{sender.name} cannot reach {receiver.name} at {target}: {failure.error}", ping)
