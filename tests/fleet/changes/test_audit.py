"""Which command changed a host, when, by whom and how it ended: written with the host's lock, read by `disagg logs`."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import CommandFailed, HostLocked
from disagg.fleet.changes.audit import AUDIT_BOUNDS, AUDIT_BYTES, AUDIT_LINES, origin
from disagg.fleet.changes.locks import locked
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.lifecycle.logs import read
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import script
from disagg.fleet.tokens.here import OwnTokens
from tests.cli.commandline import run, write_fleet

HOST = Host("spark", "127.0.0.1", ("prefill",), "tiny", EngineOptions("transformers"), 8000)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalMachine:
    """This machine with another HOME."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return LocalMachine(HOST.name)


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    return HostPaths(str(tmp_path), HOST.name)


def lines(paths: HostPaths) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in Path(paths.audit).read_text().splitlines()]


def test_a_command_is_written_when_it_begins_and_when_it_has_ended(machine: LocalMachine, paths: HostPaths) -> None:
    with locked(machine, paths, "deploy") as lock:
        (began,) = lines(paths)
        lock.current = "0123456789abcdef"
    assert (began["event"], began["by"]) == ("deploy", f"{getpass.getuser()}@{socket.gethostname()}")
    assert (began["pid"], began["disagg"]) == (os.getpid(), origin())
    ended = lines(paths)[1]
    assert (ended["event"], ended["ended"], ended["release"]) == ("deploy", "done", "0123456789abcdef")
    assert ended["time"] >= began["time"]


def test_a_command_that_fails_is_written_with_its_error(machine: LocalMachine, paths: HostPaths) -> None:
    with pytest.raises(CommandFailed), locked(machine, paths, "restart"):
        raise CommandFailed("spark: no room", exit_status=1, stdout="")
    ended = lines(paths)[1]
    assert (ended["level"], ended["error"], ended["message"]) == ("error", "CommandFailed", "spark: no room")


def test_a_command_that_the_lock_refuses_changes_nothing_and_is_not_written(
    machine: LocalMachine, paths: HostPaths
) -> None:
    with locked(machine, paths, "deploy"), pytest.raises(HostLocked), locked(machine, paths, "stop"):
        pass
    assert [one["event"] for one in lines(paths)] == ["deploy", "deploy"]


def test_an_uninstall_takes_the_audit_with_it(machine: LocalMachine, paths: HostPaths) -> None:
    with locked(machine, paths, "uninstall"):
        subprocess.run(["rm", "-rf", paths.folder], check=True)
    assert not Path(paths.folder).exists()


def test_the_audit_is_bounded_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    file.write_text("".join(f"{number:0600d}\n" for number in range(AUDIT_BYTES // 601)))
    assert file.stat().st_size < AUDIT_BYTES
    append = script("audit.sh") + 'audit "$1" "$2"; audit "$1" "$3"'
    argv = ["sh", "-c", append, "sh", str(file), "x" * 600, "the newest"]
    subprocess.run(argv, env={**os.environ, **AUDIT_BOUNDS}, check=True)
    kept = file.read_text().splitlines()
    assert kept[-1] == "the newest" and len(kept) <= AUDIT_LINES + 1
    assert [path.name for path in tmp_path.iterdir()] == ["audit.log"]


def test_a_file_that_cannot_be_written_stops_no_command(machine: LocalMachine, paths: HostPaths) -> None:
    Path(paths.audit).mkdir(parents=True)
    with locked(machine, paths, "stop"):
        pass
    assert not Path(paths.lock).exists()


def test_the_audits_of_all_hosts_are_read_in_order_and_a_host_without_one_has_no_lines(
    machine: LocalMachine, paths: HostPaths
) -> None:
    with locked(machine, paths, "deploy"):
        pass
    other = Host("mac", "127.0.0.1", ("decode",), "tiny", EngineOptions("mlx"), 8001)
    state = State(Path(paths.folder) / "state", OwnTokens(Path(paths.token)))
    found, errors = read([HOST, other], state, 100, connect=lambda host: LocalMachine(host.name), audits=True)
    assert [(one.host, (one.fields or {})["event"]) for one in found] == [("spark", "deploy"), ("spark", "deploy")]
    assert not errors


def test_the_command_line_refuses_to_follow_an_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", write_fleet(tmp_path), "logs", "--audit", "--follow") == 2
    assert "--audit and --follow" in capsys.readouterr().err
