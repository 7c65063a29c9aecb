"""Rollouts on deployed hosts that are this machine with another HOME, with the real supervisor and fake servers."""

from __future__ import annotations

import json
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
from disagg.fleet.deploy.rollback import rollback
from disagg.fleet.deploy.steps import Plan
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.lifecycle.state import State
from disagg.fleet.rollout.progress import Progress, RolloutRecord, RolloutReport
from disagg.fleet.rollout.rollout import Rollout
from disagg.inference.client import Client
from tests.fleet.yards import Yard, connect, deployed_hosts

ADA = Caller("ada", "desk", 7, "x", 1.0, "restart --break-lock")
NAMES = ("a", "b")


class RolloutYard(Yard):
    """A yard of two hosts on which releases are rolled out."""

    def begin(self) -> dict[str, str]:
        """Every host serves a first release; their names."""
        first = {name: self.release(name) for name in NAMES}
        for name, hash in first.items():
            self.point(hash, name)
        assert all(result.ok for result in self.lifecycle().start())
        return first

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


@dataclass
class Load:
    """Callers that send one request after the other, until the block ends."""

    answers: list[str] = field(default_factory=list)
    errors: list[DisaggError] = field(default_factory=list)


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutYard]:
    with deployed_hosts(RolloutYard(tmp_path), monkeypatch) as yard:
        yield yard


@pytest.fixture
def load(yard: RolloutYard) -> Iterator[Load]:
    """Within the test, two callers have requests on the fleet."""
    load, ending = Load(), threading.Event()

    def call(client: Client) -> None:
        while not ending.is_set():
            try:
                answer = client.generate("tiny", "x", alone="prefill", max_tokens=20, timeout=60)
                load.answers.append(answer.text)
            except DisaggError as error:
                load.errors.append(error)

    with Client(yard.fleet, token=yard.state.tokens.current) as client:
        callers = [threading.Thread(target=call, args=(client,)) for _ in range(2)]
        yard.begin()
        for caller in callers:
            caller.start()
        yield load
        ending.set()
        for caller in callers:
            caller.join()


def outcomes(report: RolloutReport) -> dict[str, str]:
    return {one.host: one.outcome for one in report.hosts}


def test_a_release_with_wrong_answers_is_rolled_back_by_itself_and_no_request_fails(
    yard: RolloutYard, load: Load
) -> None:
    first = yard.runs()
    report = yard.run({name: yard.release(name, "wrong" if name == "b" else "serve", "2") for name in NAMES})
    assert report.ending == "rolled back" and report.exit_code == 1
    assert outcomes(report) == {"a": "rolled back", "b": "rolled back"}
    (error,) = [one.error for one in report.hosts if one.error is not None]
    assert "b answers 500 as token 1, where a answered 100 before the rollout" in error.message
    assert yard.runs() == first
    assert load.answers and not load.errors


def test_a_release_that_does_not_start_is_rolled_back_to_what_was_there_and_hooks_run(
    yard: RolloutYard, tmp_path: Path
) -> None:
    first, theirs = yard.begin(), yard.pend()
    note = f'echo "$DISAGG_HOOK $DISAGG_RESULT $DISAGG_FAILED" >>{tmp_path / "noted"}'
    names: tuple[HookName, ...] = get_args(HookName)
    hooks = HookRunner(replace(yard.fleet, hooks=Hooks(dict.fromkeys(names, note))), "rollout")
    report = yard.run({name: yard.release(name, "crash") for name in NAMES}, hooks=hooks)
    assert (tmp_path / "noted").read_text().splitlines() == [
        "before_deploy planned ",
        "after_deploy done ",
        "before_restart planned ",
        "after_restart failed a",
        "on_failure failed a",
    ]
    assert (report.ending, outcomes(report)) == ("rolled back", {"a": "rolled back", "b": "left"})
    assert yard.runs() == first
    assert yard.currents() == theirs, "the next restart runs what was current, and not what never ran"


