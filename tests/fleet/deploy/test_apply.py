"""Deployments carried out on a real file system, interrupted at every step, and completed by the next run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import Cancelled, CommandFailed, DeployRefused, FleetError, HostLocked, HostUnreachable
from disagg.fleet.changes.audit import Caller
from disagg.fleet.changes.locks import locked
from disagg.fleet.deploy.compare import read_content
from disagg.fleet.deploy.deployment import Deployment, DeployResult, Planner, comparer, exit_code
from disagg.fleet.deploy.rollback import releases_there, rollback, rollback_to
from disagg.fleet.deploy.steps import Plan, Step
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.removal.removal import uninstall
from disagg.fleet.services.base import RunScript
from disagg.token import token_digest
from tests.deadlines import LONG_S
from tests.fleet.site import PACKAGE, Saboteur, Site
from tests.programs import needs
from tests.values import of_type, present

NEW_CODE = {**PACKAGE, "disagg/servers/__main__.py": b"VALUE = 2\n"}


def stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """What tells whether any file or folder was touched."""
    found: dict[str, tuple[int, ...]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_mode, status.st_size)
    return found


def others(site: Site, why: str = "deploy", pid: int | None = None, machine: str | None = None) -> str:
    """The text of a lock that another command holds."""
    holder = Caller.this_process(why)
    return json.dumps(asdict(replace(holder, who="ada", pid=pid or holder.pid, machine=machine or holder.machine)))


def put_lock(site: Site, text: str) -> None:
    (site.own / "lock").mkdir(parents=True)
    (site.own / "lock/holder").write_text(text + "\n")


def test_a_bare_host_gets_a_whole_release(site: Site) -> None:
    report = site.deploy()
    assert (report.result, report.error) == ("changed", None)
    assert report.plan is not None and report.plan.needs == "start"
    assert site.current() == report.plan.release
    assert (site.own / "token").read_text() == f"{site.token}\n"
    assert (site.own / "token").stat().st_mode & 0o777 == 0o600
    assert site.root.stat().st_mode & 0o777 == 0o700
    carried = site.fleet_on_host().models["tiny"].sources["transformers"]
    assert Path(carried, "config.json").read_text() == "{}"
    assert sorted(path.name for path in site.own.iterdir()) == ["current", "logs", "releases", "running", "token"]


def test_a_second_deployment_changes_nothing_and_writes_nothing(deployed: Site) -> None:
    before = stamps(deployed.home)
    machine = Saboteur(LocalMachine("spark"))
    report = deployed.deploy(machine)
    assert (report.result, machine.changes) == ("unchanged", 0)
    assert stamps(deployed.home) == before


def test_a_changed_line_transfers_the_package_alone(deployed: Site) -> None:
    environments = stamps(deployed.root / "envs")
    deployed.package = NEW_CODE
    machine = Saboteur(LocalMachine("spark"))
    report = deployed.deploy(machine)
    assert report.result == "changed"
    assert machine.trees == [f"{deployed.own}/releases/{deployed.current()}"]
    assert stamps(deployed.root / "envs") == environments
    assert "2" in (deployed.own / "current/disagg/servers/__main__.py").read_text()


def test_a_host_with_another_operators_token_is_refused_with_a_choice(deployed: Site) -> None:
    theirs, deployed.token = deployed.token, "the-token-of-another-clone"
    report = deployed.deploy()
    error = of_type(report.error, DeployRefused)
    own = token_digest(deployed.token)[:8]
    assert f"token {token_digest(theirs)[:8]} of another operator, and this machine's is {own}" in error.message
    assert "--adopt-token" in error.hint and "--replace-token" in error.hint
    assert (deployed.own / "token").read_text() == f"{theirs}\n"
    deployed.replace_token = True
    replaced = deployed.deploy()
    assert f"replace the token {token_digest(theirs)[:8]}" in [step.what for step in present(replaced.plan).steps]
    assert (deployed.own / "token").read_text() == f"{deployed.token}\n"


def test_uv_is_asked_for_the_locked_versions_from_where_hosts_toml_says(site: Site) -> None:
    site.changes = {'installer = "uv"': 'installer = "uv"\nindex_url = "http://mirror.lab/simple"'}
    assert site.deploy().result == "changed"
    venv, install = (site.home / ".local/uv.log").read_text().splitlines()
    build, spec = f"{site.own}/incoming/environment", f"{site.own}/incoming/spec"
    assert venv.startswith("venv --quiet --python /") and venv.endswith(f" {build}")
    files = f"-r {spec}/requirements.txt -c {spec}/constraints.txt"
    index = "--index-url http://mirror.lab/simple --trusted-host mirror.lab"
    assert install == f"pip install --python {build}/bin/python {files} {index}"


def test_a_plan_shows_what_differs_from_the_release_that_is_there(deployed: Site) -> None:
    environment = next((deployed.root / "envs").iterdir())
    (environment / "lib/python3.12/site-packages/torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    deployed.package = NEW_CODE
    deployed.changes = {"port = 18321": "port = 18322"}
    with deployed.deployment() as deployment:
        deployment.compare = comparer(deployed.here)
        (report,) = deployment.plan()
    found = present(report.difference)
    assert found.files == {"disagg/servers/__main__.py": "changed"}
    assert {"-port = 18321", "+port = 18322"} <= set(found.settings) and found.to_send > 0
    assert read_content(LocalMachine("spark"), deployed.facts()).packages == {"torch": "2.13.0+cpu"}


def test_two_releases_with_environments_of_their_own_are_kept_with_them(site: Site) -> None:
    hashes = []
    for number in range(4):
        site.package = {**PACKAGE, "disagg/servers/__main__.py": f"VALUE = {number}\n".encode()}
        site.declared = (f"anyio>={number}",)
        site.deploy()
        hashes.append(site.current())
    assert sorted(path.name for path in (site.own / "releases").iterdir()) == sorted(hashes[-2:])
    assert len(list((site.root / "envs").iterdir())) == 2


def next_release(site: Site, number: int) -> str:
    """Deploy another release; its name."""
    site.package = {**PACKAGE, "disagg/servers/__main__.py": f"VALUE = {number}\n".encode()}
    site.deploy()
    return site.current()


def links(site: Site) -> dict[str, str]:
    return {name: (site.own / name).readlink().name for name in ("current", "previous", "running")}


def test_a_release_that_never_ran_is_not_what_rollback_goes_back_to(site: Site) -> None:
    first = next_release(site, 1)
    (site.own / "serving").write_text(f"1 {first}\n")  # it was started
    second, third = next_release(site, 2), next_release(site, 3)
    assert links(site) == {"current": third, "previous": first, "running": first}
    assert (site.own / "releases" / second).exists(), "rollback --to goes there"
    with Deployment([site.host], rollback, "rollback", connect=lambda host: LocalMachine(host.name)) as back:
        back.carry_out(back.plan())
    assert links(site) == {"current": first, "previous": third, "running": first}


def test_three_earlier_releases_are_kept_and_can_be_gone_back_to(site: Site) -> None:
    made = []
    for number in range(6):
        made.append(next_release(site, number))
        folder = site.own / "releases" / made[-1]
        os.utime(folder, (number, number))
    assert {path.name for path in (site.own / "releases").iterdir()} == set(made[-4:])
    decide = rollback_to([made[2][:8]])
    with Deployment([site.host], decide, "rollback", connect=lambda host: LocalMachine(host.name)) as back:
        assert [one.result for one in back.carry_out(back.plan())] == ["changed"]
    assert site.current() == made[2]


@pytest.mark.parametrize("broken_at", ["link", "release", "check", "switch"])
def test_a_host_of_an_earlier_disagg_starts_what_ran_though_its_upgrade_broke_off(site: Site, broken_at: str) -> None:
    first = next_release(site, 1)
    (site.own / "serving").write_text(f"1 {first}\n")  # it was started
    (site.own / "running").unlink()  # by a disagg that knew no such link
    site.package = NEW_CODE
    number = ["prepare", "link", "release", "check", "switch"].index(broken_at) + 1
    assert site.deploy(Saboteur(LocalMachine("spark"), number, broken_at == "link", CommandFailed("x"))).error
    assert (site.own / "running/run").samefile(site.own / "releases" / first / "run")
    assert site.deploy().error is None
    assert links(site) == {"current": site.current(), "previous": first, "running": first}


def test_before_its_first_start_a_host_runs_what_was_deployed_last(site: Site) -> None:
    next_release(site, 1)
    last = next_release(site, 2)
    assert links(site)["running"] == last


def change_everything(site: Site, number: int) -> None:
    """So that the next plan has every kind of step."""
    site.package = {**PACKAGE, "disagg/servers/__main__.py": f"VALUE = {number}\n".encode()}
    site.declared = ("anyio>=4", f"httpx>=0.{number}")
    site.token, site.replace_token = f"another-token-for-tests-{number}", True
    (site.folder / "fleet/weights/config.json").write_text(f'{{"model_type": "llama", "number": {number}}}')


STEPS = ["prepare", "requirements", "environment", "model", "adopt", "token", "release", "check", "switch", "tidy"]
ERRORS: dict[str, Callable[[], BaseException]] = {
    "failing before": lambda: CommandFailed("spark: No space left on device"),
    "link cut after": lambda: HostUnreachable("spark: the connection is lost"),
}


BROKEN_AT = {"failing before": (1, 3, 5, 7, 9), "link cut after": (1, 3, 5, 7, 9, 10)}
"""By step: all states that a host can be left in, since what is there after a step is there before the next."""


@pytest.mark.parametrize("kind", ERRORS)
def test_broken_off_at_any_step_the_old_release_stays_and_the_next_run_repairs(deployed: Site, kind: str) -> None:
    for number in BROKEN_AT[kind]:
        name, old = STEPS[number - 1], deployed.current()
        change_everything(deployed, number)
        broken = deployed.deploy(Saboteur(LocalMachine("spark"), number, "after" in kind, ERRORS[kind]()))
        assert broken.result == "failed"
        assert broken.plan is not None and [step.name for step in broken.plan.steps] == STEPS
        assert broken.error is not None and f"in step {number} of {len(STEPS)}" in broken.error.message, name
        switched = name == "tidy" or (name == "switch" and "after" in kind)
        assert (deployed.current() == old) != switched, name
        repaired = deployed.deploy()
        assert repaired.error is None, name
        assert repaired.plan is not None and deployed.current() == repaired.plan.release != old
        model = Path(deployed.fleet_on_host().models["tiny"].sources["transformers"])
        assert json.loads((model / "config.json").read_text()) == {"model_type": "llama", "number": number}
        there = {path.name for path in deployed.own.iterdir()}
        assert there == {"current", "logs", "previous", "releases", "running", "token"}, name
    assert deployed.deploy().result == "unchanged"


def test_an_environment_that_cannot_be_built_is_reported_with_the_installers_words(deployed: Site) -> None:
    first = deployed.current()
    change_everything(deployed, 1)
    (deployed.home / "no-index").touch()
    error = deployed.deploy().error
    assert isinstance(error, CommandFailed)
    assert "error: no index answers" in error.message and "build the Python" in error.message
    assert "index_url" in error.hint
    assert deployed.current() == first
    (deployed.home / "no-index").unlink()
    assert deployed.deploy().result == "changed"


def test_a_half_made_or_damaged_environment_is_built_again(deployed: Site) -> None:
    environment = next((deployed.root / "envs").iterdir())
    (environment / ".complete").unlink()
    report = deployed.deploy()
    assert report.plan is not None
    assert [step.name for step in report.plan.steps] == ["prepare", "requirements", "environment", "tidy"]
    assert (environment / ".complete").exists()


@pytest.mark.parametrize("how", ["emptied", "removed", "added"])
def test_a_release_whose_files_were_damaged_is_sent_again(deployed: Site, how: str) -> None:
    first, file = deployed.current(), deployed.own / "current/disagg/servers/__main__.py"
    if how == "emptied":
        file.write_bytes(b"")
    elif how == "removed":
        file.unlink()
    else:
        file.with_name("stray.py").touch()
    report = deployed.deploy()
    assert report.plan is not None and report.error is None
    assert [step.name for step in report.plan.steps] == ["prepare", "release", "check", "tidy"]
    assert (deployed.current(), file.read_bytes()) == (first, PACKAGE["disagg/servers/__main__.py"])
    assert deployed.deploy().result == "unchanged"


def test_a_damaged_release_that_is_not_current_is_sent_again_before_it_is_switched_to(deployed: Site) -> None:
    first = deployed.current()
    deployed.package = NEW_CODE
    deployed.deploy()
    (deployed.own / "releases" / first / "disagg/servers/__main__.py").unlink()
    refused = run(deployed, rollback, "rollback").error
    assert refused is not None and f"the files of release {first} have changed" in refused.message
    deployed.package = dict(PACKAGE)
    assert deployed.deploy().error is None
    assert deployed.current() == first


def test_bytecode_that_servers_leave_in_a_release_is_no_damage(deployed: Site) -> None:
    cache = deployed.own / "current/disagg/__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "x.cpython-311.pyc").write_bytes(b"x")
    assert deployed.deploy().result == "unchanged"


def test_a_release_that_does_not_load_is_never_switched_to(deployed: Site) -> None:
    first = deployed.current()
    deployed.package = {**PACKAGE, "disagg/servers/__main__.py": b"import no_such_module\n"}
    error = deployed.deploy().error
    assert error is not None and "No module named 'no_such_module'" in error.message
    assert deployed.current() == first


def test_a_file_that_stands_where_a_folder_should_is_reported_in_the_systems_words(site: Site) -> None:
    (site.root / "hosts").mkdir(parents=True)
    (site.root / "hosts/spark").write_text("")
    error = site.deploy().error
    assert isinstance(error, FleetError) and str(site.root / "hosts/spark") in error.message


def test_a_read_only_home_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any account meets it: root would be let in by modes, but not by a read-only mount."""
    with site.deployment() as deployment:
        real = deployment.planner
        deployment.planner = lambda host, facts: real(host, replace(facts, writable=False))
        report = deployment.plan()[0]
    assert isinstance(report.error, DeployRefused) and "is read-only" in report.error.message


