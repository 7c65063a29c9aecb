from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from disagg.config import load
from disagg.errors import CapabilityMissing, DisaggError, FleetError, HostUnreachable
from disagg.fleet.lifecycle.state import State
from tests.cli.commandline import run, write_fleet


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = write_fleet(tmp_path)
    state = State.of(load(path))
    state.folder.mkdir(parents=True)
    for host, age in (("prefill-1", 3600), ("decode-1", 5)):
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() - age))
        line = json.dumps({"time": stamp, "level": "info", "event": "ready", "host": host})
        state.log_file(host).write_text(line + "\n")
    return path


def test_all_hosts_are_shown_oldest_first(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "logs") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "prefill-1 ready" in first and "decode-1  ready" in second


def test_since_and_host_narrow_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "logs", "--since", "10m") == 0
    assert "prefill-1" not in capsys.readouterr().out
    assert run("--config", config, "logs", "--host", "prefill-1") == 0
    assert "decode-1" not in capsys.readouterr().out


def test_a_host_without_a_log_exits_1_after_the_others_were_shown(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    State.of(load(config)).log_file("prefill-1").unlink()
    assert run("--config", config, "logs") == 1
    shown = capsys.readouterr()
    assert "decode-1  ready" in shown.out and "prefill-1 has no log yet" in shown.err


@pytest.mark.parametrize("since", ["ten minutes", "10", "-5m", "5w"])
def test_a_time_that_is_not_understood_exits_2(config: Path, since: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "logs", f"--since={since}") == 2
    assert "30s, 10m, 2h or 1d" in capsys.readouterr().err


def test_lines_and_errors_are_one_json_object(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    State.of(load(config)).log_file("prefill-1").unlink()
    assert run("--config", config, "logs", "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert [(line["host"], line["fields"]["event"]) for line in body["lines"]] == [("decode-1", "ready")]
    assert body["ok"] is False and body["errors"][0]["message"] == "prefill-1 has no log yet"


@pytest.mark.parametrize("option", [["--json"], ["--audit"], ["--timeout", "5"]])
def test_following_ends_with_ctrl_c_only(config: Path, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "logs", "--follow", *option) == 2
    assert f"{option[0]} and --follow cannot be combined" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([CapabilityMissing("no")], 1),
        ([CapabilityMissing("no"), FleetError("no")], 1),
        ([FleetError("no"), HostUnreachable("no")], 4),
    ],
)
def test_logs_of_several_hosts_that_cannot_be_read_end_with_1_or_4(
    config: Path, monkeypatch: pytest.MonkeyPatch, errors: list[DisaggError], code: int
) -> None:
    monkeypatch.setattr("disagg.cli.fleet.logs.read", lambda *given, **more: ([], errors))
    assert run("--config", config, "logs") == code
