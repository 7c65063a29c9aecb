"""A fleet that runs for as long as a block: on free ports, stopped however the block ends."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Fleet, load
from disagg.errors import DisaggError, FleetError, PortInUse
from disagg.fleet.lifecycle import fleet_servers
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.status.health import poll
from disagg.fleet.lifecycle.temporary import ports
from disagg.fleet.lifecycle.temporary.running import temporary_fleet
from disagg.fleet.machine import process as local
from tests.fleet.farm import Farm

Choose = Callable[..., tuple[Fleet, Any]]


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Farm:
    farm = Farm(tmp_path)
    monkeypatch.setattr(fleet_servers, "FleetServers", functools.partial(FleetServers, argv=farm.argv))
    return farm


class Thief:
    """Takes a port of host b right after free ports were chosen, `times` times."""

    def __init__(self, times: int) -> None:
        self.times, self.held, self.stolen = times, contextlib.ExitStack(), list[int]()

    def after(self, choose: Choose) -> Choose:
        def chosen(*arguments: Any, **options: Any) -> tuple[Fleet, Any]:
            fleet, moved = choose(*arguments, **options)
            if len(self.stolen) < self.times:
                host = fleet.hosts["b"]
                self.held.enter_context(socket.create_server((host.address, host.port)))
                self.stolen.append(host.port)
            return fleet, moved

        return chosen


def all_ports(fleet: Fleet) -> set[int]:
    return {port for host in fleet.hosts.values() for port in (host.port, host.kv_port) if port}


def test_it_keeps_free_ports_and_is_stopped_and_removed(farm: Farm) -> None:
    with temporary_fleet(farm.fleet) as (fleet, state):
        assert fleet is farm.fleet
        assert [status.state for status in poll(fleet, state.token(), state)] == ["healthy", "healthy"]
        records = [state.recorded(name) for name in fleet.hosts]
    assert all(record and local.identity(record.pid) is None for record in records)
    assert not state.folder.exists()


def test_an_exception_in_the_block_stops_the_servers(farm: Farm) -> None:
    with pytest.raises(ZeroDivisionError), temporary_fleet(farm.fleet) as (fleet, state):
        records = [state.recorded(name) for name in fleet.hosts]
        raise ZeroDivisionError
    assert all(record and local.identity(record.pid) is None for record in records)


def test_a_server_that_does_not_end_is_noted(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, pids, end = list[str](), list[int](), local.end

    def survive(pid: int, expected: str, grace_s: float) -> bool:
        end(pid, expected, grace_s)
        pids.append(pid)
        if len(pids) == 1:
            raise FleetError(f"process {pid} did not end after SIGKILL", "it hangs in the kernel")
        return True

    monkeypatch.setattr(local, "end", survive)
    with temporary_fleet(farm.fleet, note=notes.append) as (fleet, state):
        names = {record.pid: record.host for record in map(state.recorded, fleet.hosts) if record}
    pid = pids[0]
    assert notes == [f"{names[pid]} was not stopped: process {pid} did not end after SIGKILL (it hangs in the kernel)"]


def test_taken_ports_are_replaced_and_named(farm: Farm) -> None:
    taken, notes = farm.fleet.hosts["a"].port, list[str]()
    with (
        socket.create_server(("127.0.0.1", taken)),
        temporary_fleet(farm.fleet, note=notes.append) as (fleet, _),
    ):
        new = fleet.hosts["a"].port
        assert new != taken and fleet.hosts["b"].port == farm.fleet.hosts["b"].port
        assert load(fleet.path).hosts == fleet.hosts
    assert notes == [f"port {taken} is in use here; using {new}"]


def test_all_ports_are_replaced_on_request(farm: Farm) -> None:
    with temporary_fleet(farm.fleet, move="all") as (fleet, _):
        assert not all_ports(fleet) & all_ports(farm.fleet)


def test_ports_stay_as_given_on_request(farm: Farm) -> None:
    taken = farm.fleet.hosts["a"].port
    with (
        socket.create_server(("127.0.0.1", taken)),
        pytest.raises(PortInUse, match=f"port {taken}"),
        temporary_fleet(farm.fleet, move="none"),
    ):
        pytest.fail("a server without its port cannot be healthy")


@pytest.mark.parametrize(("times", "starts"), [(1, True), (2, True), (3, False)])
def test_a_port_lost_to_another_program_moves_the_fleet_twice(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, times: int, starts: bool
) -> None:
    thief, notes = Thief(times), list[str]()
    monkeypatch.setattr(ports, "with_free_ports", thief.after(ports.with_free_ports))
    error: DisaggError | None = None
    with thief.held:
        try:
            with temporary_fleet(farm.fleet, note=notes.append) as (fleet, state):
                assert all(status.ok for status in poll(fleet, state.token(), state))
        except PortInUse as lost:
            error = lost
    assert (error is None) is starts
    assert [note for note in notes if "trying again" in note] == [
        "another program took a port meanwhile; trying again on other ports"
    ] * min(times, 2)


def test_a_port_taken_after_the_check_moves_the_fleet_too(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server finds another program on its port only when it binds, so the error is not PortInUse."""
    thief, notes = Thief(1), list[str]()
    monkeypatch.setattr(ports, "with_free_ports", thief.after(ports.with_free_ports))
    monkeypatch.setattr(local, "port_taken", lambda address, port: False)
    with thief.held, temporary_fleet(farm.fleet, note=notes.append) as (fleet, _):
        assert fleet.hosts["b"].port not in thief.stolen
    assert notes == ["another program took a port meanwhile; trying again on other ports"]


def test_a_server_that_loads_too_long_is_stopped_and_the_hint_is_the_callers(farm: Farm) -> None:
    farm.behaviour = {"a": "slow", "b": "slow"}
    with (
        pytest.raises(FleetError, match="a was not ready after 1 s; all servers were stopped") as caught,
        temporary_fleet(farm.fleet, timeout_s=1, slow_hint="wait longer"),
    ):
        pytest.fail("no server is ready")
    assert caught.value.hint == "wait longer"
