"""A fleet simulated on this machine: the same names and sizes, all hosts local."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.config import load
from disagg.errors import UsageError
from disagg.fleet.lifecycle.temporary.ports import with_free_ports
from disagg.fleet.lifecycle.temporary.simulated import Devices, running_simulated, simulated_fleet
from disagg.fleet.machine import process as local
from disagg.inference.client import Client
from tests.simulated import write_simulated

SHIPPED = Path(__file__).parents[4] / "hosts.toml"


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
        with Client(copy, token=state.token()) as client:
            metrics = client.generate("m", "hello", max_tokens=3).metrics
        assert (metrics.method, metrics.completion_tokens, metrics.simulated) == ("disaggregated", 3, True)
        records = [state.recorded(name) for name in copy.hosts]
        assert all(record and local.identity(record.pid) == record.identity for record in records)
    assert not copy.path.exists()
    assert all(record and local.identity(record.pid) != record.identity for record in records)
