"""Deployed hosts: this machine with another HOME, the real supervisor, and fake servers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pytest

from disagg.config import Host
from disagg.errors import Cancelled, ConfigError, HostLocked, HostUnreachable, PortInUse, StartFailed
from disagg.fleet.changes.audit import Caller
from disagg.fleet.facts.host import read_host_facts
from disagg.fleet.facts.server import ServerFacts, read_server_facts
from disagg.fleet.lifecycle import deployed, fleet_servers
from disagg.fleet.lifecycle.deployed import DeployedServer
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.one_server import ServerResult, exit_code, start_failed
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine import interruption
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import Machine
from disagg.fleet.services import supervise
from disagg.token import token_digest
from tests.deadlines import LONG_S, wait_until
from tests.fleet.yards import Yard
from tests.values import of_type, present


def outcomes(results: list[ServerResult]) -> dict[str, str]:
    return {result.host: result.outcome for result in results}


def test_started_found_running_and_stopped_with_a_look_only_where_something_changed(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def look(machine: Machine, name: str, host: Host | None) -> ServerFacts:
        looks.append(name)
        return read_server_facts(machine, name, host)

    def looked_at_a() -> int:
        count = looks.count("a")
        looks.clear()
        return count

    monkeypatch.setattr(deployed, "read_server_facts", look)
    yard.deploy("a")
    yard.deploy("b")
    assert outcomes(yard.lifecycle().start()) == {"a": "started", "b": "started"}
    assert looked_at_a() == 2, "before the start and when it has appeared"
    pid = yard.pid("a")
    assert outcomes(yard.lifecycle().start()) == {"a": "unchanged", "b": "unchanged"} and yard.pid("a") == pid
    assert looked_at_a() == 1
    assert outcomes(yard.lifecycle().stop()) == {"a": "stopped", "b": "stopped"}
    assert looked_at_a() == 2
    assert outcomes(yard.lifecycle().stop()) == {"a": "not running", "b": "not running"} and yard.pid("a") is None


def test_a_host_that_nothing_was_deployed_to_says_deploy_and_hides_no_other(yard: Yard) -> None:
    yard.deploy("a")
    a, b = yard.lifecycle().start()
    assert a.outcome == "started" and (b.outcome, present(b.error).hint) == ("failed", "disagg deploy --host b")
    assert exit_code([a, b]) == 1


def test_without_a_token_nothing_is_started(yard: Yard) -> None:
    yard.deploy("a")
    yard.state.tokens.path.unlink()
    with pytest.raises(ConfigError, match="disagg deploy makes one"):
        yard.lifecycle().start()
    assert yard.pid("a") is None


def test_a_host_with_another_operators_token_is_neither_stopped_nor_started(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    before, token = yard.pid("a"), yard.own("a") / "token"
    theirs = "the-token-of-another-operator"
    token.write_text(theirs + "\n")
    for command in (FleetServers.restart, FleetServers.start):
        (refused,) = command(yard.lifecycle(), ["a"])
        error = present(refused.error)
        assert f"a: it has the token {token_digest(theirs)[:8]} of another operator" in error.message
        assert "--adopt-token" in error.hint and "--replace-token" in error.hint
    assert yard.pid("a") == before
    assert outcomes(yard.lifecycle().stop(["a"])) == {"a": "stopped"}, "stopping needs no token"
    (refused,) = yard.lifecycle().start(["a"])
    assert refused.outcome == "failed" and yard.pid("a") is None


def test_a_crash_at_start_is_reported_with_its_log_and_not_tried_for_ever(yard: Yard) -> None:
    yard.deploy("a", "crash")
    (failed,) = yard.lifecycle().start(["a"])
    assert failed.outcome == "failed" and present(failed.error).message == "a did not start: no weights in /models/x"
    error = of_type(failed.error, StartFailed)
    assert error.hint == "fetch them" and any("no weights" in line for line in error.log)
    assert not supervise.status(yard.own("a"))["running"]


def test_a_server_that_ends_without_an_error_of_its_own_is_reported_with_its_last_line(yard: Yard) -> None:
    yard.deploy("a", "die")
    (failed,) = yard.lifecycle().start(["a"])
    assert "Segmentation fault, as it were" in present(failed.error).message


def test_a_slow_start_is_left_running_and_has_its_own_exit_code(yard: Yard) -> None:
    yard.deploy("a", "slow")
    results = yard.lifecycle().start(["a"], timeout_s=1)
    assert outcomes(results) == {"a": "slow"} and exit_code(results) == 3 and yard.pid("a") is not None


def test_a_server_that_reports_an_error_is_stopped(yard: Yard) -> None:
    yard.deploy("a", "broken")
    (failed,) = yard.lifecycle().start(["a"])
    assert (failed.outcome, present(failed.error).message) == ("failed", "a: its engine does not work") and yard.pid(
        "a"
    ) is None


def test_a_taken_port_names_its_holder(yard: Yard) -> None:
    yard.deploy("a")
    with socket.create_server(("127.0.0.1", yard.fleet.hosts["a"].port)):
        (failed,) = yard.lifecycle().start(["a"])
    assert isinstance(failed.error, PortInUse) and f"(pid {os.getpid()})" in failed.error.message


def test_a_killed_server_is_started_again_by_its_supervisor(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    before = yard.pid("a")
    os.kill(present(before), signal.SIGKILL)
    wait_until(lambda: yard.states()["a"] == "healthy" and yard.pid("a") not in (None, before))
    assert '"event": "server_ended"' in (yard.own("a") / "logs/server.log").read_text()


def test_a_server_whose_supervisor_was_killed_is_not_called_fine(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    os.kill(supervise.status(yard.own("a"))["pid"], signal.SIGKILL)
    wait_until(lambda: not supervise.status(yard.own("a"))["running"])
    (failed,) = yard.lifecycle().start(["a"])
    assert (
        "runs without its supervisor" in present(failed.error).message
        and present(failed.error).hint == "disagg restart --host a"
    )
    assert outcomes(yard.lifecycle().restart(["a"])) == {"a": "restarted"}


def test_a_server_whose_records_are_lost_is_found_by_its_release_and_stopped(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    before = yard.pid("a")
    os.kill(supervise.status(yard.own("a"))["pid"], signal.SIGKILL)
    wait_until(lambda: not supervise.status(yard.own("a"))["running"], seconds=60)
    for record in ("serving", "supervisor.json"):
        (yard.own("a") / record).unlink()
    facts = read_server_facts(LocalMachine("a"), "a", None)
    assert (facts.pid, facts.release, facts.managers) == (before, "a" * 16, {})
    assert outcomes(yard.lifecycle().stop(["a"])) == {"a": "stopped"} and yard.states()["a"] == "not running"


def test_a_server_is_stopped_though_the_link_to_the_deployed_release_is_missing(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    (yard.own("a") / "current").unlink()
    assert outcomes(yard.lifecycle().stop(["a"])) == {"a": "stopped"} and yard.pid("a") is None
    assert outcomes(yard.lifecycle().stop(["a"])) == {"a": "not running"}


def test_start_while_the_supervisor_waits_does_not_wait_with_it(yard: Yard) -> None:
    yard.deploy("a", "crash")
    subprocess.run(["sh", str(yard.own("a") / "current/supervise"), "start"], check=True, stdout=subprocess.DEVNULL)
    wait_until(lambda: supervise.status(yard.own("a")).get("restarts", 0) >= 2)
    yard.deploy("a", release="b" * 16)
    (started,) = yard.lifecycle().start(["a"])
    assert started.outcome == "started"
    assert supervise.status(yard.own("a"))["restarts"] == 0, "a new supervisor, whose first delay is short again"


def hold(yard: Yard, name: str) -> None:
    """Another operator's command holds the host's lock."""
    holder = replace(Caller.this_process("deploy"), who="ada", machine="desk")
    (yard.own(name) / "lock").mkdir()
    (yard.own(name) / "lock/holder").write_text(json.dumps(asdict(holder)) + "\n")


def test_a_host_that_another_command_holds_is_neither_started_nor_stopped_nor_restarted(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    before = yard.pid("a")
    hold(yard, "a")
    for command in (FleetServers.start, FleetServers.stop, FleetServers.restart):
        with pytest.raises(HostLocked, match="a is locked: ada@desk holds it for `disagg deploy` since"):
            command(yard.lifecycle(), ["a"])
    assert yard.pid("a") == before
    lifecycle = yard.lifecycle()
    lifecycle.break_lock = True
    assert outcomes(lifecycle.restart(["a"])) == {"a": "restarted"}
    assert not (yard.own("a") / "lock").exists()


def test_a_second_restart_from_another_machine_leaves_the_first_to_bring_the_server_back(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    elsewhere = State(yard.home.parent / "elsewhere", yard.state.tokens)
    second = FleetServers(yard.fleet, elsewhere, connect=lambda host: LocalMachine(host.name))
    refused: list[str] = []

    def restart_too(host: str, doing: str) -> None:
        if doing == "stopping":
            with pytest.raises(HostLocked) as locked:
                second.restart(["a"])
            refused.append(locked.value.message)

    first = yard.lifecycle()
    first.report = restart_too
    assert outcomes(first.restart(["a"])) == {"a": "restarted"}
    assert len(refused) == 1 and "for `disagg restart` since" in refused[0]
    assert yard.states()["a"] == "healthy"


def test_a_disk_without_room_for_a_lock_prevents_a_start_and_not_a_stop(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    full = yard.home / "bin"
    full.mkdir()
    mkdir = """#!/bin/sh
