"""Move a local fleet to free ports, for a fleet that may run anywhere, as the demo does."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from disagg.config import Fleet, load
from disagg.fleet.machine.process import port_taken

_PORT_LINE = re.compile(r"^(\s*(?:port|kv_port)\s*=\s*)(\d[\d_]*)", re.MULTILINE)


def taken_ports(fleet: Fleet) -> list[int]:
    """The fleet's ports on which something listens now, in file order."""
    return [port for port, address in _addresses(fleet).items() if port_taken(address, port)]


def on_free_ports(fleet: Fleet, folder: Path, everywhere: bool = False) -> tuple[Fleet, dict[int, int]]:
    """The fleet with every taken port replaced (`everywhere`: every port), from a copy of its file in `folder`; and
    which port became which.

    The file's model sources must not be relative: the copy stands in another folder.
    """
    address = _addresses(fleet)
    leaving = list(address) if everywhere else taken_ports(fleet)
    moved = dict(zip(leaving, free_ports([address[port] for port in leaving], set(address)), strict=True))
    if not moved:
        return fleet, {}

    def replaced(match: re.Match[str]) -> str:
        port = int(match[2])
        return f"{match[1]}{moved.get(port, port)}"

    copy = folder / fleet.path.name
    copy.write_text(_PORT_LINE.sub(replaced, fleet.path.read_text(encoding="utf-8")), encoding="utf-8")
    return load(copy), moved


def _addresses(fleet: Fleet) -> dict[int, str]:
    return {port: host.address for host in fleet.hosts.values() for port in (host.port, host.kv_port) if port}


def free_ports(addresses: list[str], avoid: set[int]) -> list[int]:
    """One port per address that nothing listens on now. All are held until all are found, so that none repeats."""
    held: list[socket.socket] = []
    ports: list[int] = []
    try:
        while len(ports) < len(addresses):
            probe = socket.create_server((addresses[len(ports)], 0))
            held.append(probe)
            port = int(probe.getsockname()[1])
            if port not in avoid:
                ports.append(port)
    finally:
        for probe in held:
            probe.close()
    return ports
