from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.deploy.deploy_site import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A host to deploy to, with an empty home and a short PATH."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return Site(tmp_path)
