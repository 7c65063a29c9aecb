"""The host keys that machines offer, compared with known_hosts, for `disagg trust` to show and accept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from disagg.config import Host
from disagg.errors import FleetError
from disagg.fleet.machine.ssh import known_hosts
from disagg.fleet.machine.ssh.known_hosts import HostKey, KeyStatus, KnownHosts
from disagg.fleet.machine.ssh.settings import HopSettings, settings_for


@dataclass(frozen=True, slots=True)
class HostKeyOffer:
    """A host key that a machine, or a gateway on the way to it, offers. known_as: its name in known_hosts."""

    host: str
    known_as: str
    key: HostKey
    verdict: KeyStatus
    path: Path

    def accept(self) -> None:
        """Add the key to known_hosts. Raises FleetError if that cannot be written."""
        known_hosts.add(self.path, self.known_as, self.key)


def offers(host: Host) -> Iterator[HostKeyOffer]:
    """The key of every hop to a host, gateways first; a gateway must be accepted before the next hop is reachable.

    Raises HostKeyRefused for a key that changed or is revoked, HostUnreachable, LoginRefused (of a gateway).
    """
    from disagg.fleet.machine.ssh.connection import offered_key
    from disagg.fleet.machine.ssh.errors import refused_key

    for hop in _hops(settings_for(host)):
        if not hop.known_hosts:
            raise FleetError(f"{host.name}: ssh_config names no known_hosts file", "remove UserKnownHostsFile none")
        key = offered_key(host.name, hop)
        known = KnownHosts.read(hop.known_hosts)
        verdict = known.check(hop.known_as, key)
        if verdict in ("changed", "revoked"):
            raise refused_key(host.name, hop, verdict, key, known)
        yield HostKeyOffer(host.name, hop.known_as, key, verdict, hop.known_hosts[0])


def _hops(settings: HopSettings) -> list[HopSettings]:
    return [*(_hops(settings.jump) if settings.jump else []), settings]
