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
class Site:
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
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("HOME", str(tmp_path))
    for host in HOSTS:
        (tmp_path / f".disagg/hosts/{host}/logs").mkdir(parents=True)
    return Site(tmp_path)


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


def test_hooks_run_before_and_after_a_change(site: Site) -> None:
    with site.runner.around("deploy", HOSTS, RELEASES) as change:
        assert site.ran == ["before_deploy planned"]
        change.end({})
    assert site.ran == ["before_deploy planned", "after_deploy done"]


def test_a_change_that_failed_has_a_hook_of_its_own(site: Site) -> None:
    with site.runner.around("restart", HOSTS) as change:
        change.end({"mac-studio-1": FleetError("x")})
    assert site.ran == ["before_restart planned", "after_restart failed", "on_failure failed"]


def test_an_interrupted_change_runs_the_hooks_after_it_and_stays_interrupted(site: Site) -> None:
    with pytest.raises(KeyboardInterrupt), site.runner.around("deploy", HOSTS):
        raise KeyboardInterrupt
    assert site.ran == ["before_deploy planned", "after_deploy interrupted", "on_failure interrupted"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("echo no; exit 3", "exit code 3: no"),
        ("./missing", "exit code 127"),
        ("sleep 1000", "sleep 1000 did not end within 0.2 s"),
    ],
)
def test_a_hook_before_a_change_that_fails_stops_it(site: Site, line: str, why: str) -> None:
    site.commands, site.timeout_s = {**ALL, "before_deploy": line}, 0.2 if "sleep" in line else 60
    with pytest.raises(CommandFailed) as failed, site.runner.around("deploy", HOSTS):
        pytest.fail("the change began")
    assert f"the hook before_deploy failed: {why}" in failed.value.message
    assert "before_deploy in [hooks] of hosts.toml" in failed.value.hint
    assert site.ran == [], "there is no change that an after_ hook could follow"


def test_a_hook_after_a_change_that_fails_is_reported_only(site: Site) -> None:
    site.commands = {"after_deploy": "exit 1", "on_failure": NOTE}
    with site.runner.around("deploy", HOSTS) as change:
        change.end({})
    assert ("after_deploy", "the hook after_deploy failed: exit code 1") in site.said
    assert site.ran == []


def test_hooks_run_in_the_folder_of_hosts_toml_without_input_and_their_output_is_shown(site: Site) -> None:
    (site.folder / "hook.sh").write_text("pwd; cat; echo end >&2\n")
    site.commands = {"before_deploy": "sh ./hook.sh"}
    with site.runner.around("deploy", HOSTS):
        pass
    command, *printed = site.said
    assert command == ("before_deploy", "$ sh ./hook.sh")
    assert sorted(printed) == [("before_deploy", str(site.folder)), ("before_deploy", "end")]


def test_the_audits_of_the_changed_hosts_have_their_hooks(site: Site) -> None:
    site.commands = {"before_deploy": "true", "after_deploy": "exit 2"}
    with site.deploying(HOSTS[:1]) as change:
        change.end({})
    before, after = site.audit(HOSTS[0])
    assert (before["event"], before["ended"]) == ("hook before_deploy", "done")
    assert (after["event"], after["ended"], after["level"]) == ("hook after_deploy", "failed", "error")
    assert not (site.folder / f".disagg/hosts/{HOSTS[1]}/logs/audit.log").exists()


def test_what_has_run_is_in_the_audits_while_the_locks_are_kept(site: Site) -> None:
    """Whoever kills a rollout while it restarts finds the hooks of its deployment there."""
    with Machines(lambda host: LocalMachine(host.name)) as machines:
        locks = FleetLocks(machines, "rollout")
        with kept(locks, places([site.fleet.hosts[name] for name in HOSTS])):
            with site.runner.around("deploy", HOSTS, locks=locks) as change:
                change.end({})
            for host in HOSTS:
                assert [one["event"] for one in site.audit(host)] == ["hook before_deploy", "hook after_deploy"]
    assert len(site.audit(HOSTS[0])) == 2


def test_what_cannot_be_written_now_is_written_with_the_locks_last_line(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalMachine.run

    def failing(machine: LocalMachine, argv: Any, **more: Any) -> Any:
        if more.get("script") == script("audit.sh", "audit_lines.sh"):
            raise HostUnreachable("no answer")
        return run(machine, argv, **more)

    monkeypatch.setattr(LocalMachine, "run", failing)
    with site.deploying(HOSTS[:1]) as change:
        change.end({})
    assert [one["event"] for one in site.audit(HOSTS[0])] == ["hook before_deploy", "hook after_deploy"]


def test_a_host_on_which_nothing_is_deployed_gets_no_audit(site: Site) -> None:
    (site.folder / f".disagg/hosts/{HOSTS[0]}/logs").rmdir()
    (site.folder / f".disagg/hosts/{HOSTS[0]}").rmdir()
    with site.deploying(HOSTS[:1]) as change:
        change.end({})
    assert not (site.folder / f".disagg/hosts/{HOSTS[0]}").exists()


def test_a_plan_names_the_hooks_of_its_changes_in_their_order(site: Site) -> None:
    assert list(site.runner.planned("deploy")) == ["before_deploy", "after_deploy", "on_failure"]
    assert list(site.runner.planned("deploy", "restart")) == list(ALL)
    site.commands = {}
    assert site.runner.planned("deploy") == {}


def test_a_command_without_hooks_runs_none() -> None:
    with around(None, "deploy", HOSTS, {}, None) as change:
        change.end({})
    assert change.result == "done"


@pytest.mark.parametrize(
    ("line", "ended"), [("echo secret >&2; exit 3", "exit code 3"), ("echo secret; exec sleep 1000", "no exit code")]
)
def test_what_a_hook_prints_does_not_reach_the_hosts(site: Site, line: str, ended: str) -> None:
    site.commands, site.timeout_s = {"after_deploy": line}, 0.5 if "sleep" in line else 60
    with site.deploying(HOSTS[:1]) as change:
        change.end({})
    (entry,) = site.audit(HOSTS[0])
    assert entry["message"] == f"the hook after_deploy failed: {ended}"


def test_a_hook_does_not_have_the_url_of_the_watch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, "https://alerts.example/secret")
    site.commands = {"before_deploy": f'echo "<${URL_VARIABLE}>"'}
    with site.runner.around("deploy", HOSTS):
        pass
    assert site.said[-1] == ("before_deploy", "<>")


@pytest.mark.parametrize("error", [KeyboardInterrupt, Cancelled("interrupted")])
def test_a_hook_that_was_interrupted_is_in_the_audit(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | BaseException
) -> None:
    run = LocalMachine.run

    def interrupted(machine: LocalMachine, argv: Any, **more: Any) -> Any:
        if machine.name == "before_deploy":
            raise error
        return run(machine, argv, **more)

    monkeypatch.setattr(LocalMachine, "run", interrupted)
    with pytest.raises((KeyboardInterrupt, Cancelled)), site.deploying(HOSTS[:1]):
        pytest.fail("the change began")
    (entry,) = site.audit(HOSTS[0])
    assert (entry["event"], entry["ended"]) == ("hook before_deploy", "failed")
