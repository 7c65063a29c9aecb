"""A fleet on this machine for as long as a block runs: on free ports, simulated if asked for, stopped however the block
ends."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

from disagg.api.engines import SIMULATED
from disagg.config import Deploy, EngineOptions, Fleet, Host, Model
from disagg.config.render import render
from disagg.errors import DisaggError, FleetError, PortInUse, UsageError
from disagg.fleet.lifecycle import fleet_servers
from disagg.fleet.lifecycle.one_server import OnProgress, ServerResult
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine.process import port_taken
from disagg.planning.sizing import hardware_of, size_source

GRACE_S: Final = 5.0
_RANGES: Final = 100  # tries to find so many ports in a row
_MORE_TRIES: Final = 2  # on other ports, after another program took one


class RunningFleet(NamedTuple):
    """The fleet as it runs, and its state, whose `token()` its clients need."""

    fleet: Fleet
    state: State


@contextmanager
def temporary_fleet(
    fleet: Fleet,
    *,
    move: Literal["none", "taken", "all"] = "taken",
    timeout_s: float = 60.0,
    slow_hint: str = "is this machine busy? try again",
    report: OnProgress = lambda host, state: None,
    note: Callable[[str], None] = lambda text: None,
    ending: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[RunningFleet]:
    """Start all hosts of a local fleet, with a state folder of their own that is removed at the end.

    move: which ports are replaced by free ones. Unless it is "none", the start is tried again on other ports if another
    program, such as a second demo, took a port between the check and the server's own bind.
    timeout_s, slow_hint: for the servers to become healthy, and the hint of the error if they do not in time.
    note: called with a line about moved ports, and about each server that did not end. ending: the context in which the
    servers are stopped.
    Raises UsageError if a host is not local, and the first host's error if not all hosts become healthy.
    """
    if remote := [host.name for host in fleet.deployed_hosts]:
        raise UsageError(
            f"{fleet.path}: {', '.join(remote)} would be started and stopped over SSH",
            'give a file in which every host has connector = "local"',
        )
    with tempfile.TemporaryDirectory(prefix="disagg-fleet-") as name:
        folder = Path(name)
        copy = fleet
        if move != "none":
            copy, moved = with_free_ports(fleet, folder, move)
            for port in moved if move == "taken" else ():
                note(f"port {port.old} is in use here; using {port.new}")
        for tries_left in range(_MORE_TRIES, -1, -1):
            state = State.of(copy, folder / "state")
            # In this program's session: with two models on two cores, a first token waited 31 ms (median) for threads
            # of other sessions that compute, and 14 ms within one.
            servers = fleet_servers.FleetServers(copy, state, report=report, grace_s=GRACE_S, own_session=False)
            try:
                error = _first_error(servers.start(timeout_s=timeout_s), timeout_s, slow_hint)
                if error is None:
                    yield RunningFleet(copy, state)
                    return
            finally:
                with ending():
                    for result in servers.stop():
                        if result.error is not None:  # the state folder, with its record, is about to be deleted
                            note(f"{result.host} was not stopped: {result.error}")
            if move == "none" or not tries_left or not _lost_a_port(copy, error):
                raise error
            note("another program took a port meanwhile; trying again on other ports")
            copy, _ = with_free_ports(copy, folder, "all")


def _first_error(results: Sequence[ServerResult], timeout_s: float, slow_hint: str) -> DisaggError | None:
    """The first host's error. Unlike `disagg start`, a slow server is stopped, so its own message does not apply."""
    for result in results:
        if result.outcome == "slow":
            return FleetError(f"{result.host} was not ready after {timeout_s:g} s; all servers were stopped", slow_hint)
        if result.error is not None:
            return result.error
    return None


def _lost_a_port(fleet: Fleet, error: DisaggError) -> bool:
    """Whether the start failed because of another program's port. The fleet's own servers are stopped by now."""
    return isinstance(error, PortInUse) or bool(taken_ports(fleet))


PortChoice = Literal["taken", "all"]
"""Which ports to replace: those on which something listens now, or every one."""


class MovedPort(NamedTuple):
    """One replaced port."""

    old: int
    new: int


