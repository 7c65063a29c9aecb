"""plan, deploy, rollback, uninstall from the command line; what they do on hosts is tested in tests/fleet/deploy."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

from disagg.cli.fleet.deploy import show
from disagg.config import load
from disagg.fleet.deploy.deployment import Deployment, DeployResult
from disagg.fleet.deploy.steps import Plan, Step
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.services.base import RunScript
from disagg.token import token_digest
from tests.cli.commandline import ROOT, run, write_fleet, write_simulated_fleet
from tests.testbed.bed import Bed
from tests.values import present


@pytest.mark.parametrize("release", ["abc", "latest", "ABCD", "0123456789abcdef0"])
def test_a_release_to_go_back_to_is_the_beginning_of_a_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], release: str
) -> None:
    assert run("--config", write_fleet(tmp_path, connector="ssh"), "rollback", "--to", release) == 2
    assert "disagg rollback --list" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["deploy --dry-run", "deploy --yes", "rollback", "uninstall --yes"])
def test_a_fleet_of_local_hosts_has_nothing_to_deploy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = write_fleet(tmp_path)
    assert run("--config", path, *command.split()) == 2
    said = capsys.readouterr().err
    assert 'prefill-1, decode-1: connector is "local"' in said
    assert "disagg start" in said


def test_a_host_that_is_not_in_the_file_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_fleet(tmp_path, connector="ssh")
    assert run("--config", path, "deploy", "--host", "nobody") == 2
    assert "has no host nobody" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["deploy", "uninstall"])
def test_without_a_terminal_or_with_json_a_command_that_asks_needs_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(Deployment, "plan", lambda self: pytest.fail("no host is asked before the question"))
    path = write_fleet(tmp_path, connector="ssh")
    for arguments, reason in (((), "stdin is not a terminal"), (("--json",), "--json prints no question")):
        assert run("--config", path, command, *arguments) == 2
        captured = capsys.readouterr()
        assert reason in captured.err + captured.out and f"disagg {command} --yes" in captured.err + captured.out


@pytest.mark.parametrize("other", ["--replace-token", "--dry-run"])
def test_adopting_a_token_is_neither_replacing_it_nor_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    path = write_fleet(tmp_path, connector="ssh")
    assert run("--config", path, "deploy", "--yes", "--adopt-token", other) == 2
    assert "--adopt-token cannot be combined" in capsys.readouterr().err


THEIRS = "the-token-of-another-clone"


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """hosts.toml of a fleet whose prefill-1, this machine, has THEIRS. Its plan has one step, which does nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("disagg.fleet.machine.connect.machine_for", lambda host: LocalMachine(host.name))
    token = tmp_path / ".disagg/hosts/prefill-1/token"
    token.parent.mkdir(parents=True)
    token.write_text(f"{THEIRS}\n")
    step = Step("x", "do x", RunScript("", ()))
    monkeypatch.setattr(
        Deployment, "plan", lambda self: [DeployResult("prefill-1", "planned", Plan("prefill-1", "", (step,)))]
    )
    monkeypatch.setattr(
        Deployment, "carry_out", lambda *_: [DeployResult("prefill-1", "changed", Plan("prefill-1", "", (step,)))]
    )
    monkeypatch.setattr(Deployment, "locked", lambda *_: nullcontext())
    return write_fleet(tmp_path, connector="ssh")


def tokens(folder: Path) -> dict[str, str]:
    """The token files of this machine."""
    return {path.name: path.read_text().strip() for path in (folder / "state/disagg/test").glob("token*")}


def give_ours(folder: Path) -> str:
    ours = folder / "state/disagg/test/token"
    ours.parent.mkdir(parents=True)
    ours.write_text("the-token-of-this-machine\n")
    ours.chmod(0o600)
    return "the-token-of-this-machine"


def test_an_adopted_token_is_this_machines_and_the_one_before_is_kept(held: Path, tmp_path: Path) -> None:
    assert run("--config", held, "deploy", "--yes", "--adopt-token") == 0
    assert tokens(tmp_path) == {"token": THEIRS}
    (tmp_path / "state/disagg/test/token").unlink()
    (tmp_path / "state/disagg/test").rmdir()
    ours = give_ours(tmp_path)
    assert run("--config", held, "deploy", "--yes", "--adopt-token") == 0
    assert tokens(tmp_path) == {"token": THEIRS, f"token.{token_digest(ours)[:8]}": ours}


