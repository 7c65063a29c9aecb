from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.config import load
from disagg.fleet.changes.audit import AUDIT_BYTES, AUDIT_LINES, append_here, audit_file
from disagg.fleet.changes.hooks import HookRunner
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine import process as local
from tests.cli.commandline import ROOT, run, write_fleet
from tests.deadlines import LONG_S, wait_until
from tests.fleet.yards import fake_server
from tests.values import present


@pytest.fixture
def behaviour(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Serve with fakes; behaviour per host."""
    chosen: dict[str, str] = {}

    def argv(fleet: Any, host: Any) -> tuple[list[str], dict[str, str]]:
        how = chosen.get(host.name, "serve")
        return fake_server(host, how), {}

    monkeypatch.setattr("disagg.cli.fleet.lifecycle.FleetServers", functools.partial(FleetServers, argv=argv))
    return chosen


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is broken within a path."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    path = write_fleet(tmp_path)
    yield path
    state = State.of(load(path))
    for host in state.recorded_hosts():
        record = state.recorded(host)
        local.end(present(record).pid, present(record).identity, grace_s=0.2)


def test_start_status_restart_stop(config: Path, behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "start") == 0
    assert "prefill-1   started" in capsys.readouterr().out
    assert run("--config", config, "start") == 0
    assert "unchanged" in capsys.readouterr().out
    assert run("--config", config, "status") == 0
    table = capsys.readouterr().out
    assert "healthy" in table and "fake/cpu" in table and all(len(line) <= 80 for line in table.splitlines())
    pid = present(State.of(load(config)).recorded("decode-1")).pid
    assert run("--config", config, "restart", "--host", "decode-1") == 0
    assert present(State.of(load(config)).recorded("decode-1")).pid != pid
    assert run("--config", config, "stop") == 0
    assert "stopped" in capsys.readouterr().out
    assert run("--config", config, "status") == 3


def test_status_before_any_start_says_how_to_start(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "status") == 3
    out = capsys.readouterr().out
    assert "not running" in out and "→ disagg start\n" in out


def test_status_json_is_clean_and_tells_the_same(
    config: Path, behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("--config", config, "start", "--host", "prefill-1")
    capsys.readouterr()
    assert run("--config", config, "status", "--json") == 3
    body = json.loads(capsys.readouterr().out)
    assert {h["host"]: h["state"] for h in body["hosts"]} == {"prefill-1": "healthy", "decode-1": "not running"}
    assert body["ok"] is False and body["hosts"][0]["counters"]["requests"] == 7
    assert run("--config", config, "status", "--json", "--host", "prefill-1") == 0


def test_status_of_a_machine_that_does_not_answer_exits_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_fleet(tmp_path, connector="ssh")
    path.write_text(path.read_text().replace('"127.0.0.1"', '"no-such-host.invalid"'))
    assert run("--config", path, "status") == 4
    out = capsys.readouterr().out
    assert "unreachable" in out and "no-such-host.invalid" in out and "→" in out


def test_status_of_an_unknown_host_exits_2(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "status", "--host", "nobody") == 2
    assert "it has: prefill-1, decode-1" in capsys.readouterr().err


def test_a_host_that_fails_to_start_exits_1_and_the_other_is_reported(
    config: Path, behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour["decode-1"] = "crash"
    assert run("--config", config, "start") == 1
    out, err = capsys.readouterr()
    assert "prefill-1   started" in out and "decode-1    failed" in out and "error:" not in out
    assert "error: decode-1 did not start: no weights in /models/x" in err and "hint: fetch them" in err


def test_start_on_hosts_before_any_deployment_says_that_deploying_makes_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", write_fleet(tmp_path, connector="ssh"), "start") == 2
    assert "disagg deploy makes one" in capsys.readouterr().err


def test_watch_without_a_terminal_prints_a_line_per_change_until_interrupted(
    config: Path, behaviour: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "watched"
    environment = {**os.environ, "PYTHONPATH": ROOT}
    with output.open("w") as out:
        watching = subprocess.Popen(
            [sys.executable, "-m", "disagg", "--config", str(config), "status", "--watch", "--every", "0.1"],
            stdout=out,
            env=environment,
        )
        try:
            wait_until(lambda: "decode-1: not running" in output.read_text(), LONG_S)
            run("--config", config, "start")
            wait_until(lambda: "decode-1: healthy" in output.read_text(), LONG_S)
            watching.send_signal(signal.SIGINT)
            assert watching.wait(LONG_S) == 130
        finally:
            watching.kill()
            watching.wait()
    lines = [line for line in output.read_text().splitlines() if "prefill-1" in line]
    changes = [line.split(" ", 1)[1] for line in lines]
    assert all(one != other for one, other in itertools.pairwise(changes))


def test_watch_and_json_exclude_each_other(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "status", "--watch", "--json") == 2


def test_a_state_folder_that_is_a_file_is_no_traceback(
    config: Path,
    behaviour: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert run("--config", config, "start") == 1
    assert "cannot use" in (err := capsys.readouterr().err) and "XDG_STATE_HOME" in err
    assert run("--config", config, "status") == 3
    assert "failed" in capsys.readouterr().out
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_ctrl_c_while_the_hook_before_runs_says_that_nothing_was_changed(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HookRunner, "_run", interrupted)
    assert run("--config", config, "restart") == 130
    assert capsys.readouterr().err.splitlines() == ["interrupted: nothing was changed"]


@pytest.mark.usefixtures("wide")
def test_servers_whose_token_file_was_removed_are_reached_again_with_start(
    config: Path, behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", config, "start") == 0
    token = State.of(load(config)).tokens.path
    token.unlink()
    capsys.readouterr()
    assert run("--config", config, "status") == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert f"all hosts: it reports only that it is ok: there is no fleet token in {token} → disagg start" in shown
    assert run("--config", config, "generate", "tiny", "x") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"there is no fleet token in {token}" in message and "run `disagg start`; " in message
    assert run("--config", config, "start") == 0
    assert capsys.readouterr().out.count("unchanged") == 2
    assert run("--config", config, "status") == 0


def test_servers_whose_token_file_was_removed_can_be_stopped(config: Path, behaviour: dict[str, str]) -> None:
    assert run("--config", config, "start") == 0
    State.of(load(config)).tokens.path.unlink()
    assert run("--config", config, "stop") == 0
    assert State.of(load(config)).recorded_hosts() == []


@pytest.mark.usefixtures("wide")
def test_a_copy_of_hosts_toml_names_the_file_that_has_started_the_servers(
    config: Path, behaviour: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy" / "hosts.toml"
    copy.parent.mkdir()
    copy.write_text(config.read_text())
    assert run("--config", config, "start") == 0
    assert run("--config", copy, "status") == 0  # they serve it, too: its token is that of the fleet's name
    for command in ("stop", "restart", "start"):
        capsys.readouterr()
        assert run("--config", copy, command) == 1
        shown = " ".join(capsys.readouterr().err.split())
        assert "has started" in shown and f"disagg stop --config {config}" in shown
    assert run("--config", config, "status") == 0
    assert run("--config", config, "stop") == 0
    assert run("--config", copy, "stop") == 0


@pytest.mark.usefixtures("wide")
def test_a_copy_with_another_name_says_whose_the_servers_are(
    config: Path, behaviour: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.toml"
    copy.write_text(config.read_text().replace('name = "test"', 'name = "twin"'))
    State.of(load(copy)).prepare(load(copy))
    assert run("--config", config, "start") == 0
    assert run("--config", copy, "status") == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not prove that it has the token" in shown and f"→ disagg stop --config {config}" in shown


def test_the_audit_of_a_local_fleet_has_its_starts_and_stops(
    config: Path, behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", config, "logs", "--audit") == 0
    assert "no command has changed these hosts" in capsys.readouterr().err
    config.write_text(config.read_text() + '\n[hooks]\nafter_restart = "true"\n')
    for command in ("start", "restart", "stop"):
        assert run("--config", config, command) == 0
    capsys.readouterr()
    assert run("--config", config, "logs", "--audit", "--json", "--host", "decode-1") == 0
    lines = [line["fields"] for line in json.loads(capsys.readouterr().out)["lines"]]
    assert [(line["event"], line.get("ended")) for line in lines] == [
        ("start", None),
        ("start", "done"),
        ("restart", None),
        ("restart", "done"),
        ("hook after_restart", "done"),
        ("stop", None),
        ("stop", "done"),
    ]
    assert State.of(load(config)).audit_file("decode-1").stat().st_mode & 0o777 == 0o600


def test_an_audit_here_is_bounded_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    file = audit_file(tmp_path, "a")
    append_here(file, *(f"{number:0600d}" for number in range(AUDIT_BYTES // 601)))
    assert file.stat().st_size < AUDIT_BYTES
    append_here(file, "x" * 600, "the newest")
    kept = file.read_text().splitlines()
    assert kept[-1] == "the newest" and len(kept) == AUDIT_LINES
    assert [path.name for path in tmp_path.iterdir()] == ["a.audit"]
