from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.testbed.bed import Bed


@pytest.fixture
def clean_homes(bed: Bed) -> Iterator[Bed]:
    """Homes of the bed's hosts without what a test put there."""
    yield bed
    for host in bed.hosts.values():
        for name in (".cache", ".disagg", "models"):
            shutil.rmtree(host.home / name, ignore_errors=True)
