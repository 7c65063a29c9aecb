"""`disagg rollout` from the command line; what it does on hosts is tested in tests/fleet/rollout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.config import load
from disagg.errors import DisaggError, FleetError, HostUnreachable
from disagg.fleet.deploy.deployment import DeployResult
from disagg.fleet.deploy.steps import Plan
from disagg.fleet.lifecycle.state import State
from disagg.fleet.rollout.progress import HostReport, RecordFile, RolloutRecord, RolloutReport
from disagg.fleet.rollout.rollout import Rollout
from tests.cli.commandline import run, write_fleet

NEW, OLD = "2" * 16, "1" * 16
DONE = RolloutReport("done", [HostReport("prefill-1", "rolled out", NEW), HostReport("decode-1", "rolled out", NEW)])
Ends = Callable[[RolloutReport | BaseException], None]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet with a token, whose hosts can be deployed to."""
    path = write_fleet(tmp_path, connector="ssh")
    State.of(load(path)).tokens.ensure()
    plans = [DeployResult(name, "planned", Plan(name, NEW)) for name in ("prefill-1", "decode-1")]
    monkeypatch.setattr(Rollout, "plan", lambda self: plans)
    return path


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """ends(report): how a rollout, or going back, ends; an exception is raised by it."""

    def prepare(report: RolloutReport | BaseException) -> None:
        def end(*_: object) -> RolloutReport:
            if isinstance(report, BaseException):
                raise report
            return report

        monkeypatch.setattr(Rollout, "run", end)
        monkeypatch.setattr(Rollout, "undo", end)

    return prepare


@pytest.mark.parametrize("undo", [(), ("--undo",)])
def test_without_a_terminal_or_with_json_it_needs_yes_before_any_host_is_asked(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, undo: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Rollout, "plan", lambda self: pytest.fail("a host was asked"))
    for arguments, reason in (((), "stdin is not a terminal"), (("--json",), "--json prints no question")):
        assert run("--config", config, "rollout", *undo, *arguments) == 2
        captured = capsys.readouterr()
        words = " ".join(("disagg rollout", *undo, "--yes"))
        assert reason in captured.err + captured.out and words in captured.err + captured.out


@pytest.mark.parametrize(
    ("report", "code", "words"),
    [
        (DONE, 0, "all hosts run the new release"),
        (RolloutReport("rolled back", [HostReport("decode-1", "failed", OLD, FleetError("wrong"))]), 1, "rolled back"),
        (RolloutReport("stopped", [], "prefill-1 is down"), 1, "disagg rollout --undo goes back"),
        (RolloutReport("stopped", [HostReport("decode-1", "left", OLD, HostUnreachable("off"))], "x"), 4, "off"),
    ],
)
def test_its_end_is_a_table_a_sentence_and_an_exit_code(
    config: Path, ends: Ends, capsys: pytest.CaptureFixture[str], report: RolloutReport, code: int, words: str
) -> None:
    ends(report)
    assert run("--config", config, "rollout", "--yes") == code
    assert words in capsys.readouterr().out
    assert run("--config", config, "rollout", "--undo", "--yes", "--json") == code
    body = json.loads(capsys.readouterr().out)
    assert (body["ok"], body["ending"]) == (code == 0, report.ending)


@pytest.mark.parametrize(
    ("begun", "words"), [(True, "`disagg rollout --undo` goes back"), (False, "no rollout is unfinished")]
)
def test_ctrl_c_prints_whether_there_is_something_to_go_back_from(
    config: Path, ends: Ends, capsys: pytest.CaptureFixture[str], begun: bool, words: str
) -> None:
    if begun:
        record = RecordFile(State.of(load(config)).folder / "rollout.json")
        record.write(RolloutRecord({"prefill-1": NEW}, {"prefill-1": OLD}))
    ends(KeyboardInterrupt())
    assert run("--config", config, "rollout", "--yes") == 130
    err = " ".join(capsys.readouterr().err.split())
    assert err.startswith("interrupted: ") and words in err


def test_hosts_that_cannot_be_deployed_are_shown_and_nothing_is_changed(
    config: Path, ends: Ends, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error: DisaggError = HostUnreachable("decode-1: no route")
    monkeypatch.setattr(Rollout, "plan", lambda self: [DeployResult("decode-1", "failed", error=error)])
    ends(AssertionError("it began"))
    assert run("--config", config, "rollout", "--yes") == 4
    assert "decode-1: no route" in capsys.readouterr().out
