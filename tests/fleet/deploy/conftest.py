from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fleet.site import Site
from tests.fleet.yards import PLAIN_PATH


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A host to deploy to, with an empty home and a short PATH."""
    return _site(tmp_path, monkeypatch)


@pytest.fixture
def deployed(once_deployed: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The same host as it is after one deployment, copied: a deployment takes a second."""
    shutil.rmtree(once_deployed / "home")
    _copy(once_deployed / "deployed", once_deployed / "home")
    return _site(once_deployed, monkeypatch)


@pytest.fixture(scope="module")
def once_deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a host that was deployed to. `deployed`: a copy of its home."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        site = _site(folder, patch)
        assert site.deploy().error is None
        site.current()
    _copy(folder / "home", folder / "deployed")
    return folder


def _site(folder: Path, patch: pytest.MonkeyPatch) -> Site:
    (folder / "home").mkdir(exist_ok=True)
    patch.setenv("HOME", str(folder / "home"))
    patch.setenv("PATH", PLAIN_PATH)
    return Site(folder)


def _copy(source: Path, target: Path) -> None:
    """With modes and times."""
    subprocess.run(["cp", "-a", source, target], check=True)
