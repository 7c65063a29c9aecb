from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.fleet.machine import process as local
from disagg.fleet.machine.ssh.machine import SSHMachine
from disagg.fleet.machine.ssh.settings import SSHTimeouts
from tests.fleet.yards import Farm, Yard, deployed_hosts
from tests.values import present


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    farm = Farm(tmp_path)
    yield farm
    for host in farm.state.recorded_hosts():
        record = farm.state.recorded(host)
        local.end(present(record).pid, present(record).identity, grace_s=0.2)


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    with deployed_hosts(Yard(tmp_path), monkeypatch) as yard:
        yield yard


@pytest.fixture
def lost_links_are_noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 3 s without an acknowledgement, not 8."""
    monkeypatch.setitem(present(SSHMachine.__init__.__kwdefaults__), "timeouts", SSHTimeouts(dead_link=3.0))
