from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.fleet.machine import process as local
from disagg.fleet.machine.ssh.machine import SSHMachine
from disagg.fleet.machine.ssh.settings import SSHTimeouts
from disagg.fleet.services import supervise
from tests.fleet.farm import PLAIN_PATH, Farm
from tests.fleet.lifecycle.yard import Yard
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
    yard = Yard(tmp_path, ("a", "b"))
    monkeypatch.setenv("HOME", str(yard.home))
    monkeypatch.setenv("PATH", PLAIN_PATH)
    yield yard
    for folder in (yard.home / ".disagg/hosts").glob("*"):
        supervise.stop(folder)


@pytest.fixture
def lost_links_are_noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 3 s without an acknowledgement, not 8."""
    monkeypatch.setitem(present(SSHMachine.__init__.__kwdefaults__), "timeouts", SSHTimeouts(dead_link=3.0))
