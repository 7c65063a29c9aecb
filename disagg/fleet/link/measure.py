"""Measure links between hosts: a bounded stream of bytes, and the way it took."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from disagg.config import Host
from disagg.config.addresses import same_machine
from disagg.errors import CommandFailed, DisaggError, FleetError, PeerLost
from disagg.fleet.facts.python import json_line, run_program
from disagg.fleet.facts.route import NetworkPath, read_path
from disagg.fleet.link.ends import LinkEnd, Listening
from disagg.fleet.machine.fan_out import each

PROBE: Final = Path(__file__).with_name("probe_program.py")
_SLACK_S: Final = 20.0
_MAC_DENIED: Final = 65
"""EHOSTUNREACH of macOS, where Linux has 113."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A measurement ends at whichever comes first: seconds or bytes sent. 512 MiB last 0.45 s on 10 GbE."""

    seconds: float = 2.0
    bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Link:
    """A link as it was measured. `path`: as the sender sees it. seconds: between the first byte received and the last;
    latency: seconds until the connection stood. `error` where nothing could be measured."""

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
        """What arrived, per second; None where nothing was measured."""
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


def measure(sender: LinkEnd, receiver: LinkEnd, bounds: Bounds = Bounds()) -> Link:
    """Measure the link from `sender` to the address where `receiver` takes KV.

    What the network does is in the result. Raises HostUnreachable where one of the machines does not answer, and
    FleetError where the probe cannot run at all. The receiver's machine is used by another thread meanwhile; it is
    closed where the sender fails, and connects again when it is used again.
    """
    target = receiver.host.kv_address
    path = read_path(sender.machine, target)
    token = secrets.token_hex(32)
    listening = Listening(
        receiver.machine, lambda hear: _receive(receiver, target, token, bounds, hear), bounds.seconds + _SLACK_S
    )
    try:
        port = listening.port()
        counted = _send(sender, target, port, token, bounds)
    except CommandFailed as error:
        listening.give_up()
        failure = _explained(error, sender.host, receiver.host)
        return Link(sender.host.name, receiver.host.name, target, path, error=failure)
    except BaseException:
        listening.give_up()
        raise
    listening.finish()
    names = (sender.host.name, receiver.host.name, target, path)
    return Link(*names, counted["bytes"], counted["seconds"], counted["latency"])


def measure_all(
    pairs: Sequence[tuple[LinkEnd, LinkEnd]],
    bounds: Bounds = Bounds(),
    begun: Callable[[Host, Host], None] = lambda sender, receiver: None,
) -> list[Link | DisaggError]:
    """Measure several links, in the pairs' order; at the same time only where they share no machine, which would make
    each look slower. A DisaggError ends its own link only."""
    results: dict[int, Link | DisaggError] = {}
    for batch in rounds([(sender.host, receiver.host) for sender, receiver in pairs]):
        by_sender = {pairs[index][0].host.name: index for index in batch}

        def one(host: Host, by_sender: Mapping[str, int] = by_sender) -> Link:
            sender, receiver = pairs[by_sender[host.name]]
            begun(sender.host, receiver.host)
            return measure(sender, receiver, bounds)

        for outcome in each([pairs[index][0].host for index in batch], one):
            result = outcome.value if outcome.value is not None else outcome.error
            assert result is not None, "an outcome has one of both"
            results[by_sender[outcome.host.name]] = result
    return [results[index] for index in range(len(pairs))]


def rounds(pairs: Sequence[tuple[Host, Host]]) -> list[list[int]]:
    """Indices of the pairs in as few rounds as come of taking them in order; no machine is twice in one round."""
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


def _receive(receiver: LinkEnd, target: str, token: str, bounds: Bounds, hear: Callable[[str], None]) -> None:
    run_program(
        receiver.machine,
        receiver.python,
        PROBE,
        ("receive", target, str(bounds.seconds + _SLACK_S / 2)),
        environment={"DISAGG_LINK_TOKEN": token},
        timeout=bounds.seconds + _SLACK_S,
        on_line=hear,
    )


def _send(sender: LinkEnd, target: str, port: int, token: str, bounds: Bounds) -> dict[str, Any]:
    result = run_program(
        sender.machine,
        sender.python,
        PROBE,
        ("send", target, str(port), str(bounds.seconds), str(bounds.bytes)),
        environment={"DISAGG_LINK_TOKEN": token},
        timeout=6 * bounds.seconds + _SLACK_S,
    )
    return json_line(result, sender.machine)


def _explained(error: CommandFailed, sender: Host, receiver: Host) -> DisaggError:
    """What the probe's end says about the network, with what to do about it."""
    said: dict[str, Any] = {}
    if error.exit_status == 3:
        lines = error.stdout.strip().splitlines()
        said = json.loads(lines[-1]) if lines else {}
    if "error" not in said:
        return error
    number, words, target = said.get("errno"), said["error"], receiver.kv_address
    if error.message.startswith(f"{receiver.name}:"):
        return FleetError(
            f"{receiver.name}: cannot listen on {target}: {words}",
            f"is that one of its addresses? correct data_address: disagg exec --host {receiver.name} -- ip addr",
        )
    ping = f"disagg exec --host {sender.name} -- ping -c 3 {target}"
    if said.get("timeout"):
        return PeerLost(
            f"{sender.name} cannot reach {receiver.name} at {target}: no answer: link down, or a firewall drops it",
            f"{ping}; if that works, let {sender.address} in through the firewall of {receiver.name}",
        )
    if number == _MAC_DENIED:
        return PeerLost(
            f"{sender.name} cannot reach {receiver.name} at {target}: errno 65, no route to host: macOS' Local Network "
            "Privacy denies it, or the link is down",
            f"{ping}; if that works: System Settings > Privacy & Security > Local Network",
        )
    return PeerLost(f"{sender.name} cannot reach {receiver.name} at {target}: {words}", ping)
