"""Hooks around a change: their environment, when they run, and what their failure does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from disagg.cli.fleet.notify import URL_VARIABLE
from disagg.config import Fleet, Hooks
from disagg.errors import Cancelled, CommandFailed, DisaggError, FleetError, HostUnreachable
from disagg.fleet.changes.hooks import Change, HookRunner, around, variables
from disagg.fleet.changes.locks import FleetLocks, kept, places
from disagg.fleet.machine.connect import Machines
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import script
from tests.fleet.facts.fixture_facts import fleet

NOTE = 'echo "$DISAGG_HOOK $DISAGG_RESULT" >>"$HOME/ran"'
ALL: Mapping[Any, str] = dict.fromkeys(
    ("before_deploy", "after_deploy", "before_restart", "after_restart", "on_failure"), NOTE
)
HOSTS = ["dgx-spark-1", "mac-studio-1"]
RELEASES = {"dgx-spark-1": "1" * 16}


@dataclass
class HookedFleet:
    """A fleet with hooks, whose hosts are this machine with another HOME; `said`: what the hooks printed."""

    folder: Path
    commands: Mapping[Any, str] = field(default_factory=lambda: dict(ALL))
    timeout_s: float = 60
    said: list[tuple[str, str]] = field(default_factory=list)

    @property
    def fleet(self) -> Fleet:
        return replace(fleet(), path=self.folder / "hosts.toml", hooks=Hooks(self.commands, self.timeout_s))

    @property
    def runner(self) -> HookRunner:
        return HookRunner(self.fleet, "deploy", lambda *said: self.said.append(said))

    @contextmanager
    def deploying(self, hosts: Sequence[str]) -> Iterator[Change]:
        """Within the locks of these hosts and between the hooks of a deployment."""
        with Machines(lambda host: LocalMachine(host.name)) as machines:
            locks = FleetLocks(machines, "deploy")
            with (
                kept(locks, places([self.fleet.hosts[name] for name in hosts])),
                self.runner.around("deploy", hosts, locks=locks) as change,
            ):
                yield change

    @property
    def ran(self) -> list[str]:
        file = self.folder / "ran"
        return file.read_text().splitlines() if file.exists() else []

    def audit(self, host: str) -> list[Mapping[str, Any]]:
        """The hooks in the audit of a host."""
        text = (self.folder / f".disagg/hosts/{host}/logs/audit.log").read_text()
        return [entry for entry in map(json.loads, text.splitlines()) if entry["event"].startswith("hook ")]


@pytest.fixture
def hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HookedFleet:
    monkeypatch.setenv("HOME", str(tmp_path))
    for host in HOSTS:
        (tmp_path / f".disagg/hosts/{host}/logs").mkdir(parents=True)
    return HookedFleet(tmp_path)


def test_a_hooks_environment_names_what_is_changed_where_and_how_it_ended() -> None:
    change = Change("deploy", HOSTS, RELEASES)
    change.end({"mac-studio-1": HostUnreachable("mac-studio-1: no route"), "other": FleetError("x")})
    lab = replace(fleet(), path=Path("/here/hosts.toml"))
    assert variables(lab, "rollout", "after_deploy", change) == {
        "DISAGG_HOOK": "after_deploy",
        "DISAGG_COMMAND": "rollout",
        "DISAGG_FLEET": "lab",
        "DISAGG_CONFIG": "/here/hosts.toml",
        "DISAGG_HOSTS": "dgx-spark-1 mac-studio-1",
        "DISAGG_RELEASES": "dgx-spark-1=1111111111111111",
        "DISAGG_RESULT": "failed",
        "DISAGG_FAILED": "mac-studio-1",
        "DISAGG_ERROR": "mac-studio-1: no route",
    }


@pytest.mark.parametrize(
    ("errors", "ok", "result"), [({}, True, "done"), ({}, False, "failed"), ({"a": FleetError("x")}, True, "failed")]
)
def test_a_change_that_ended_is_done_or_failed(errors: dict[str, DisaggError], ok: bool, result: str) -> None:
    change = Change("restart", ["a"])
    change.end(errors, ok)
    assert change.result == result


@pytest.mark.parametrize(
    ("error", "result"),
    [(KeyboardInterrupt(), "interrupted"), (Cancelled("x"), "interrupted"), (FleetError("x"), "failed")],
)
def test_a_change_that_broke_off_is_interrupted_or_failed(error: BaseException, result: str) -> None:
    change = Change("restart", ["a"])
    change.break_off(error)
    assert change.result == result


def test_hooks_run_before_and_after_a_change(hooked: HookedFleet) -> None:
    with hooked.runner.around("deploy", HOSTS, RELEASES) as change:
        assert hooked.ran == ["before_deploy planned"]
        change.end({})
    assert hooked.ran == ["before_deploy planned", "after_deploy done"]


def test_a_change_that_failed_has_a_hook_of_its_own(hooked: HookedFleet) -> None:
    with hooked.runner.around("restart", HOSTS) as change:
        change.end({"mac-studio-1": FleetError("x")})
    assert hooked.ran == ["before_restart planned", "after_restart failed", "on_failure failed"]


def test_an_interrupted_change_runs_the_hooks_after_it_and_stays_interrupted(hooked: HookedFleet) -> None:
    with pytest.raises(KeyboardInterrupt), hooked.runner.around("deploy", HOSTS):
        raise KeyboardInterrupt
    assert hooked.ran == ["before_deploy planned", "after_deploy interrupted", "on_failure interrupted"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("echo no; exit 3", "exit code 3: no"),
        ("./missing", "exit code 127"),
        ("sleep 1000", "sleep 1000 did not end within 0.2 s"),
    ],
)
def test_a_hook_before_a_change_that_fails_stops_it(hooked: HookedFleet, line: str, why: str) -> None:
    hooked.commands, hooked.timeout_s = {**ALL, "before_deploy": line}, 0.2 if "sleep" in line else 60
    with pytest.raises(CommandFailed) as failed, hooked.runner.around("deploy", HOSTS):
        pytest.fail("the change began")
    assert f"the hook before_deploy failed: {why}" in failed.value.message
    assert "before_deploy in [hooks] of hosts.toml" in failed.value.hint
    assert hooked.ran == [], "there is no change that an after_ hook could follow"


def test_a_hook_after_a_change_that_fails_is_reported_only(hooked: HookedFleet) -> None:
    hooked.commands = {"after_deploy": "exit 1", "on_failure": NOTE}
    with hooked.runner.around("deploy", HOSTS) as change:
        change.end({})
    assert ("after_deploy", "the hook after_deploy failed: exit code 1") in hooked.said
    assert hooked.ran == []


def test_hooks_run_in_the_folder_of_hosts_toml_without_input_and_their_output_is_shown(hooked: HookedFleet) -> None:
    (hooked.folder / "hook.sh").write_text("pwd; cat; echo end >&2\n")
    hooked.commands = {"before_deploy": "sh ./hook.sh"}
    with hooked.runner.around("deploy", HOSTS):
        pass
    command, *printed = hooked.said
    assert command == ("before_deploy", "$ sh ./hook.sh")
    assert sorted(printed) == [("before_deploy", str(hooked.folder)), ("before_deploy", "end")]


def test_the_audits_of_the_changed_hosts_have_their_hooks(hooked: HookedFleet) -> None:
    hooked.commands = {"before_deploy": "true", "after_deploy": "exit 2"}
    with hooked.deploying(HOSTS[:1]) as change:
        change.end({})
    before, after = hooked.audit(HOSTS[0])
    assert (before["event"], before["ended"]) == ("hook before_deploy", "done")
    assert (after["event"], after["ended"], after["level"]) == ("hook after_deploy", "failed", "error")
    assert not (hooked.folder / f".disagg/hosts/{HOSTS[1]}/logs/audit.log").exists()


def test_what_has_run_is_in_the_audits_while_the_locks_are_kept(hooked: HookedFleet) -> None:
    """Whoever kills a rollout while it restarts finds the hooks of its deployment there."""
    with Machines(lambda host: LocalMachine(host.name)) as machines:
        locks = FleetLocks(machines, "rollout")
        with kept(locks, places([hooked.fleet.hosts[name] for name in HOSTS])):
            with hooked.runner.around("deploy", HOSTS, locks=locks) as change:
                change.end({})
            for host in HOSTS:
                assert [one["event"] for one in hooked.audit(host)] == ["hook before_deploy", "hook after_deploy"]
    assert len(hooked.audit(HOSTS[0])) == 2


def test_what_cannot_be_written_now_is_written_with_the_locks_last_line(
    hooked: HookedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalMachine.run

    def failing(machine: LocalMachine, argv: Any, **more: Any) -> Any:
        if more.get("script") == script("audit.sh", "audit_lines.sh"):
            raise HostUnreachable("no answer")
        return run(machine, argv, **more)

    monkeypatch.setattr(LocalMachine, "run", failing)
    with hooked.deploying(HOSTS[:1]) as change:
        change.end({})
    assert [one["event"] for one in hooked.audit(HOSTS[0])] == ["hook before_deploy", "hook after_deploy"]


def test_a_host_on_which_nothing_is_deployed_gets_no_audit(hooked: HookedFleet) -> None:
    (hooked.folder / f".disagg/hosts/{HOSTS[0]}/logs").rmdir()
    (hooked.folder / f".disagg/hosts/{HOSTS[0]}").rmdir()
    with hooked.deploying(HOSTS[:1]) as change:
        change.end({})
    assert not (hooked.folder / f".disagg/hosts/{HOSTS[0]}").exists()


def test_a_plan_names_the_hooks_of_its_changes_in_their_order(hooked: HookedFleet) -> None:
    assert list(hooked.runner.planned("deploy")) == ["before_deploy", "after_deploy", "on_failure"]
    assert list(hooked.runner.planned("deploy", "restart")) == list(ALL)
    hooked.commands = {}
    assert hooked.runner.planned("deploy") == {}


def test_a_command_without_hooks_runs_none() -> None:
    with around(None, "deploy", HOSTS, {}, None) as change:
        change.end({})
    assert change.result == "done"


@pytest.mark.parametrize(
    ("line", "ended"), [("echo secret >&2; exit 3", "exit code 3"), ("echo secret; exec sleep 1000", "no exit code")]
)
def test_what_a_hook_prints_does_not_reach_the_hosts(hooked: HookedFleet, line: str, ended: str) -> None:
    hooked.commands, hooked.timeout_s = {"after_deploy": line}, 0.5 if "sleep" in line else 60
    with hooked.deploying(HOSTS[:1]) as change:
        change.end({})
    (entry,) = hooked.audit(HOSTS[0])
    assert entry["message"] == f"the hook after_deploy failed: {ended}"


def test_a_hook_does_not_have_the_url_of_the_watch(hooked: HookedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, "https://alerts.example/secret")
    hooked.commands = {"before_deploy": f'echo "<${URL_VARIABLE}>"'}
    with hooked.runner.around("deploy", HOSTS):
        pass
    assert hooked.said[-1] == ("before_deploy", "<>")


@pytest.mark.parametrize("error", [KeyboardInterrupt, Cancelled("interrupted")])
def test_a_hook_that_was_interrupted_is_in_the_audit(
    hooked: HookedFleet, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | BaseException
) -> None:
    run = LocalMachine.run

    def interrupted(machine: LocalMachine, argv: Any, **more: Any) -> Any:
        if machine.name == "before_deploy":
            raise error
        return run(machine, argv, **more)

    monkeypatch.setattr(LocalMachine, "run", interrupted)
    with pytest.raises((KeyboardInterrupt, Cancelled)), hooked.deploying(HOSTS[:1]):
        pytest.fail("the change began")
    (entry,) = hooked.audit(HOSTS[0])
    assert (entry["event"], entry["ended"]) == ("hook before_deploy", "failed")
