"""A fleet for as long as a block runs: its ports, its end, and the same fleet simulated."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Fleet, load
from disagg.errors import DisaggError, FleetError, PortInUse, UsageError
from disagg.fleet.lifecycle import fleet_servers, temporary
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.status.ask import poll
from disagg.fleet.lifecycle.temporary import (
    Devices,
    running_simulated,
    simulated_fleet,
    temporary_fleet,
    with_free_ports,
)
from disagg.fleet.machine import process as local
from disagg.inference.client import Client
from tests.fleet.yards import Farm
from tests.fleets import write_kept_hosts
from tests.simulated import write_simulated
from tests.values import present

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
        assert [status.state for status in poll(fleet, state.tokens.current, state)] == ["healthy", "healthy"]
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
    monkeypatch.setattr(temporary, "with_free_ports", thief.after(temporary.with_free_ports))
    error: DisaggError | None = None
    with thief.held:
        try:
            with temporary_fleet(farm.fleet, note=notes.append) as (fleet, state):
                assert all(status.ok for status in poll(fleet, state.tokens.current, state))
        except PortInUse as lost:
            error = lost
    assert (error is None) is starts
    assert [note for note in notes if "trying again" in note] == [
        "another program took a port meanwhile; trying again on other ports"
    ] * min(times, 2)


def test_a_port_taken_after_the_check_moves_the_fleet_too(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server finds another program on its port only when it binds, so the error is not PortInUse."""
    thief, notes = Thief(1), list[str]()
    monkeypatch.setattr(temporary, "with_free_ports", thief.after(temporary.with_free_ports))
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


SHIPPED = Path(__file__).parents[3] / "hosts.toml"


def test_the_shipped_fleet_is_simulated_host_by_host(tmp_path: Path) -> None:
    fleet = load(SHIPPED)
    copy, _ = with_free_ports(simulated_fleet(fleet), tmp_path, "all")
    assert list(copy.hosts) == list(fleet.hosts)
    assert {name: model.sources for name, model in copy.models.items()} == {
        "qwen3-coder:30b": {"simulated": "shape:qwen3-coder-30b"},
        "gpt-oss:120b": {"simulated": "shape:gpt-oss-120b"},
    }
    for name, host in copy.hosts.items():
        real = fleet.hosts[name]
        assert (host.simulated, host.connector, host.address) == (True, "local", "127.0.0.1")
        assert (host.roles, host.model, host.hardware) == (real.roles, real.model, real.hardware)
        assert (host.engine.dtype, host.engine.chunk_tokens) == (real.engine.dtype, real.engine.chunk_tokens)
        assert (host.engine.max_batch, host.engine.max_kv_bytes) == (real.engine.max_batch, real.engine.max_kv_bytes)
    ports = [port for host in copy.hosts.values() for port in (host.port, host.kv_port) if port]
    assert len(set(ports)) == len(ports) == 6
    written = load(copy.path)
    assert written.hosts == copy.hosts, "what its servers read is what its clients use"
    assert {name: model.sources for name, model in written.models.items()} == {
        name: model.sources for name, model in copy.models.items()
    }


def test_other_machines_may_be_simulated(tmp_path: Path) -> None:
    copy = simulated_fleet(load(SHIPPED), Devices(prefill="h100-sxm", decode="m2-ultra"))
    assert [host.hardware for host in copy.hosts.values()] == ["h100-sxm", "h100-sxm", "m2-ultra", "m2-ultra"]


def test_a_host_of_unknown_hardware_is_asked_about(tmp_path: Path) -> None:
    text = SHIPPED.read_text().replace('hardware = "m4-max"\n', "")
    (tmp_path / "hosts.toml").write_text(text)
    with pytest.raises(UsageError, match="the hardware of mac-studio-2"):
        simulated_fleet(load(tmp_path / "hosts.toml"))


def test_it_runs_answers_and_is_gone(tmp_path: Path) -> None:
    fleet = load(write_simulated(tmp_path))
    with running_simulated(fleet) as (copy, state):
        with Client(copy, token=state.tokens.current) as client:
            metrics = client.generate("m", "hello", max_tokens=3).metrics
        assert (metrics.method, metrics.completion_tokens, metrics.simulated) == ("disaggregated", 3, True)
        records = [state.recorded(name) for name in copy.hosts]
        assert all(record and local.identity(record.pid) == record.identity for record in records)
    assert not copy.path.exists()
    assert all(record and local.identity(record.pid) != record.identity for record in records)


def test_the_ports_of_a_host_with_several_models_are_replaced_by_as_many_in_a_row(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    fleet = load(write_kept_hosts(tmp_path, {"a": model, "b": model}, prefill=1, decode=1))
    old = fleet.hosts["decode-1"]
    (tmp_path / "moved").mkdir()
    assert with_free_ports(fleet, tmp_path) == (fleet, [])
    with socket.create_server((old.address, present(old.keeping).ports[2])):
        moved, replaced = with_free_ports(fleet, tmp_path / "moved")
    new = moved.hosts["decode-1"]
    assert len(present(new.keeping).ports) == 4 and set(new.kv_ports).isdisjoint(old.kv_ports)
    assert (new.port, replaced, moved.hosts["prefill-1"]) == (old.port, [], fleet.hosts["prefill-1"])
    assert load(moved.path).hosts["decode-1"].keeping == new.keeping


def test_hosts_without_ports_of_their_own_are_given_some(tmp_path: Path) -> None:
    fleet = load(write_simulated(tmp_path))
    bare = {name: replace(host, port=0, kv_port=host.kv_port and 0) for name, host in fleet.hosts.items()}
    moved, _ = with_free_ports(replace(fleet, hosts=bare), tmp_path, "all")
    assert all(port for host in moved.hosts.values() for port in (host.port, host.kv_port) if port is not None)
