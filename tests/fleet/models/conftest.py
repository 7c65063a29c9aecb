import shutil

import pytest


@pytest.fixture
def clean_homes(bed):
    """Homes of the bed's hosts without what a test put there."""
    yield bed
    for host in bed.hosts.values():
        for name in (".cache", ".disagg", "models"):
            shutil.rmtree(host.home / name, ignore_errors=True)
