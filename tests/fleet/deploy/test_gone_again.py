"""What doctor sees on deployed hosts, and what `disagg uninstall` leaves on them.

The hosts are deployed once. The first tests only look at them; each later one gets a copy of what was on them then.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.deployed import Operator, edited, operator
from tests.testbed.bed import Bed, BedHost


@pytest.fixture(scope="module")
def deployed(machines: Bed, tmp_path_factory: pytest.TempPathFactory) -> Operator:
    """Whoever has deployed all hosts. What they had then is in the folder of its hosts.toml, by their names."""
    machines.need_links()
    with machines.entered():
        made = operator(machines, tmp_path_factory.mktemp("operator"))
        made.run("deploy", "--yes")
    for host in machines.hosts.values():
        copy(host.home / ".disagg", made.folder / host.name)
    return made


@pytest.fixture
def looked_at(bed: Bed, deployed: Operator) -> Operator:
    """All hosts as the deployment left them. For tests that leave them so, before those that use `fleet`."""
    assert all((host.home / ".disagg/hosts" / name / "current").exists() for name, host in bed.hosts.items())
    return deployed


@pytest.fixture
def fleet(bed: Bed, deployed: Operator) -> Iterator[Operator]:
    """All hosts as they were when they had just been deployed."""
    bed.need_bare_hosts()
    for host in bed.hosts.values():
        copy(deployed.folder / host.name, host.home / ".disagg")
    yield deployed
    for host in bed.hosts.values():
        for name in (".disagg", ".cache"):
            shutil.rmtree(host.home / name, ignore_errors=True)


def copy(source: Path, target: Path) -> None:
    """With owners, modes and times."""
    subprocess.run(["cp", "-a", source, target], check=True)


def remains(host: BedHost) -> list[str]:
    """Files below a host's home, but for what makes it a host of the bed."""
    kept = (".ssh", ".local", "guest")
    return sorted(
        str(path.relative_to(host.home))
        for path in host.home.rglob("*")
        if path.is_file() and path.relative_to(host.home).parts[0] not in kept
    )


def doctor(fleet: Operator, *names: str, code: int = 0) -> Any:
    """What `disagg doctor` reports of these hosts. code: its exit code."""
    hosts = [word for name in names for word in ("--host", name)]
    return json.loads(fleet.run("doctor", "--json", *hosts, code=code).stdout)


def test_doctor_sees_environment_token_version_and_that_nothing_serves(looked_at: Operator) -> None:
    body = doctor(looked_at, "dgx-spark-1", "mac-studio-2", code=1)
    for host in body["hosts"]:
        found = {one["check"]: one for one in host["findings"]}
        assert found["python"]["text"].startswith("env ")
        assert found["token"]["text"] == "0600"
        assert found["model"]["level"] == "ok"
        assert (found["server"]["level"], found["server"]["hint"]) == ("fault", f"disagg start --host {host['host']}")
    (pair,) = body["pairs"]
    assert {one["check"]: one["level"] for one in pair["findings"]}["model"] == "ok"
    assert "hides" in [one["check"] for one in pair["findings"]]
    assert body["fleet"][0]["text"].startswith("disagg 0.1.0 on 2 hosts")


def test_a_token_that_others_can_read_is_found_and_the_named_command_mends_it(looked_at: Operator) -> None:
    token = looked_at.bed.hosts["dgx-spark-1"].home / ".disagg/hosts/dgx-spark-1/token"
    token.chmod(0o644)

    def finding() -> Any:
        findings = doctor(looked_at, "dgx-spark-1", code=1)["hosts"][0]["findings"]
        return next(one for one in findings if one["check"] == "token")

    fault = finding()
    assert fault["level"] == "fault"
    words = fault["hint"].split()
    assert words[0] == "disagg"
    looked_at.run(*words[1:])
    assert finding()["level"] == "ok"


def test_uninstall_with_models_leaves_nothing(fleet: Operator) -> None:
    fleet.run("uninstall", "--yes", "--models")
    for host in fleet.bed.hosts.values():
        assert remains(host) == []
        assert not (host.home / ".disagg").exists()


def test_uninstall_leaves_models_which_go_with_a_second_uninstall(fleet: Operator) -> None:
    fleet.run("uninstall", "--yes")
    for host in fleet.bed.hosts.values():
        left = remains(host)
        assert left and [path for path in left if not path.startswith(".disagg/models/")] == []
    fleet.run("uninstall", "--yes", "--models")
    assert all(remains(host) == [] for host in fleet.bed.hosts.values())


def test_a_host_that_was_renamed_is_pruned_from_its_machine_and_no_other_machine_is_touched(fleet: Operator) -> None:
    with edited(fleet, ("[hosts.dgx-spark-2", "[hosts.renamed")):
        shown = fleet.run("uninstall", "--unused", "--dry-run", "--json").stdout
        found = {one["host"]: one for one in json.loads(shown)["machines"]}
        assert [one["kind"] for one in found.pop("renamed")["orphans"]] == ["host", "environment", "model"]
        assert [one["orphans"] for one in found.values()] == [[], [], []]
        fleet.run("uninstall", "--unused", "--yes")
    gone, *others = (fleet.bed.hosts[name] for name in ("dgx-spark-2", "dgx-spark-1", "mac-studio-1", "mac-studio-2"))
    assert remains(gone) == [] and all(
        (host.home / ".disagg/hosts" / host.name / "current/run").is_file() for host in others
    )


def test_a_carried_model_is_listed_as_such_and_can_be_removed(fleet: Operator) -> None:
    (row,) = json.loads(fleet.run("models", "list", "--json", "--host", "dgx-spark-1").stdout)["hosts"]
    assert row["state"] == "complete"
    fleet.run("models", "rm", "qwen", "--host", "dgx-spark-1", "--yes")
    assert list((fleet.bed.hosts["dgx-spark-1"].home / ".disagg/models/carried").iterdir()) == []
