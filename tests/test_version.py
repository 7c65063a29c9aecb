"""Which release a deployed server runs, and which one was deployed since."""

import tomllib
from pathlib import Path

import pytest

from disagg.version import OLDEST_PYTHON, RELEASE_VARIABLE, DeployedRelease, pending_release


def test_the_oldest_python_is_that_of_pyproject_toml() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">={}.{}".format(*OLDEST_PYTHON)


def test_a_deployed_server_reports_the_release_that_was_deployed_since_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, link = tmp_path / "releases" / ("a" * 16) / "disagg", tmp_path / "current"
    monkeypatch.delenv(RELEASE_VARIABLE, raising=False)
    assert pending_release() is None
    monkeypatch.setenv(RELEASE_VARIABLE, "a" * 16)
    assert pending_release(package) is None
    link.symlink_to(f"releases/{'a' * 16}")
    assert pending_release(package) is None
    link.unlink()
    link.symlink_to(f"releases/{'b' * 16}")
    assert pending_release(package) == DeployedRelease("b" * 16, link.lstat().st_mtime)
    (tmp_path / "releases" / ("b" * 16)).mkdir(parents=True)
    (link / "digests").write_text("c0de 5e77\n")
    assert pending_release(package) == DeployedRelease("b" * 16, link.lstat().st_mtime, "c0de", "5e77")
