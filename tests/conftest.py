"""Fixtures that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import tiny_models
from tests.fleets import RunningFleet, running, write_hosts


@pytest.fixture(scope="session")
def tiny_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """One prefill and one decode server of a tiny qwen3, called `tiny`; context 4096, small queues."""
    folder = tmp_path_factory.mktemp("tiny-fleet")
    model = tiny_models.make("qwen3", folder / "model")
    path = write_hosts(folder, {"tiny": model}, context=4096, decode={"max_batch": 4}, queue_size=8)
    with running(path) as fleet:
        yield fleet
