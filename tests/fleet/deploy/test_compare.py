"""What a plan says about a host's change: from values, without a host."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import Deploy
from disagg.fleet.deploy import plan as planning
from disagg.fleet.deploy.compare import Content, Difference, PackageChange, difference, is_setting, parse
from disagg.fleet.deploy.release import ModelSource, TargetState, target_state
from disagg.fleet.deploy.requirements import installed_requirements
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.probe import ProbeOutput
from disagg.fleet.machine.upload import RESUMED_FROM, LargeFile
from tests.fleet.facts.fixture_facts import facts, fleet, here, spark, wanted
from tests.values import of_type


def content(of: TargetState, **packages: str) -> Content:
    """What a host holds that has this release."""
    settings = {name: tuple(text.decode().splitlines()) for name, text in of.files.items() if is_setting(name)}
    files = {name: hashlib.sha256(text).hexdigest() for name, text in of.files.items()}
    return Content(files, settings, {name.replace("_", "-"): version for name, version in packages.items()})


def compared(desired: TargetState, found: HostFacts, there: Content) -> Difference:
    return difference(desired, planning.plan(desired, found), found, there)


def locked(deploy: Deploy | None = None) -> TargetState:
    """A target state with the packages of this installation's lock."""
    local = replace(here(fleet(deploy=deploy)), requirements=installed_requirements())
    return of_type(target_state(local, spark(), facts("spark_bare")), TargetState)


def test_a_host_without_a_release_has_only_the_bytes_to_send() -> None:
    desired = locked()
    found = compared(desired, facts("spark_bare"), Content())
    assert (found.files, found.settings, found.packages) == ({}, (), ())
    assert found.to_send > sum(map(len, desired.files.values()))
    assert found.to_download == sum(one.nbytes for one in desired.environment.packages.values())


def test_settings_that_change_are_a_unified_diff() -> None:
    before, after = wanted(spark(), facts("spark_deployed")), wanted(spark(queue_size=7), facts("spark_deployed"))
    found = compared(after, facts("spark_deployed"), content(before))
    assert found.settings[:2] == ("--- hosts.toml (current)", "+++ hosts.toml (new)")
    assert "+queue_size = 7" in found.settings and not found.files
    assert [line for line in found.settings[2:] if line.startswith("-")] == ["-queue_size = 32"]


def test_a_definition_of_the_service_is_one_of_the_settings() -> None:
    desired = wanted(spark(), facts("spark_deployed"))
    there = content(desired)
    unit = next(name for name in there.settings if name.startswith("service/"))
    changed = replace(there, settings={**there.settings, unit: ("[Unit]", *there.settings[unit])})
    found = compared(desired, facts("spark_deployed"), changed)
    assert found.settings[0] == f"--- {unit} (current)" and "-[Unit]" in found.settings


def test_files_are_added_changed_and_removed() -> None:
    desired = wanted(spark(), facts("spark_deployed"))
    there = content(desired)
    files = {**there.files, "disagg/__init__.py": "0" * 64, "disagg/old.py": "0" * 64}
    del files["run"]
    found = compared(desired, facts("spark_deployed"), replace(there, files=files))
    assert found.files == {"disagg/__init__.py": "changed", "disagg/old.py": "removed", "run": "added"}


def test_packages_are_added_changed_and_removed_and_those_of_venv_do_not_count() -> None:
    desired = locked()
    versions = {name.replace("-", "_"): one.version for name, one in desired.environment.packages.items()}
    there = content(desired, **{**versions, "torch": "2.12.0", "gone": "1.0", "pip": "25.0"})
    packages = {name: version for name, version in there.packages.items() if name != "idna"}
    found = compared(desired, facts("spark_deployed"), replace(there, packages=packages))
    versions_now = desired.environment.packages
    assert found.packages == (
        PackageChange("gone", "1.0", ""),
        PackageChange("idna", "", versions_now["idna"].version),
        PackageChange("torch", "2.12.0", versions_now["torch"].version),
    )


def test_what_another_build_of_torch_may_not_need_is_not_said_to_be_added() -> None:
    desired = locked(Deploy(find_links=("/srv/wheels",)))
    packages = desired.environment.packages
    there = content(desired, torch=f"{packages['torch'].version}+cpu", numpy="1.0")
    changes = {one.name: one for one in compared(desired, facts("spark_deployed"), there).packages}
    assert changes["numpy"].before == "1.0" and changes["idna"].before == ""
    assert changes.keys().isdisjoint({"torch", "nvidia-cublas", "triton"})


def test_an_environment_that_stays_changes_no_package_and_downloads_nothing() -> None:
    desired = locked()
    found = facts("spark_deployed", environments={desired.environment.hash: True})
    releases = tuple(replace(one, environment=desired.environment.hash) for one in found.releases)
    same = compared(desired, replace(found, releases=releases), content(desired))
    assert same.packages == () and same.to_download == 0


def test_an_upload_that_goes_on_sends_the_rest(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    with weights.open("wb") as file:
        file.truncate(4 * RESUMED_FROM)
    part = LargeFile.of("weights", weights).part
    desired = replace(wanted(spark(), facts("spark_bare")), sources=(ModelSource("/here", "model-1", tmp_path),))
    whole = compared(desired, facts("spark_bare"), Content()).to_send
    rest = compared(desired, facts("spark_bare", uploads={part: RESUMED_FROM}), Content()).to_send
    assert whole - rest == RESUMED_FROM and rest > 3 * RESUMED_FROM


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("end", Content()),
        ("file\t1a\trun\nend", Content({"run": "1a"})),
        ("text\thosts.toml\ta\tb\ntext\thosts.toml\t\nend", Content(settings={"hosts.toml": ("a\tb", "")})),
        ("package\thuggingface_hub-2.4.0\nend", Content(packages={"huggingface-hub": "2.4.0"})),
        ("package\ttorch-2.13.0+cpu\nend", Content(packages={"torch": "2.13.0+cpu"})),
        ("text\thosts.toml\nnonsense\nend", Content()),
    ],
)
def test_a_probes_lines_are_the_content(lines: str, expected: Content) -> None:
    assert parse(ProbeOutput.parse("h", lines)) == expected
