"""Which wheels of a folder are carried to an offline host."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from disagg.errors import FleetError
from disagg.fleet.deploy.requirements import choose_wheels, host_tags, locked_packages, marker_environment
from disagg.fleet.facts.host import Python
from tests.fleet.facts.fixture_facts import facts

PYTHON = Python("/usr/bin/python3", (3, 12, 3))


def wheel(folder: Path, name: str, *requires: str) -> None:
    with zipfile.ZipFile(folder / name, "w") as file:
        project, version = name.split("-")[:2]
        lines = [f"Name: {project}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        file.writestr(f"{project}-{version}.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, ""]))


def chosen(folder: Path, *lines: str, on: str = "spark_bare", locked: str = "") -> tuple[list[str], list[str]]:
    found = facts(on)
    target = marker_environment(found, PYTHON)
    wheels, missing = choose_wheels(folder, lines, locked_packages(locked), target, host_tags(found, PYTHON))
    return [one.path.name for one in wheels], missing


def test_what_is_required_comes_with_all_that_it_requires_and_nothing_else(tmp_path: Path) -> None:
    wheel(tmp_path, "a-1.0-py3-none-any.whl", "b>=2", "d; sys_platform == 'darwin'", "e; extra == 'more'")
    wheel(tmp_path, "b-2.5-py3-none-any.whl", "a")
    wheel(tmp_path, "b-1.0-py3-none-any.whl")
    wheel(tmp_path, "d-1.0-py3-none-any.whl")
    wheel(tmp_path, "e-1.0-py3-none-any.whl")
    assert chosen(tmp_path, "a") == (["a-1.0-py3-none-any.whl", "b-2.5-py3-none-any.whl"], [])
    assert "e-1.0-py3-none-any.whl" in chosen(tmp_path, "a[more]")[0]
    assert "d-1.0-py3-none-any.whl" in chosen(tmp_path, "a", on="studio_bare")[0]


def test_only_wheels_for_the_hosts_platform_and_python_count_and_the_best_of_them_wins(tmp_path: Path) -> None:
    for tags in (
        "cp312-cp312-manylinux_2_28_aarch64",
        "cp312-cp312-manylinux2014_aarch64",
        "cp312-cp312-manylinux_2_99_aarch64",
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp311-cp311-manylinux_2_28_aarch64",
        "cp312-cp312-macosx_14_0_arm64",
        "cp312-cp312-macosx_27_0_arm64",
    ):
        wheel(tmp_path, f"torch-2.13.0-{tags}.whl")
    assert chosen(tmp_path, "torch") == (["torch-2.13.0-cp312-cp312-manylinux_2_28_aarch64.whl"], [])
    assert chosen(tmp_path, "torch", on="studio_bare")[0] == ["torch-2.13.0-cp312-cp312-macosx_14_0_arm64.whl"]


def test_a_locked_version_is_the_only_one_that_counts(tmp_path: Path) -> None:
    wheel(tmp_path, "a-1.0-py3-none-any.whl")
    wheel(tmp_path, "a-2.0-py3-none-any.whl")
    assert chosen(tmp_path, "a", locked="a==1.0\n")[0] == ["a-1.0-py3-none-any.whl"]
    assert chosen(tmp_path, "a", locked="A==1.5\n") == ([], ["a==1.5"])
    assert chosen(tmp_path, "a>=3") == ([], ["a>=3"])


def test_a_file_that_is_no_wheel_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a-1.0-py3-none-any.whl").write_bytes(b"half of it")
    with pytest.raises(FleetError, match=r"a-1\.0.* is not a wheel"):
        chosen(tmp_path, "a")
    (tmp_path / "a-1.0-py3-none-any.whl").rename(tmp_path / "a.whl")
    with pytest.raises(FleetError, match=r"a\.whl"):
        chosen(tmp_path, "a")
    with pytest.raises(FleetError, match="no folder of wheels"):
        chosen(tmp_path / "none", "a")