class _Port(NamedTuple):
    """key: "port" or "kv_port" of the host."""

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
    ranges = [host for host in fleet.hosts.values() if host.keeps and (which == "all" or _range_taken(host))]
    if not (leaving or ranges):
        return fleet, []
    used = {port.number for port in ports} | {port for host in ranges for port in _range(host)}
    free = free_ports([port.address for port in leaving], used)
    hosts = dict(fleet.hosts)
    for host in ranges:
        found = _free_range(host.address, len(_range(host)), used | set(free))
        used |= set(found)
        assert host.keeping is not None, "a host with several models has ports for them"
        hosts[host.name] = replace(host, keeping=replace(host.keeping, ports=found))
    for port, new in zip(leaving, free, strict=True):
        host = hosts[port.host]
        hosts[port.host] = replace(host, port=new) if port.key == "port" else replace(host, kv_port=new)
    copy = replace(fleet, path=folder / "hosts.toml", hosts=hosts, token_file=None)
    sources = {
        name: {str(engine): source for engine, source in model.sources.items()} for name, model in copy.models.items()
    }
    copy.path.write_text(render(copy, list(copy.hosts), sources), encoding="utf-8")
    return copy, [MovedPort(port.number, new) for port, new in zip(leaving, free, strict=True)]


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


def _range(host: Host) -> range:
    """The ports of a host's models, if it has several."""
    return host.keeping.ports if host.keeping is not None else range(0)


def _range_taken(host: Host) -> bool:
    return any(port_taken(host.address, port) for port in _range(host))


def _free_range(address: str, count: int, avoid: set[int]) -> range:
    """So many ports in a row on which nothing listens now."""
    for _ in range(_RANGES):
        first = free_ports([address], avoid)[0]
        found = range(first, first + count)
        if found[-1] < 1 << 16 and avoid.isdisjoint(found) and not any(port_taken(address, port) for port in found):
            return found
    raise PortInUse(f"{address} has no {count} free ports in a row", "a smaller range in ports of hosts.toml")


def _ports(fleet: Fleet) -> list[_Port]:
    return [
        _Port(host.name, key, host.address, number)
        for host in fleet.hosts.values()
        if not host.whole
        for key, number in (("port", host.port), ("kv_port", host.kv_port))
        if number is not None
    ]


ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Devices:
    """Machines to simulate instead of those that hosts.toml names."""

    prefill: str | None = None
    decode: str | None = None


def simulated_fleet(fleet: Fleet, devices: Devices | None = None) -> Fleet:
    """The same fleet with every host local and simulated; names, models, batch and queue sizes stay.

    Hosts may share a port: the fleet is to be started with all ports replaced. The links between the hosts are this
    machine's loopback, and not simulated. Raises UsageError if a model's size or a host's hardware is unknown.
    """
    return replace(
        fleet,
        models={name: _simulated_model(model) for name, model in fleet.models.items()},
        hosts={
            name: _simulated_host(host, devices or Devices())
            for name, host in fleet.hosts.items()
            if not (host.gateway or host.whole)
        },
        token_file=None,
        deploy=Deploy(),
    )


@contextmanager
def running_simulated(
    fleet: Fleet,
    devices: Devices | None = None,
    *,
    timeout_s: float = 60.0,
    report: OnProgress = lambda host, state: None,
    ending: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[RunningFleet]:
    """The simulated fleet as a `temporary_fleet`."""
    copy = simulated_fleet(fleet, devices)
    with temporary_fleet(copy, move="all", timeout_s=timeout_s, report=report, ending=ending) as running:
        yield running


def _simulated_model(model: Model) -> Model:
    return replace(model, sources={SIMULATED.name: size_source(model.name, model.sources.values())}, written={})


def _simulated_host(host: Host, devices: Devices) -> Host:
    instead = devices.prefill if "prefill" in host.roles else devices.decode
    options = host.engine
    return Host(
        name=host.name,
        address=ADDRESS,
        roles=host.roles,
        model=host.model,
        engine=EngineOptions(
            SIMULATED.name,
            dtype=options.dtype,
            chunk_tokens=options.chunk_tokens,
            max_batch=options.max_batch,
            max_kv_bytes=options.max_kv_bytes,
        ),
        port=host.port,
        kv_port=host.kv_port,
        connector="local",
        service="process",
        queue_size=host.queue_size,
        hardware=hardware_of(host.name, host.hardware, instead),
        models=host.models,
        keeping=host.keeping and replace(host.keeping, memory_bytes=None),
    )
