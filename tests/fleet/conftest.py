from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.fleet.machine import process as local
from tests.fleet.farm import Farm
from tests.values import present


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    farm = Farm(tmp_path)
    yield farm
    for host in farm.state.recorded_hosts():
        record = farm.state.recorded(host)
        local.end(present(record).pid, present(record).identity, grace_s=0.2)
