from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.fleet.services import supervise
from tests.fleet.farm import PLAIN_PATH
from tests.fleet.lifecycle.yard import Yard


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    yard = Yard(tmp_path, ("a", "b"))
    monkeypatch.setenv("HOME", str(yard.home))
    monkeypatch.setenv("PATH", PLAIN_PATH)
    yield yard
    for folder in (yard.home / ".disagg/hosts").glob("*"):
        supervise.stop(folder)