if [ "$1" = -p ]; then exec /bin/mkdir "$@"; fi
if [ "$LC_ALL" = C ]; then echo 'mkdir: No space left on device' >&2
else echo 'mkdir: Auf dem Geraet ist kein Speicherplatz mehr frei' >&2; fi
exit 1
"""
    (full / "mkdir").write_text(mkdir)
    (full / "mkdir").chmod(0o755)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("PATH", f"{full}:{os.environ['PATH']}")
    (failed,) = yard.lifecycle().start(["a"])
    assert failed.outcome == "failed" and "No space left on device" in present(failed.error).message
    assert outcomes(yard.lifecycle().stop(["a"])) == {"a": "stopped"} and yard.pid("a") is None


def test_an_older_release_is_named_by_start_and_left_by_restart(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    yard.deploy("a", release="b" * 16)
    (failed,) = yard.lifecycle().start(["a"])
    assert "still runs release aaaaaaaa, and bbbbbbbb is deployed" in present(failed.error).message
    assert outcomes(yard.lifecycle().restart(["a"])) == {"a": "restarted"}
    assert read_server_facts(LocalMachine("a"), "a", None).release == "b" * 16


def test_a_crash_starts_the_release_again_that_ran_and_not_the_one_deployed_since(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    yard.deploy("a", "broken", release="b" * 16)
    before = yard.pid("a")
    os.kill(present(before), signal.SIGKILL)
    wait_until(lambda: yard.states()["a"] == "healthy" and yard.pid("a") not in (None, before), seconds=60)
    assert read_server_facts(LocalMachine("a"), "a", None).release == "a" * 16


def test_a_server_is_not_stopped_for_what_hosts_toml_names_and_nobody_deployed(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    before, host = yard.pid("a"), yard.fleet.hosts["a"]
    other = replace(yard.fleet, hosts={"a": replace(host, service="systemd")})
    (refused,) = yard.lifecycle(other).restart(["a"])
    assert "a: hosts.toml names systemd, which has no service of it" in present(refused.error).message
    assert present(refused.error).hint == "disagg deploy --host a"
    (yard.own("a") / "current/hosts.toml").write_text(
        '[hosts.a]\nport = 1\nmodel = "older"\n\n[hosts.b]\nmodel = "x"\n'
    )
    for command in (FleetServers.restart, FleetServers.start):
        (refused,) = command(yard.lifecycle(), ["a"])
        assert "names the model tiny, and older is deployed" in present(refused.error).message
        assert present(refused.error).hint == "deploy first: disagg deploy --host a"
    assert yard.pid("a") == before


def test_a_restart_rolls_and_stops_at_the_first_that_does_not_come_back(yard: Yard) -> None:
    yard.deploy("a")
    yard.deploy("b")
    yard.lifecycle().start()
    before = yard.pid("b")
    yard.deploy("a", "crash", release="b" * 16)
    results = yard.lifecycle().restart()
    assert outcomes(results) == {"a": "failed", "b": "left"} and exit_code(results) == 1
    assert present(results[0].error).hint.endswith("; or go back: disagg rollback --host a && disagg start --host a")
    assert yard.pid("b") == before and yard.states()["b"] == "healthy"


def test_a_restart_of_the_same_release_that_fails_names_no_way_back(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    run = yard.own("a") / "current/run"
    run.write_text(run.read_text().replace(" serve ", " broken "))
    (failed,) = yard.lifecycle().restart(["a"])
    assert failed.outcome == "failed" and "rollback" not in present(failed.error).hint
    yard.deploy("a", release="b" * 16)
    yard.lifecycle().start(["a"])
    yard.deploy("a", "broken", release="c" * 16)
    (failed,) = yard.lifecycle().restart(["a"])
    assert "disagg rollback --host a" in present(failed.error).hint


def test_a_rolling_restart_waits_for_health_before_the_next(yard: Yard) -> None:
    yard.deploy("a")
    yard.deploy("b")
    yard.lifecycle().start()
    yard.progress.clear()
    assert outcomes(yard.lifecycle().restart()) == {"a": "restarted", "b": "restarted"}
    assert yard.progress.index(("a", "healthy")) < yard.progress.index(("b", "stopping"))
    yard.progress.clear()
    yard.lifecycle().restart(at_once=True)
    assert yard.progress.index(("b", "stopping")) < yard.progress.index(("a", "healthy"))


@pytest.mark.parametrize("moment", ["stopping", "starting"])
def test_an_interrupted_restart_leaves_no_host_without_the_server_it_had(yard: Yard, moment: str) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    before = yard.pid("a")
    lifecycle = yard.lifecycle()

    def interrupt(host: str, doing: str) -> None:
        yard.progress.append((host, doing))
        if doing == moment:
            signal.pthread_kill(present(threading.main_thread().ident), signal.SIGINT)
            with suppress(Cancelled):
                interruption.sleep(LONG_S)  # this thread goes on only when it is to give up

    lifecycle.report = interrupt
    with pytest.raises(KeyboardInterrupt):
        lifecycle.restart(["a"])
    assert ("a", "starting again") in yard.progress
    wait_until(lambda: yard.states()["a"] == "healthy")
    assert yard.pid("a") != before


@pytest.mark.parametrize(("command", "moment"), [(FleetServers.restart, "stopping"), (FleetServers.start, "starting")])
def test_the_lock_is_not_free_between_an_interruption_and_its_undoing(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, command: Callable[..., object], moment: str
) -> None:
    yard.deploy("a")
    if command is FleetServers.restart:
        yard.lifecycle().start(["a"])
    holders: set[str] = set()

    class Noted(DeployedServer):
        def start(self) -> None:
            holders.add((yard.own("a") / "lock/holder").read_text())
            super().start()

        def stop(self) -> bool:
            holders.add((yard.own("a") / "lock/holder").read_text())
            return super().stop()

    def interrupt(host: str, doing: str) -> None:
        if doing == moment and threading.current_thread() is not threading.main_thread() and not interrupted:
            interrupted.append(doing)
            signal.pthread_kill(present(threading.main_thread().ident), signal.SIGINT)
            with suppress(Cancelled):
                interruption.sleep(LONG_S)  # this thread goes on only when it is to give up

    interrupted: list[str] = []
    lifecycle = yard.lifecycle()
    lifecycle.report = interrupt
    monkeypatch.setattr(fleet_servers, "DeployedServer", Noted)
    with pytest.raises(KeyboardInterrupt):
        command(lifecycle, ["a"])
    assert len(holders) == 1, "the lock was taken once, and kept"
    assert not (yard.own("a") / "lock").exists()
    assert (yard.pid("a") is None) == (command is FleetServers.start)


def test_a_pid_that_now_is_another_hosts_server_is_not_taken_for_ones_own(yard: Yard) -> None:
    yard.deploy("a")
    yard.deploy("b")
    yard.lifecycle().start(["b"])
    pid = yard.pid("b")
    (yard.own("a") / "serving").write_text(f"{pid} {'a' * 16}\n")
    supervisor = supervise.status(yard.own("b"))["pid"]
    (yard.own("a") / "supervisor.json").write_text(f'{{"pid": {supervisor}}}')
    assert read_server_facts(LocalMachine("a"), "a", None).managers == {"process": False}
    facts = read_host_facts(LocalMachine("a"), yard.fleet.hosts["a"])
    assert facts.release and facts.pid is None
    assert outcomes(yard.lifecycle().stop(["a"])) == {"a": "not running"}
    assert yard.pid("b") == pid


def test_what_an_interrupted_restart_cannot_start_again_is_told(yard: Yard) -> None:
    yard.deploy("a")
    yard.lifecycle().start(["a"])
    lifecycle = yard.lifecycle()

    def interrupt(host: str, doing: str) -> None:
        yard.progress.append((host, doing))
        if doing == "starting":
            for link in ("current", "running"):
                (yard.own("a") / link).unlink(missing_ok=True)
            signal.pthread_kill(present(threading.main_thread().ident), signal.SIGINT)
            with suppress(Cancelled):
                interruption.sleep(LONG_S)  # this thread goes on only when it is to give up

    lifecycle.report = interrupt
    with pytest.raises(KeyboardInterrupt):
        lifecycle.restart(["a"])
    assert yard.progress[-1][1].startswith("failed: a: process cannot st")


def test_stop_all_also_stops_what_hosts_toml_no_longer_has(yard: Yard) -> None:
    yard.deploy("a")
    yard.deploy("b")
    yard.lifecycle().start()
    smaller = replace(yard.fleet, hosts={"a": yard.fleet.hosts["a"]})
    assert outcomes(yard.lifecycle(smaller).stop(others=True)) == {"a": "stopped", "b on a": "stopped"}
    assert yard.pid("b") is None


def test_a_machine_that_does_not_answer_is_that_hosts_failure_with_its_own_exit_code(yard: Yard) -> None:
    class Gone(LocalMachine):
        def execute(self, job: Any) -> int:
            raise HostUnreachable("a: no route", "ping a")

    yard.deploy("b")
    lifecycle = yard.lifecycle()

    def connect(host: Any) -> Machine:
        return Gone("a") if host.name == "a" else LocalMachine(host.name)

    lifecycle.connect = connect
    results = lifecycle.start()
    assert outcomes(results) == {"a": "failed", "b": "started"} and exit_code(results) == 4


def test_the_words_of_a_run_count_while_its_manager_starts_the_next() -> None:
    starting = '{"event": "starting", "pid": %d}'
    lines = [starting % 1, "Segmentation fault, as it were", starting % 2]
    assert "Segmentation fault" in start_failed("a", lines).message
    assert "printed nothing" in start_failed("a", lines[:1]).message
