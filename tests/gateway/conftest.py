from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fleets import RunningFleet
from tests.served_gateway import served_gateway


@pytest.fixture(scope="session")
def gateway(tiny_fleet: RunningFleet) -> Iterator[str]:
    """`disagg serve` in front of `tiny_fleet`: its URL, without /v1."""
    with served_gateway(tiny_fleet.fleet.path) as gateway:
        yield gateway.url
        assert gateway.process.poll() is None, gateway.log.read_text()
