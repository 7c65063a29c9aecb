"""The same fleet on other ports: which ports are in use, which are free, and a hosts.toml with new ones."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from disagg.config import Fleet
from disagg.config.render import render
from disagg.fleet.machine.process import port_taken

PortChoice = Literal["taken", "all"]
"""Which ports to replace: those on which something listens now, or every one."""


class MovedPort(NamedTuple):
    """One replaced port. `key`: "port" or "kv_port" of the host."""

    host: str
    key: str
    old: int
    new: int


class _Port(NamedTuple):
    host: str
    key: str
    address: str
    number: int


def taken_ports(fleet: Fleet) -> list[int]:
    """The fleet's ports on which something listens now, in file order."""
    return [port.number for port in _ports(fleet) if port_taken(port.address, port.number)]


def with_free_ports(fleet: Fleet, folder: Path, which: PortChoice = "taken") -> tuple[Fleet, list[MovedPort]]:
    """The fleet with free ports instead of the taken ones (or of all), and what was replaced.

    If anything was, the fleet's file is a new one in `folder`, for its servers to read. It has no token_file and no
    [deploy]: it is for servers on this machine.
    """
    ports = _ports(fleet)
    leaving = [port for port in ports if which == "all" or port_taken(port.address, port.number)]
    if not leaving:
        return fleet, []
    free = free_ports([port.address for port in leaving], {port.number for port in ports})
    moved = [MovedPort(port.host, port.key, port.number, new) for port, new in zip(leaving, free, strict=True)]
    hosts = dict(fleet.hosts)
    for one in moved:
        host = hosts[one.host]
        hosts[one.host] = replace(host, port=one.new) if one.key == "port" else replace(host, kv_port=one.new)
    copy = replace(fleet, path=folder / "hosts.toml", hosts=hosts, token_file=None)
    sources = {
        name: {str(engine): source for engine, source in model.sources.items()} for name, model in copy.models.items()
    }
    copy.path.write_text(render(copy, list(copy.hosts), sources), encoding="utf-8")
    return copy, moved


def free_ports(addresses: Sequence[str], avoid: set[int]) -> list[int]:
    """One port per address on which nothing listens now. All are held until all are found, so that none repeats."""
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


def _ports(fleet: Fleet) -> list[_Port]:
    return [
        _Port(host.name, key, host.address, number)
        for host in fleet.hosts.values()
        if not host.whole
        for key, number in (("port", host.port), ("kv_port", host.kv_port))
        if number
    ]
