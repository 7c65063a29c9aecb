"""Rollouts on deployed hosts that are this machine with another HOME, with the real supervisor and fake servers."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from disagg.cli.fleet.rollout import asking
from disagg.config import HookName, Hooks, Host
from disagg.errors import DisaggError, HostLocked, LockLost, UsageError
from disagg.fleet.changes.audit import Caller
from disagg.fleet.changes.hooks import HookRunner
from disagg.fleet.deploy.release import release_hash, run_script
from disagg.fleet.deploy.steps import Plan
from disagg.fleet.deploy.undo import rollback
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.rollout.progress import Progress, RolloutRecord, RolloutReport
from disagg.fleet.rollout.rollout import Rollout
from disagg.fleet.services import supervise
from disagg.inference.client import Client
from tests.fleet.farm import PLAIN_PATH
from tests.fleet.lifecycle.yard import Yard

SERVER = Path(__file__).with_name("answering_server.py")
ENVIRONMENT = "e" * 16
ADA = Caller("ada", "desk", 7, "x", 1.0, "restart --break-lock")
NAMES = ("a", "b")


class Site(Yard):
    """A yard whose releases are named by their content, as those of `disagg deploy`, and can be gone back to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, NAMES)
        environment = self.home / ".disagg/envs" / ENVIRONMENT
        (environment / "bin").mkdir(parents=True)
        (environment / ".complete").touch()
        (environment / "bin/python").symlink_to(sys.executable)

    def release(self, name: str, behaviour: str = "serve", mark: str = "") -> str:
        """Put a release there; its name."""
        host, own = self.fleet.hosts[name], self.own(name)
        script = run_script(HostPaths(str(self.home), name), host, sys.executable)
        fake = [sys.executable, str(SERVER), name, host.model, host.address, str(host.port), behaviour]
        command = f'exec {shlex.join(fake)} --config "$release/hosts.toml" --host {name}'
        start = f'exec {shlex.join([sys.executable, "-P", "-S", supervise.__file__])} "$1" {shlex.quote(str(own))}\n'
        files = {
            "run": f"{script[: script.rindex('exec ')]}unset PYTHONPATH\n{command} # {mark}\n",
            "supervise": start,
            "environment": f"{ENVIRONMENT}\n",
        }
        hash = release_hash({path: text.encode() for path, text in files.items()})
        folder = own / "releases" / hash
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            (folder / path).write_text(text)
        (own / "logs").mkdir(exist_ok=True)
        (own / "token").write_text(self.state.tokens.current + "\n")
        (own / "token").chmod(0o600)
        return hash

    def point(self, hash: str, name: str) -> None:
        """Make a release of a host current."""
        link = self.own(name) / "current"
        link.unlink(missing_ok=True)
        link.symlink_to(f"releases/{hash}")

    def begin(self) -> dict[str, str]:
        """Every host serves a first release; their names."""
        first = {name: self.release(name) for name in NAMES}
        for name, hash in first.items():
            self.point(hash, name)
        assert all(result.ok for result in self.lifecycle().start())
        return first

    def note(self, host: str, doing: str) -> None:
        self.progress.append((host, doing))

    def rollout(self, target: dict[str, str], **settings: object) -> Rollout:
        def plan(host: Host, facts: HostFacts) -> Plan:
            return rollback(host, facts, target[host.name])

        hosts = list(self.fleet.hosts.values())
        work = Rollout(
            self.fleet, self.state, hosts, plan, asking(self.fleet, self.state), report=self.note, connect=connect
        )
        work.settle_s = 0.5
        for key, value in settings.items():
            setattr(work, key, value)
        return work

    def run(self, target: dict[str, str], **settings: object) -> RolloutReport:
        return self.rollout(target, **settings).run()

    def pend(self) -> dict[str, str]:
        """Every host has a release that another operator has deployed and that does not run; their names."""
        theirs = {name: self.release(name, mark="theirs") for name in NAMES}
        for name, hash in theirs.items():
            self.point(hash, name)
        return theirs

    def currents(self) -> dict[str, str]:
        """The release that is current on each host."""
        return {name: (self.own(name) / "current").readlink().name for name in NAMES}

    def runs(self) -> dict[str, str]:
        """The release that each host's server runs."""
        return {name: self.own(name).joinpath("serving").read_text().split()[1] for name in NAMES if self.pid(name)}


def connect(host: Host) -> LocalMachine:
    return LocalMachine(host.name)


@dataclass
class Load:
    """Callers that send one request after the other, until the block ends."""

    answers: list[str] = field(default_factory=list)
    errors: list[DisaggError] = field(default_factory=list)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path)
    monkeypatch.setenv("HOME", str(site.home))
    monkeypatch.setenv("PATH", PLAIN_PATH)
    yield site
    for folder in (site.home / ".disagg/hosts").glob("*"):
        supervise.stop(folder)