def test_an_interrupted_rollout_goes_on_where_it_was(
    yard: RolloutYard, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = yard.runs()
    target = {name: yard.release(name, mark="2") for name in NAMES}
    interrupt_after(monkeypatch, yard, target, lambda progress: progress.phases["a"] == "passed")
    assert yard.runs() == {**first, "a": target["a"]}
    with pytest.raises(DisaggError, match="rollout of other releases"):
        yard.rollout({name: yard.release(name, mark="3") for name in NAMES}).plan()
    yard.progress.clear()
    report = yard.run(target)
    assert (report.ending, set(outcomes(report).values()), report.exit_code) == ("done", {"rolled out"}, 0)
    assert next(name for name, doing in yard.progress if doing == "stopping") == "b", "a was restarted before"
    assert yard.runs() == target
    assert load.answers and not load.errors
    assert yard.run(target).ending == "unchanged"


def test_a_rollout_that_another_command_meddles_with_stops_and_can_be_undone(
    yard: RolloutYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = yard.begin()
    target = {name: yard.release(name, mark="2") for name in NAMES}
    interrupt_after(monkeypatch, yard, target, lambda work: True)
    assert yard.runs() == {**first, "a": target["a"]}
    deploy = Rollout._deploy

    def meddle(*given: Any) -> bool:
        (yard.own("b") / "lock/holder").write_text(json.dumps(asdict(ADA)) + "\n")
        return deploy(*given)

    with monkeypatch.context() as patched, pytest.raises(LockLost, match="b: this command has lost its lock: ada@desk"):
        patched.setattr(Rollout, "_deploy", meddle)
        yard.run(target)
    assert yard.runs() == {**first, "a": target["a"]}
    (yard.own("b") / "lock/holder").unlink()
    (yard.own("b") / "lock").rmdir()
    hooks = note_releases(yard, tmp_path / "noted")
    report = yard.rollout(target, hooks=hooks).undo()
    assert (report.ending, outcomes(report)) == ("rolled back", {"a": "rolled back", "b": "left"})
    assert yard.runs() == first
    assert releases_noted(tmp_path / "noted", "before_restart") == [f"a={first['a']} b={first['b']}"]
    with pytest.raises(DisaggError, match="no rollout of this fleet is unfinished"):
        yard.rollout(target).undo()


def test_going_back_that_was_interrupted_has_the_hooks_of_a_restart_and_passes_them_what_it_goes_back_to(
    yard: RolloutYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = yard.begin()
    work = yard.rollout(first, hooks=note_releases(yard, tmp_path / "noted"))

    def begin(work: Rollout, target: object) -> None:
        work._progress.record = RolloutRecord(dict.fromkeys(NAMES, "new"), {"a": "old", "b": ""})
        work._progress.phases = {"a": "failed", "b": "before"}

    monkeypatch.setattr(Rollout, "_begin", begin)
    monkeypatch.setattr(Rollout, "_turns", lambda work, undo: "" if undo else "it went on")
    assert work.run().ending == "rolled back"
    for hook in ("before_restart", "after_restart", "on_failure"):
        assert releases_noted(tmp_path / "noted", hook) == ["a=old"]
    assert releases_noted(tmp_path / "noted", "before_deploy") == []


def test_a_hook_that_forbids_the_deployment_leaves_no_rollout_behind(yard: RolloutYard) -> None:
    yard.begin()
    hooks = HookRunner(replace(yard.fleet, hooks=Hooks({"before_deploy": "exit 1"})), "rollout")
    with pytest.raises(DisaggError, match="before_deploy failed"):
        yard.run({name: yard.release(name, mark="2") for name in NAMES}, hooks=hooks)
    corrected = yard.rollout({name: yard.release(name, mark="3") for name in NAMES})
    assert corrected.interrupted is None
    assert all(one.ok for one in corrected.plan())


def test_undo_of_some_hosts_keeps_what_the_others_are_to_return_to(
    yard: RolloutYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, theirs = yard.begin(), yard.pend()
    target = {name: yard.release(name, mark="2") for name in NAMES}
    interrupt_after(monkeypatch, yard, target, lambda work: True)
    with pytest.raises(DisaggError, match="the unfinished rollout is of a, b"):
        yard.rollout(target, hosts=[]).undo()
    report = yard.rollout(target, hosts=[yard.fleet.hosts["b"]]).undo()
    assert (report.ending, outcomes(report)) == ("rolled back", {"b": "left"})
    assert yard.runs() == {**first, "a": target["a"]} and yard.currents() == {**theirs, "a": target["a"]}
    report = yard.rollout(target).undo()
    assert (report.ending, outcomes(report)) == ("rolled back", {"a": "rolled back"})
    assert yard.runs() == first and yard.currents() == theirs and yard.rollout(target).interrupted is None


def test_a_host_that_hosts_toml_no_longer_has_holds_up_no_rollout(
    yard: RolloutYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.begin()
    target = {name: yard.release(name, mark="2") for name in NAMES}
    interrupt_after(monkeypatch, yard, target, lambda work: True)
    only = replace(yard.fleet, hosts={"a": yard.fleet.hosts["a"]})
    work = yard.rollout(target, fleet=only, hosts=list(only.hosts.values()))
    assert all(one.ok for one in work.plan())
    assert work.undo().ending == "rolled back"
    assert work.interrupted is None


def note_releases(yard: RolloutYard, file: Path) -> HookRunner:
    """Hooks that write down which releases they get."""
    note = f'echo "$DISAGG_HOOK $DISAGG_RELEASES" >>{file}'
    names: tuple[HookName, ...] = get_args(HookName)
    return HookRunner(replace(yard.fleet, hooks=Hooks(dict.fromkeys(names, note))), "rollout")


def releases_noted(file: Path, hook: str) -> list[str]:
    """The releases that this hook got, each time that it ran."""
    return [line.removeprefix(f"{hook} ") for line in file.read_text().splitlines() if line.startswith(f"{hook} ")]


def interrupt_after(
    monkeypatch: pytest.MonkeyPatch, yard: RolloutYard, target: dict[str, str], reached: Callable[[Progress], bool]
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
            yard.run(target)


def test_a_host_that_runs_the_release_already_gets_its_current_one_back_too(yard: RolloutYard) -> None:
    first = yard.begin()
    yard.point(theirs := yard.release("a", mark="theirs"), "a")
    report = yard.run({"a": first["a"], "b": yard.release("b", "crash")})
    assert outcomes(report) == {"a": "unchanged", "b": "rolled back"}
    assert yard.runs() == first and yard.currents() == {"a": theirs, "b": first["b"]}


def test_two_rollouts_at_once_are_one_and_a_refusal(
    yard: RolloutYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, target = yard.begin(), {name: yard.release(name, mark="2") for name in NAMES}
    refused: list[str] = []
    only = [yard.fleet.hosts["b"]]
    elsewhere = State(tmp_path / "elsewhere", yard.state.tokens)

    def second(host: str, doing: str) -> None:
        if doing == "stopping":
            with pytest.raises(HostLocked) as locked:
                yard.rollout(first, state=elsewhere).run()
            refused.append(locked.value.message)

    assert yard.run(target, report=second, hosts=only).ending == "done"
    assert len(refused) == 1 and "b is locked:" in refused[0] and "for `disagg rollout` since" in refused[0]
    assert yard.runs() == yard.currents() == {**first, "b": target["b"]}


def test_a_fleet_from_before_tls_is_restarted_at_once_and_not_rolled_out(yard: RolloutYard) -> None:
    first = yard.begin()
    (yard.own("a") / "releases" / first["a"] / "disagg").mkdir()
    with pytest.raises(UsageError, match=r"^a runs a disagg from before TLS") as refused:
        yard.run({name: yard.release(name, mark="2") for name in NAMES})
    assert refused.value.hint == "disagg deploy && disagg restart --all-at-once"
    assert yard.runs() == yard.currents() == first