def test_a_second_deployment_at_once_says_who_holds_the_lock_and_leaves_it(site: Site) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Saboteur):
        def send(self, *arguments: Any, **options: Any) -> None:
            inside.set()
            assert go_on.wait(LONG_S)
            super().send(*arguments, **options)

    first = threading.Thread(target=site.deploy, args=(Slow(LocalMachine("spark")),))
    first.start()
    try:
        assert inside.wait(LONG_S)
        with pytest.raises(HostLocked, match=rf"for `disagg deploy` since .* \(pid {os.getpid()}\)") as refused:
            site.deploy()
        assert "nothing was changed" in refused.value.hint and "--break-lock" in refused.value.hint
    finally:
        go_on.set()
        first.join()
    assert site.deploy().result == "unchanged"


def test_the_lock_of_a_dead_process_of_this_machine_is_taken_over(site: Site) -> None:
    put_lock(site, others(site, pid=2**22 - 1))
    assert site.deploy().result == "changed"
    assert not (site.own / "lock").exists()


EVE = {"who": "eve", "machine": "desk", "pid": 7, "identity": "x", "since": 1.0, "why": "deploy"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "nonsense", '{"who": "eve"}', "[1]"),
        *(
            json.dumps(EVE | changes)
            for changes in ({"since": "x"}, {"since": 1e300}, {"pid": 1 << 70}, {"who": "\x1b"})
        ),
    ],
)
def test_a_lock_of_unknown_owner_stays_until_it_is_broken(site: Site, text: str) -> None:
    put_lock(site, text)
    here, paths = LocalMachine("spark"), HostPaths(str(site.home), "spark")
    with pytest.raises(HostLocked, match="its holder file is unreadable"), locked(here, paths, "deploy"):
        raise AssertionError("it was taken")
    with locked(here, paths, "deploy", break_lock=True):
        assert json.loads((site.own / "lock/holder").read_text())["pid"] == os.getpid()
    assert not (site.own / "lock").exists()


