"""`disagg uninstall --unused` from the command line; what is left over is tested in tests/fleet/removal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg.config import load
from disagg.errors import HostLocked, HostUnreachable
from disagg.fleet.deploy.deployment import Deployment, DeployResult
from disagg.fleet.deploy.steps import Plan, Step
from disagg.fleet.removal.leftovers import Orphan
from disagg.fleet.removal.removal import Pruned, Pruning
from disagg.fleet.services.base import RunScript
from tests.cli.commandline import run, write_fleet

OLD = Orphan("host", "old", "/home/me/.disagg/hosts/old", "2 releases", 5 << 20)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet on whose first host something is left over."""
    path = write_fleet(tmp_path, connector="ssh")
    host = load(path).hosts["prefill-1"]
    monkeypatch.setattr(Pruning, "find", lambda self: [Pruned(host, ("prefill-1",), (OLD,), ("x stays",))])
    monkeypatch.setattr(
        Pruning, "carry_out", lambda self, found: [Pruned(host, ("prefill-1",), (OLD,), (), removed=True)]
    )
    return path


def test_without_a_terminal_or_with_json_it_needs_yes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--json",)):
        assert run("--config", config, "uninstall", "--unused", *arguments) == 2
        captured = capsys.readouterr()
        assert "disagg uninstall --unused --yes" in captured.err + captured.out


def test_a_dry_run_shows_what_is_left_over_and_removes_nothing(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pruning, "carry_out", lambda *_: pytest.fail("a dry run changes nothing"))
    assert run("--config", config, "uninstall", "--unused", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "host old" in out and "5.0 MiB" in out and "prefill-1: x stays" in out and "1 thing left over" in out


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 1)])
def test_it_asks_on_a_terminal_after_the_list(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: bool, code: int
) -> None:
    asked = []

    def confirm(question: str, console: object) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("disagg.cli.common.change.confirm", confirm)
    assert run("--config", config, "uninstall", "--unused") == code
    captured = capsys.readouterr()
    assert asked == ["Remove 1 thing (5.0 MiB) from 1 machine?"] and "host old" in captured.err
    assert ("removed host old" in captured.out) == answer


def test_a_dry_run_of_the_whole_removal_shows_its_steps_and_asks_nothing(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step("remove", "remove all of it", RunScript("", ()))
    plan = DeployResult("prefill-1", "planned", Plan("prefill-1", "", (step,)))
    monkeypatch.setattr(Deployment, "plan", lambda self: [plan])
    monkeypatch.setattr(Deployment, "carry_out", lambda *_: pytest.fail("a dry run changes nothing"))
    assert run("--config", config, "uninstall", "--dry-run") == 0
    assert "remove all of it" in capsys.readouterr().out


def test_json_has_every_machine_and_what_was_removed_there(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "uninstall", "--unused", "--yes", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    (machine,) = body["machines"]
    assert body["ok"] and machine["removed"] and machine["hosts"] == ["prefill-1"]
    assert machine["orphans"] == [
        {"kind": "host", "name": "old", "path": OLD.path, "about": "2 releases", "bytes": 5 << 20}
    ]


@pytest.mark.parametrize(("error", "code"), [(HostLocked("x is locked"), 1), (HostUnreachable("x is off"), 4)])
def test_a_machine_that_fails_is_reported_and_has_its_exit_code(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: HostLocked | HostUnreachable,
    code: int,
) -> None:
    host = load(config).hosts["prefill-1"]
    monkeypatch.setattr(Pruning, "find", lambda self: [Pruned(host, ("prefill-1",), error=error)])
    assert run("--config", config, "uninstall", "--unused", "--yes") == code
    out = capsys.readouterr().out
    assert error.message in out and "nothing is left over" not in out


def test_a_fleet_of_local_hosts_has_nothing_to_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", write_fleet(tmp_path), "uninstall", "--unused", "--yes") == 2
    assert 'connector is "local"' in capsys.readouterr().err


def test_a_local_fleet_has_nothing_to_remove_and_is_not_asked_for_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", write_fleet(tmp_path), "uninstall", "--unused") == 2
    err = capsys.readouterr().err
    assert "to remove" in err and "--yes" not in err