@pytest.mark.parametrize(("answer", "left"), [("n", "the-token-of-this-machine"), ("y", THEIRS)])
def test_the_token_is_adopted_after_the_question(
    held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: str
) -> None:
    give_ours(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("disagg.cli.common.change.confirm", lambda *_: answer == "y")
    assert run("--config", held, "deploy", "--adopt-token") == int(answer == "n")
    assert tokens(tmp_path)["token"] == left


def test_a_token_file_that_was_named_is_not_overwritten(
    held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = tmp_path / "own/secret"
    named.parent.mkdir()
    monkeypatch.setenv("DISAGG_TOKEN_FILE", str(named))
    assert run("--config", held, "deploy", "--yes", "--adopt-token") == 2
    assert "is not overwritten" in capsys.readouterr().err and not named.exists()


def test_a_machine_without_a_token_makes_none_for_a_fleet_that_has_one(
    held: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", held, "deploy", "--yes", "--host", "decode-1") == 2
    captured = capsys.readouterr().err
    assert "--adopt-token" in captured and THEIRS not in captured
    assert tokens(tmp_path) == {}
    assert run("--config", held, "deploy", "--yes", "--replace-token") == 0
    assert set(tokens(tmp_path)) == {"token"}


def test_a_dry_run_of_deploy_does_not_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(
        Deployment, "plan", lambda self: [DeployResult("prefill-1", "unchanged", Plan("prefill-1", ""))]
    )
    assert run("--config", write_fleet(tmp_path, connector="ssh"), "deploy", "--dry-run") == 0
    assert "--yes" not in capsys.readouterr().err


def test_a_dry_run_makes_no_token_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_fleet(tmp_path, connector="ssh")
    assert run("--config", path, "deploy", "--dry-run", "--host", "prefill-1") == 4
    assert "cannot be deployed" in capsys.readouterr().out
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("deploy", "each host has the release it had, or the whole new one; `disagg deploy` goes on"),
        ("rollback", "some hosts may have gone back, others not"),
        ("uninstall", "what is not removed yet is still there; `disagg uninstall` goes on"),
    ],
)
def test_an_interruption_tells_what_that_command_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    step = Step("x", "do x", RunScript("", ()))
    monkeypatch.setattr(
        Deployment, "plan", lambda self: [DeployResult("prefill-1", "planned", Plan("prefill-1", "", (step,)))]
    )
    monkeypatch.setattr(Deployment, "carry_out", interrupted)
    path = write_fleet(tmp_path, connector="ssh")
    options = ["--yes"] if command != "rollback" else []
    assert run("--config", path, command, "--host", "prefill-1", *options) == 130
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("typed", "code", "message"), [("n\n", 1, ""), ("", 1, ""), (None, 130, "interrupted: ")])
def test_at_the_question_no_is_1_and_ctrl_c_130(
    bed: Bed, tmp_path: Path, typed: str | None, code: int, message: str
) -> None:
    bed.need_bare_hosts()
    config = bed.write_hosts_toml(tmp_path / "hosts.toml")
    own = f'service = "process"\npython = "{sys.executable}"\nsite_packages = true\n'
    text = config.read_text().replace('service = "process"\n', own)
    config.write_text(text.replace('name = "studio"', f'name = "{time.time_ns()}"'))  # there is something to deploy
    before = set((bed.hosts["dgx-spark-1"].home / ".disagg").rglob("*"))
    argv = [sys.executable, "-m", "disagg", "--config", str(config), "deploy", "--host", "dgx-spark-1"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        argv, stdin=theirs, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ROOT}
    ) as process:
        os.close(theirs)
        said = ""
        while not said.endswith("[y/N]: "):
            letter = present(process.stderr).read(1)
            assert letter, said
            said += letter
        if typed is None:
            process.send_signal(signal.SIGINT)
        else:
            os.write(ours, typed.encode() or b"\x04")
        said = present(process.stderr).read()
        os.close(ours)
    assert process.returncode == code
    assert f"{message}nothing was changed" in said
    assert set((bed.hosts["dgx-spark-1"].home / ".disagg").rglob("*")) == before


def test_after_a_deployment_no_model_is_pulled_to_simulated_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = load(write_simulated_fleet(tmp_path))
    steps = (Step("release", "send", RunScript("", ())),)
    reports = [DeployResult(name, "changed", Plan(name, "0" * 16, steps, needs="start")) for name in fleet.hosts]
    with pytest.raises(typer.Exit):
        show(fleet, reports, as_json=False)
    assert capsys.readouterr().out.endswith("next: disagg start\n")
