"""`disagg bootstrap` from the command line; its steps are tested in tests/fleet/doctor/bootstrap."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.fleet.bootstrap import Bootstrap, SetUpStep, StepResult
from tests.cli.commandline import run, write_fleet
from tests.testbed.bed import HOSTS_TOML, Bed
from tests.testbed.uv import install_uv

CLOCK = SetUpStep("clock", "clocks must agree", "true", "timedatectl set-ntp true", root=True)
DRIVER = SetUpStep("driver", "CUDA needs it", "true", by_hand="sudo apt install it")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet whose hosts lack a set clock, which can be mended."""
    monkeypatch.setattr(Bootstrap, "look", lambda self: [StepResult(CLOCK, "missing")])
    monkeypatch.setattr(Bootstrap, "carry_out", lambda self, found: [replace(one, state="done") for one in found])
    return write_fleet(tmp_path, connector="ssh")


def test_without_a_terminal_or_with_json_it_needs_yes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--json",)):
        assert run("--config", config, "bootstrap", "prefill-1", *arguments) == 2
        captured = capsys.readouterr()
        assert "disagg bootstrap prefill-1 --yes" in captured.err + captured.out


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 1)])
def test_each_step_is_shown_with_its_command_before_the_question(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: bool, code: int
) -> None:
    asked = []

    def confirm(question: str, console: object) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("disagg.cli.common.change.confirm", confirm)
    assert run("--config", config, "bootstrap", "prefill-1") == code
    captured = capsys.readouterr()
    assert asked == ["Run 1 step on prefill-1?"]
    assert "clock: root $ timedatectl set-ntp true" in captured.err and ("done" in captured.out) == answer


def test_json_has_every_step(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "bootstrap", "prefill-1", "--yes", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    (step,) = body["steps"]
    assert body["ok"] and (step["name"], step["state"], step["root"]) == ("clock", "done", True)


def test_what_is_left_to_a_person_is_exit_code_1_but_not_of_a_dry_run(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bootstrap, "look", lambda self: [StepResult(DRIVER, "by hand", "driver 570.1")])
    assert run("--config", config, "bootstrap", "prefill-1", "--yes") == 1
    assert run("--config", config, "bootstrap", "prefill-1", "--dry-run") == 0
    assert capsys.readouterr().out.count("driver: sudo apt install it") == 2


def test_an_account_that_is_none_is_a_usage_error(config: Path) -> None:
    assert run("--config", config, "bootstrap", "prefill-1", "--login", "a b;c", "--yes") == 2


@pytest.mark.parametrize(
    ("connector", "host", "why"), [("local", "prefill-1", "reached by SSH"), ("ssh", "*-1", "one host at a time")]
)
def test_it_prepares_one_machine_which_is_not_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], connector: str, host: str, why: str
) -> None:
    assert run("--config", write_fleet(tmp_path, connector=connector), "bootstrap", host, "--dry-run") == 2
    assert why in capsys.readouterr().err


def test_the_checks_run_on_a_host_behind_ssh(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    bed.need_links()
    install_uv(bed)
    for name, steps in (
        ("dgx-spark-1", ["uv", "python", "clock", "linger", "driver"]),
        ("mac-studio-1", ["uv", "clock", "sleep"]),
    ):
        assert run("--config", HOSTS_TOML, "bootstrap", name, "--dry-run", "--json") == 0
        found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["steps"]}
        assert list(found) == steps
        assert found["uv"]["state"] == "in place" and found["uv"]["found"].endswith("/.local/bin/uv")
        assert found["clock"]["state"] in ("in place", "by hand"), "the account may not become root"