@pytest.fixture
def load(site: Site) -> Iterator[Load]:
    """Within the test, two callers have requests on the fleet."""
    load, ending = Load(), threading.Event()

    def call(client: Client) -> None:
        while not ending.is_set():
            try:
                answer = client.generate("tiny", "x", alone="prefill", max_tokens=20, timeout=60)
                load.answers.append(answer.text)
            except DisaggError as error:
                load.errors.append(error)

    with Client(site.fleet, token=site.state.tokens.current) as client:
        callers = [threading.Thread(target=call, args=(client,)) for _ in range(2)]
        site.begin()
        for caller in callers:
            caller.start()
        yield load
        ending.set()
        for caller in callers:
            caller.join()


def outcomes(report: RolloutReport) -> dict[str, str]:
    return {one.host: one.outcome for one in report.hosts}


def test_a_release_with_wrong_answers_is_rolled_back_by_itself_and_no_request_fails(site: Site, load: Load) -> None:
    first = site.runs()
    report = site.run({name: site.release(name, "wrong" if name == "b" else "serve", "2") for name in NAMES})
    assert report.ending == "rolled back" and report.exit_code == 1
    assert outcomes(report) == {"a": "rolled back", "b": "rolled back"}
    (error,) = [one.error for one in report.hosts if one.error is not None]
    assert "b answers 500 as token 1, where a answered 100 before the rollout" in error.message
    assert site.runs() == first
    assert load.answers and not load.errors


def test_a_release_that_does_not_start_is_rolled_back_to_what_was_there_and_hooks_run(
    site: Site, tmp_path: Path
) -> None:
    first, theirs = site.begin(), site.pend()
    note = f'echo "$DISAGG_HOOK $DISAGG_RESULT $DISAGG_FAILED" >>{tmp_path / "noted"}'
    names: tuple[HookName, ...] = get_args(HookName)
    hooks = HookRunner(replace(site.fleet, hooks=Hooks(dict.fromkeys(names, note))), "rollout")
    report = site.run({name: site.release(name, "crash") for name in NAMES}, hooks=hooks)
    assert (tmp_path / "noted").read_text().splitlines() == [
        "before_deploy planned ",
        "after_deploy done ",
        "before_restart planned ",
        "after_restart failed a",
        "on_failure failed a",
    ]
    assert (report.ending, outcomes(report)) == ("rolled back", {"a": "rolled back", "b": "left"})
    assert site.runs() == first
    assert site.currents() == theirs, "the next restart runs what was current, and not what never ran"