def test_the_lock_of_another_machine_stays_until_it_is_broken(site: Site) -> None:
    put_lock(site, others(site, machine="desk", pid=2**22 - 1))
    with pytest.raises(HostLocked, match="ada@desk holds it for `disagg deploy` since"):
        site.deploy()
    assert (site.own / "lock/holder").exists()
    assert site.deploy(break_lock=True).result == "changed"


def test_a_lock_is_given_back_also_after_an_interruption(site: Site) -> None:
    paths = site.facts().paths
    with pytest.raises(Cancelled), locked(LocalMachine("spark"), paths, "deploy"):
        assert (site.own / "lock/holder").exists()
        raise Cancelled("interrupted")
    assert not (site.own / "lock").exists()


def run(site: Site, decide: Planner, why: str) -> DeployResult:
    with Deployment([site.host], decide, why, connect=lambda host: LocalMachine(host.name)) as deployment:
        return deployment.carry_out(deployment.plan())[0]


def test_rollback_goes_back_and_forth(deployed: Site) -> None:
    first = deployed.current()
    assert isinstance(run(deployed, rollback, "rollback").error, DeployRefused)
    deployed.package = NEW_CODE
    deployed.deploy()
    second = deployed.current()
    assert run(deployed, rollback, "rollback").result == "changed"
    assert deployed.current() == first
    assert run(deployed, rollback, "rollback").result == "changed"
    assert deployed.current() == second


