"""Prune a machine: this one with another HOME, on which hosts.toml no longer names what was deployed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import CommandFailed, HostLocked
from disagg.fleet.changes.locks import locked
from disagg.fleet.deploy.steps import StepProgress
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.connect import Machines
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import script
from disagg.fleet.removal.removal import Pruned, Pruning
from tests.deadlines import LONG_S
from tests.fleet.site import Site
from tests.programs import needs
from tests.values import of_type

RENAMED = {"[hosts.spark]": "[hosts.new]", "[hosts.spark.engine]": "[hosts.new.engine]"}


@pytest.fixture
def renamed(deployed: Site) -> Site:
    deployed.changes = RENAMED
    return deployed


@contextmanager
def pruning(site: Site, **options: Any) -> Iterator[Pruning]:
    fleet = site.fleet
    with Machines(lambda host: LocalMachine(host.name)) as machines:
        yield Pruning(fleet, list(fleet.hosts.values()), machines, others=True, **options)


def find(site: Site, **options: Any) -> Pruned:
    with pruning(site, **options) as work:
        (found,) = work.find()
    return found


def prune(site: Site, **options: Any) -> Pruned:
    with pruning(site, **options) as work:
        (done,) = work.carry_out(work.find())
    return done


def test_what_its_host_needs_stays(deployed: Site) -> None:
    found = find(deployed)
    assert (found.orphans, found.error, found.removed) == ((), None, False)


def test_a_renamed_host_is_found_with_sizes_and_nothing_is_changed(renamed: Site) -> None:
    found = find(renamed)
    assert [one.kind for one in found.orphans] == ["host", "environment", "model"]
    assert all(one.nbytes for one in found.orphans) and renamed.own.is_dir()
    assert found.hosts == ("new",)


def test_pruning_leaves_nothing_of_it(renamed: Site) -> None:
    done = prune(renamed)
    assert done.removed and done.error is None
    left = [path for path in renamed.root.rglob("*") if path.is_file()]
    assert left == [], "its folder, its environment and its model are gone"
    assert find(renamed).orphans == ()


@needs("ps")
def test_a_server_that_still_runs_is_ended(renamed: Site) -> None:
    release = f"{renamed.own}/releases/{renamed.current()}"
    argv = [sys.executable, "-c", "import signal; signal.pause()", release]
    with subprocess.Popen(argv, start_new_session=True) as process:
        threading.Thread(target=process.wait, daemon=True).start()  # else it would stay as a zombie, which still counts
        try:
            (renamed.own / "serving").write_text(f"{process.pid} {renamed.current()}\n")
            assert f"its server runs (pid {process.pid})" in find(renamed).orphans[0].about
            assert prune(renamed).error is None
            assert process.wait(LONG_S) < 0 and not renamed.own.exists()
        finally:
            process.kill()


def test_an_environment_that_another_host_needs_stays(renamed: Site) -> None:
    environment = next((renamed.root / "envs").iterdir())
    release = renamed.root / "hosts/new/releases" / ("2" * 16)
    release.mkdir(parents=True)
    (release / "environment").write_text(f"{environment.name}\n")
    done = prune(renamed)
    assert [one.kind for one in done.orphans] == ["host", "model"]
    assert (environment / ".complete").exists() and release.is_dir()
    audit = (renamed.root / "hosts/new/logs/audit.log").read_text()
    assert '"event": "uninstall --unused"' in audit and '"ended": "done"' in audit


def test_a_host_that_another_command_changes_is_not_removed(renamed: Site) -> None:
    with (
        locked(LocalMachine("spark"), HostPaths(str(renamed.home), "spark"), "deploy"),
        pytest.raises(HostLocked, match="spark is locked"),
    ):
        prune(renamed)
    assert renamed.own.is_dir()


def test_what_came_after_the_question_is_not_removed(renamed: Site) -> None:
    with pruning(renamed) as work:
        found = work.find()
        later = renamed.root / "envs" / ("9" * 16)
        later.mkdir()
        (done,) = work.carry_out(found)
    assert done.removed and later.is_dir()


def test_what_a_host_needs_since_the_question_is_not_removed(renamed: Site) -> None:
    with pruning(renamed) as work:
        found = work.find()
        renamed.changes = {}
        (renamed.root / "hosts/new").mkdir()
        Path(renamed.own).rename(renamed.root / "hosts/new/moved")
        (renamed.root / "hosts/new/moved/releases").rename(renamed.root / "hosts/new/releases")
        (done,) = work.carry_out(found)
    assert done.orphans == () and done.removed
    assert next((renamed.root / "envs").iterdir()).is_dir()


def test_hosts_that_share_a_machine_have_one_result(renamed: Site) -> None:
    fleet = renamed.fleet
    second = replace(fleet.hosts["new"], name="second")
    both = replace(fleet, hosts={**fleet.hosts, "second": second})
    with Machines(lambda host: LocalMachine(host.name)) as machines:
        (found,) = Pruning(both, [*both.hosts.values()], machines, others=True).find()
    assert found.host.name == "new" and found.hosts == ("new", "second")


def begin_deploy(home: Path, environment: str, model: str) -> None:
    """As the first deploy of a host of another fleet is when it has its lock."""
    (home / ".disagg/hosts/late/lock").mkdir(parents=True)


def end_deploy(home: Path, environment: str, model: str) -> None:
    """As that host is after its deploy."""
    release = home / ".disagg/hosts/late/releases" / ("3" * 16)
    release.mkdir(parents=True)
    (release / "environment").write_text(f"{environment}\n")
    (release / "hosts.toml").write_text(f'mlx = "{home}/.disagg/models/carried/{model}"\n')


@pytest.mark.parametrize("late", [begin_deploy, end_deploy])
@pytest.mark.parametrize("kind", ["envs", "models/carried"])
def test_what_a_host_may_need_whose_first_deploy_began_after_the_look_stays(
    renamed: Site, kind: str, late: Callable[[Path, str, str], None]
) -> None:
    (environment,) = (renamed.root / "envs").iterdir()
    (model,) = (renamed.root / "models/carried").iterdir()

    def report(progress: StepProgress) -> None:
        if progress.what.startswith(f"remove {renamed.root}/{kind}/") and not progress.line:
            late(renamed.home, environment.name, model.name)

    done = prune(renamed, report=report)
    of_type(done.error, CommandFailed)
    assert not done.removed
    assert sorted(path.name for path in (renamed.root / "models/carried").iterdir()) == [model.name]
    assert environment.exists() == (kind == "envs") and model.exists()


@pytest.mark.parametrize("needed", [True, False])
def test_an_interruption_while_it_looks_leaves_no_environment_aside_that_a_release_needs(
    tmp_path: Path, needed: bool
) -> None:
    environment, release = tmp_path / "envs/1", tmp_path / "hosts/a/releases/2"
    for folder in (environment, release, tmp_path / "bin"):
        folder.mkdir(parents=True)
    (release / "environment").write_text("1\n" if needed else "3\n")
    grep = tmp_path / "bin/grep"
    grep.write_text(f"#!/bin/sh\ntrap '' TERM\nkill -TERM 0\nexec {shutil.which('grep')} \"$@\"\n")
    grep.chmod(0o755)
    argv = ["/bin/sh", "-s", "--", str(environment), str(tmp_path / "hosts")]
    path = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    subprocess.run(argv, input=script("remove_shared.sh"), text=True, env=path, start_new_session=True, check=False)
    assert environment.exists() == needed and not (tmp_path / "envs/1.removed").exists()


@pytest.mark.parametrize("moment", ["rm", "mv"])
def test_a_deploy_that_begins_while_an_environment_goes_keeps_it(tmp_path: Path, moment: str) -> None:
    """It locks its host when the script first removes, or moves, anything. moment: that command."""
    environment, lock = tmp_path / "envs/1", tmp_path / "hosts/a/lock"
    for folder in (environment, tmp_path / "bin", lock.parent):
        folder.mkdir(parents=True)
    command = tmp_path / "bin" / moment
    command.write_text(f'#!/bin/sh\nmkdir -p {lock}\nexec {shutil.which(moment)} "$@"\n')
    command.chmod(0o755)
    argv = ["/bin/sh", "-s", "--", str(environment), str(tmp_path / "hosts")]
    path = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = subprocess.run(argv, input=script("remove_shared.sh"), text=True, env=path, capture_output=True, check=False)
    assert done.returncode == 1 and "a command changes a and may need it" in done.stderr
    assert environment.exists() and not (tmp_path / "envs/1.removed").exists()


def test_what_an_interrupted_removal_left_is_removed(deployed: Site) -> None:
    left = [deployed.root / "envs" / f"{'9' * 16}.removed", deployed.root / "models/carried/old-2.removed"]
    for path in left:
        (path / "part").mkdir(parents=True)
    done = prune(deployed)
    assert [one.path for one in done.orphans] == list(map(str, left)) and done.removed
    assert not any(path.exists() for path in left)