def test_an_interrupted_rollout_goes_on_where_it_was(site: Site, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    first = site.runs()
    target = {name: site.release(name, mark="2") for name in NAMES}
    interrupt_after(monkeypatch, site, target, lambda progress: progress.phases["a"] == "passed")
    assert site.runs() == {**first, "a": target["a"]}
    with pytest.raises(DisaggError, match="rollout of other releases"):
        site.rollout({name: site.release(name, mark="3") for name in NAMES}).plan()
    site.progress.clear()
    report = site.run(target)
    assert (report.ending, set(outcomes(report).values()), report.exit_code) == ("done", {"rolled out"}, 0)
    assert next(name for name, doing in site.progress if doing == "stopping") == "b", "a was restarted before"
    assert site.runs() == target
    assert load.answers and not load.errors
    assert site.run(target).ending == "unchanged"


def test_a_rollout_that_another_command_meddles_with_stops_and_can_be_undone(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = site.begin()
    target = {name: site.release(name, mark="2") for name in NAMES}
    interrupt_after(monkeypatch, site, target, lambda work: True)
    assert site.runs() == {**first, "a": target["a"]}
    deploy = Rollout._deploy

    def meddle(*given: Any) -> bool:
        (site.own("b") / "lock/holder").write_text(json.dumps(asdict(ADA)) + "\n")
        return deploy(*given)

    with monkeypatch.context() as patched, pytest.raises(LockLost, match="b: this command has lost its lock: ada@desk"):
        patched.setattr(Rollout, "_deploy", meddle)
        site.run(target)
    assert site.runs() == {**first, "a": target["a"]}
    (site.own("b") / "lock/holder").unlink()
    (site.own("b") / "lock").rmdir()
    hooks = note_releases(site, tmp_path / "noted")
    report = site.rollout(target, hooks=hooks).undo()
    assert (report.ending, outcomes(report)) == ("rolled back", {"a": "rolled back", "b": "left"})
    assert site.runs() == first
    assert releases_noted(tmp_path / "noted", "before_restart") == [f"a={first['a']} b={first['b']}"]
    with pytest.raises(DisaggError, match="no rollout of this fleet is unfinished"):
        site.rollout(target).undo()


def test_going_back_that_was_interrupted_has_the_hooks_of_a_restart_and_passes_them_what_it_goes_back_to(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = site.begin()
    work = site.rollout(first, hooks=note_releases(site, tmp_path / "noted"))

    def begin(work: Rollout, target: object) -> None:
        work._progress.record = RolloutRecord(dict.fromkeys(NAMES, "new"), {"a": "old", "b": ""})
        work._progress.phases = {"a": "failed", "b": "before"}

    monkeypatch.setattr(Rollout, "_begin", begin)
    monkeypatch.setattr(Rollout, "_turns", lambda work, undo: "" if undo else "it went on")
    assert work.run().ending == "rolled back"
    for hook in ("before_restart", "after_restart", "on_failure"):
        assert releases_noted(tmp_path / "noted", hook) == ["a=old"]
    assert releases_noted(tmp_path / "noted", "before_deploy") == []


def test_a_hook_that_forbids_the_deployment_leaves_no_rollout_behind(site: Site) -> None:
    site.begin()
    hooks = HookRunner(replace(site.fleet, hooks=Hooks({"before_deploy": "exit 1"})), "rollout")
    with pytest.raises(DisaggError, match="before_deploy failed"):
        site.run({name: site.release(name, mark="2") for name in NAMES}, hooks=hooks)
    corrected = site.rollout({name: site.release(name, mark="3") for name in NAMES})
    assert corrected.interrupted is None
    assert all(one.ok for one in corrected.plan())


def test_undo_of_some_hosts_keeps_what_the_others_are_to_return_to(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first, theirs = site.begin(), site.pend()
    target = {name: site.release(name, mark="2") for name in NAMES}
    interrupt_after(monkeypatch, site, target, lambda work: True)
    with pytest.raises(DisaggError, match="the unfinished rollout is of a, b"):
        site.rollout(target, hosts=[]).undo()
    report = site.rollout(target, hosts=[site.fleet.hosts["b"]]).undo()
    assert (report.ending, outcomes(report)) == ("rolled back", {"b": "left"})
    assert site.runs() == {**first, "a": target["a"]} and site.currents() == {**theirs, "a": target["a"]}
    report = site.rollout(target).undo()
    assert (report.ending, outcomes(report)) == ("rolled back", {"a": "rolled back"})
    assert site.runs() == first and site.currents() == theirs and site.rollout(target).interrupted is None


def test_a_host_that_hosts_toml_no_longer_has_holds_up_no_rollout(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.begin()
    target = {name: site.release(name, mark="2") for name in NAMES}
    interrupt_after(monkeypatch, site, target, lambda work: True)
    only = replace(site.fleet, hosts={"a": site.fleet.hosts["a"]})
    work = site.rollout(target, fleet=only, hosts=list(only.hosts.values()))
    assert all(one.ok for one in work.plan())
    assert work.undo().ending == "rolled back"
    assert work.interrupted is None


def note_releases(site: Site, file: Path) -> HookRunner:
    """Hooks that write down which releases they get."""
    note = f'echo "$DISAGG_HOOK $DISAGG_RELEASES" >>{file}'
    names: tuple[HookName, ...] = get_args(HookName)
    return HookRunner(replace(site.fleet, hooks=Hooks(dict.fromkeys(names, note))), "rollout")


def releases_noted(file: Path, hook: str) -> list[str]:
    """The releases that this hook got, each time that it ran."""
    return [line.removeprefix(f"{hook} ") for line in file.read_text().splitlines() if line.startswith(f"{hook} ")]


def interrupt_after(
    monkeypatch: pytest.MonkeyPatch, site: Site, target: dict[str, str], reached: Callable[[Progress], bool]
) -> None:
    """Begin a rollout, and end it as Ctrl-C does after the first turn for which `reached` holds."""
    keep = Progress.keep

    def interrupted(progress: Progress) -> None:
        keep(progress)
        if reached(progress):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            site.run(target)


def test_a_host_that_runs_the_release_already_gets_its_current_one_back_too(site: Site) -> None:
    first = site.begin()
    site.point(theirs := site.release("a", mark="theirs"), "a")
    report = site.run({"a": first["a"], "b": site.release("b", "crash")})
    assert outcomes(report) == {"a": "unchanged", "b": "rolled back"}
    assert site.runs() == first and site.currents() == {"a": theirs, "b": first["b"]}


def test_two_rollouts_at_once_are_one_and_a_refusal(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, target = site.begin(), {name: site.release(name, mark="2") for name in NAMES}
    refused: list[str] = []
    only = [site.fleet.hosts["b"]]
    elsewhere = State(tmp_path / "elsewhere", site.state.tokens)

    def second(host: str, doing: str) -> None:
        if doing == "stopping":
            with pytest.raises(HostLocked) as locked:
                site.rollout(first, state=elsewhere).run()
            refused.append(locked.value.message)

    assert site.run(target, report=second, hosts=only).ending == "done"
    assert len(refused) == 1 and "b is locked:" in refused[0] and "for `disagg rollout` since" in refused[0]
    assert site.runs() == site.currents() == {**first, "b": target["b"]}


def test_a_fleet_from_before_tls_is_restarted_at_once_and_not_rolled_out(site: Site) -> None:
    first = site.begin()
    (site.own("a") / "releases" / first["a"] / "disagg").mkdir()
    with pytest.raises(UsageError, match=r"^a runs a disagg from before TLS") as refused:
        site.run({name: site.release(name, mark="2") for name in NAMES})
    assert refused.value.hint == "disagg deploy && disagg restart --all-at-once"
    assert site.runs() == site.currents() == first