@needs("ps")
def test_a_release_from_before_tls_is_gone_back_to_only_while_it_runs(site: Site) -> None:
    site.package = {name: data for name, data in PACKAGE.items() if not name.startswith("disagg/tls/")}
    assert site.deploy().error is None
    first = site.current()
    (site.own / "serving").write_text(f"1 {first}\n")  # it was started
    site.package = NEW_CODE
    site.deploy()
    refused = run(site, rollback, "rollback").error
    assert isinstance(refused, DeployRefused)
    assert f"release {first} is of a disagg from before TLS" in refused.message
    assert "in its checkout: disagg rollback && disagg restart --all-at-once" in refused.hint
    assert f"{first[:8]} of " in releases_there(site.facts()) and "before TLS" in releases_there(site.facts())
    argv = [sys.executable, "-c", "import signal; signal.pause()", f"{site.own}/releases/{first}"]
    with subprocess.Popen(argv) as server:
        try:
            (site.own / "serving").write_text(f"{server.pid} {first}\n")
            assert run(site, rollback, "rollback").result == "changed", "the new one was deployed and never started"
        finally:
            server.kill()


def test_uninstall_leaves_nothing_but_models_and_those_too_if_asked(
    deployed: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert run(deployed, lambda host, facts: uninstall(host, facts, False), "uninstall").result == "changed"
    left = {path.relative_to(deployed.root).parts[0] for path in deployed.root.rglob("*")}
    assert left == {"models"}
    assert run(deployed, lambda host, facts: uninstall(host, facts, False), "uninstall").result == "unchanged"
    memory = Path.home() / ".local/state/disagg/memory"
    memory.mkdir(parents=True)
    (memory / "lock").touch()
    assert run(deployed, lambda host, facts: uninstall(host, facts, True), "uninstall").result == "changed"
    assert not deployed.root.exists() and not memory.parent.exists()


@pytest.mark.parametrize("file", ["hosts.toml", "list/hosts.toml"])
def test_uninstall_keeps_what_another_host_of_the_machine_uses(deployed: Site, file: str) -> None:
    other = deployed.root / "hosts/other/releases/2222222222222222"
    other.mkdir(parents=True)
    environment = next((deployed.root / "envs").iterdir())
    (other / "environment").write_text(environment.name)
    model = next((deployed.root / "models/carried").iterdir())
    (other / file).parent.mkdir(exist_ok=True)
    (other / file).write_text(f'mlx = "{model}"\n')
    (model.parent / "of-no-other-host").mkdir()
    run(deployed, lambda host, facts: uninstall(host, facts, True), "uninstall")
    assert other.is_dir() and (environment / ".complete").exists()
    assert [path.name for path in model.parent.iterdir()] == [model.name] and (model / "config.json").exists()
    assert not deployed.own.exists()


def test_exit_codes_tell_unreachable_from_failed() -> None:
    unchanged = DeployResult("spark", "unchanged")
    assert exit_code([unchanged]) == 0
    assert exit_code([unchanged, replace(unchanged, error=FleetError("x"))]) == 1
    assert exit_code([replace(unchanged, error=FleetError("x")), replace(unchanged, error=HostUnreachable("y"))]) == 4


def test_an_existing_python_keeps_its_packages_and_the_server_runs_on_them(site: Site) -> None:
    site.changes = {
        'installer = "uv"\n': "",
        "port = 18321": f'port = 18321\npython = "{sys.executable}"\nsite_packages = true',
    }
    site.declared = ("torch>=2.6; extra == 'prefill'", "anyio>=4")
    report = site.deploy()
    assert report.error is None, report.error
    environment = next((site.root / "envs").iterdir())
    assert not list(environment.glob("lib/*/site-packages/torch*")), "nothing was installed twice"
    code = "from importlib.util import find_spec; print(find_spec('torch').origin)"  # an import takes seconds
    said = LocalMachine("spark").run([str(environment / "bin/python"), "-P", "-c", code])
    assert said.stdout.strip() == present(find_spec("torch")).origin
    assert site.deploy().result == "unchanged"


def write_wheel(folder: Path) -> None:
    """Of a package `small`, version 1.0, that has one empty module."""
    folder.mkdir()
    info = "small-1.0.dist-info"
    with zipfile.ZipFile(folder / "small-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_requirement_is_really_installed(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small requirement, with pip into a venv of a python that the host has; tests do not leave this machine."""
    write_wheel(tmp_path / "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    site.changes = {'installer = "uv"': 'installer = "pip"'}
    site.declared = ("small>=1.0",)
    site.package = {**PACKAGE, "disagg/servers/__main__.py": b"import small\n"}
    with site.deployment() as deployment:
        planned = deployment.plan()
        assert planned[0].error is None, planned[0].error
        # The stub package serves nothing: torch need not be there.
        real = deployment.planner
        deployment.planner = lambda host, facts: without_modules(real(host, facts))
        report = deployment.carry_out(planned)[0]
    assert report.error is None, report.error
    environment = site.root / "envs" / (site.own / "current/environment").read_text().strip()
    assert (environment / "pyvenv.cfg").exists()
    said = LocalMachine("spark").run([str(environment / "bin/python"), "-c", "import small; print(small.__file__)"])
    assert said.stdout.startswith(str(environment))
    assert site.deploy().result == "unchanged"


def without_modules(plan: Plan) -> Plan:
    def eased(step: Step) -> Step:
        if step.name != "check":
            return step
        assert isinstance(step.action, RunScript)
        return replace(step, action=replace(step.action, argv=step.action.argv[:5]))

    return replace(plan, steps=tuple(map(eased, plan.steps)))
