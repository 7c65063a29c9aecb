"""Of a package only the files that its lock names are installed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from uv import find_uv_bin

from disagg.config import Deploy, Host
from disagg.fleet.deploy import plan as planning
from disagg.fleet.deploy.environment import OTHER_BUILDS, Environment, environment
from disagg.fleet.deploy.release import TargetState, target_state
from disagg.fleet.deploy.requirements import Pin, hash_lines, installed_requirements, locked_packages, render
from disagg.fleet.facts.host import Python
from disagg.fleet.machine.machine import script
from disagg.fleet.services.base import RunScript
from tests.deadlines import LONG_S
from tests.fleet.facts.fixture_facts import facts, fleet, front, here, spark
from tests.values import of_type

ONE, OTHER = "1" * 64, "2" * 64


def made(deploy: Deploy | None = None, host: Host | None = None) -> Environment:
    result = environment(host or spark(), deploy or Deploy(), facts("spark_bare"), installed_requirements())
    return of_type(result, Environment)


def texts(of: Environment) -> Mapping[str, str]:
    return {name: of_type(content, bytes).decode() for name, content in of.files.items()}


def test_a_lock_is_read_as_it_was_written() -> None:
    packages = {
        "old": Pin("1.0", 7, (ONE,), ("3.11", "3.12")),
        "torch": Pin("2.13.0", 5, (ONE, OTHER)),
    }
    text = render(packages, ("prefill",), "linux-aarch64")
    assert locked_packages(text) == packages
    assert f'old==1.0 ; python_version == "3.11" or python_version == "3.12" --hash=sha256:{ONE}  # 7\n' in text


def test_every_package_of_a_lock_is_installed_by_its_hashes_and_none_without() -> None:
    found = made()
    assert found.all_hashed and found.hashed.keys() == found.packages.keys() >= {"torch", "nvidia-cublas"}
    assert texts(found) == {"requirements.txt": hash_lines(found.packages), "constraints.txt": ""}
    assert all(" --hash=sha256:" in line for line in texts(found)["requirements.txt"].splitlines())


@pytest.mark.parametrize("deploy", [Deploy(find_links=("/srv/wheels",)), Deploy(extra_index_urls=("https://cpu/",))])
def test_where_torch_may_be_another_build_all_but_the_packages_of_such_builds_have_hashes(deploy: Deploy) -> None:
    found = made(deploy)
    others = found.packages.keys() - found.hashed.keys()
    assert {"torch", "triton", "nvidia-cublas", "cuda-toolkit"} <= others and all(map(OTHER_BUILDS.fullmatch, others))
    written = texts(found)
    assert written["hashed.txt"] == hash_lines(found.hashed) and "numpy" in found.hashed
    assert written["requirements.txt"].splitlines() == list(found.requirements)
    assert "torch==" in written["constraints.txt"] and "sha256" not in written["constraints.txt"]


def test_a_mirror_of_the_index_has_the_same_files() -> None:
    assert made(Deploy(index_url="https://mirror/simple")).all_hashed


def test_of_local_wheels_those_that_are_sent_have_hashes(tmp_path: Path) -> None:
    locked = f"anyio==4.16.0 --hash=sha256:{ONE}  # 5\nidna==3.20 --hash=sha256:{ONE}  # 5\ntorch==2.13.0  # 5\n"
    for name in ("anyio-4.16.0", "torch-2.13.0"):
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\n")
    needed = replace(here(fleet()).requirements, locks={"prefill-linux-aarch64": locked})
    found = of_type(environment(spark(), Deploy(wheels=tmp_path), facts("spark_bare"), needed), Environment)
    assert found.hashed.keys() == {"anyio"} and not found.all_hashed


def test_what_a_vendor_has_installed_keeps_its_files() -> None:
    own = replace(spark(), python="/opt/nv/python", site_packages=True)
    there = facts("spark_bare", pythons=(Python("/opt/nv/python", (3, 12, 3), configured=True),))
    found = of_type(environment(own, Deploy(), there, installed_requirements()), Environment)
    assert not found.hashed and "hashed.txt" not in found.files


def test_an_environment_has_what_its_own_python_needs_of_a_lock() -> None:
    locked = f'a==1 --hash=sha256:{ONE}  # 5\nb==1 ; python_version == "3.11" --hash=sha256:{ONE}  # 5\n'
    host_python = replace(made(), locked=locked_packages(locked))
    assert host_python.version == "3.12" and host_python.packages.keys() == {"a"}
    old = replace(host_python, python=Python("/usr/bin/python3.11", (3, 11, 2)))
    assert old.packages.keys() == {"a", "b"}


def test_the_index_may_get_further_wheels_without_a_new_environment() -> None:
    found = made()
    more = {name: replace(one, hashes=(*one.hashes, OTHER)) for name, one in found.packages.items()}
    assert replace(found, locked=locked_packages(render(more, ("prefill",), "linux-aarch64"))).hash == found.hash


@pytest.mark.parametrize(("links", "required"), [((), True), (("/srv/wheels",), False)])
def test_the_installer_takes_nothing_without_a_hash_if_every_package_has_one(
    links: tuple[str, ...], required: bool
) -> None:
    installation = replace(here(fleet(front(), deploy=Deploy(find_links=links))), requirements=installed_requirements())
    prefill = replace(here(fleet(deploy=Deploy(find_links=links))), requirements=installed_requirements())
    for local, host, found, strict in (
        (installation, front(), facts("spark_bare", "front"), True),
        (prefill, spark(), facts("spark_bare"), required),
    ):
        plan = planning.plan(of_type(target_state(local, host, found), TargetState), found)
        build = of_type(next(step.action for step in plan.steps if step.name == "environment"), RunScript)
        assert ("--require-hashes" in build.argv) is strict


@pytest.mark.slow
@pytest.mark.parametrize("file", ["requirements.txt", "hashed.txt"])
@pytest.mark.parametrize("changed", [False, True])
def test_a_file_with_another_content_is_not_installed(tmp_path: Path, file: str, changed: bool) -> None:
    path = wheel(tmp_path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if changed:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("more.py", "")
    spec = tmp_path / "spec"
    spec.mkdir()
    for name in ("requirements.txt", "constraints.txt"):
        (spec / name).touch()
    (spec / file).write_text(hash_lines({"thing": Pin("1.0", hashes=(digest,))}))
    strict = ("--require-hashes",) if file == "requirements.txt" else ()
    words = (tmp_path / "build", tmp_path / "final", spec, sys.executable, find_uv_bin(), 0)
    done = subprocess.run(
        [
            "sh",
            "-c",
            script("environment.sh"),
            "sh",
            *map(str, words),
            *strict,
            "--no-index",
            "--find-links",
            str(tmp_path),
        ],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (done.returncode == 0) is not changed, done.stderr
    assert (tmp_path / "final/.complete").exists() is not changed
    assert not changed or digest in done.stderr


def wheel(folder: Path) -> Path:
    path = folder / "thing-1.0-py3-none-any.whl"
    content = {
        "thing.py": "",
        "thing-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
        "thing-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "thing-1.0.dist-info/RECORD"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
        archive.writestr(record, "".join(f"{name},,\n" for name in (*content, record)))
    return path
