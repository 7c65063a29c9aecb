"""The options that select hosts are the same on every command of a fleet's hosts, and mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.cli import app
from disagg.config import Fleet
from tests.cli.commandline import run, write_fleet

SET_UP = ("plan", "deploy", "rollback", "uninstall", "trust", "models pull", "models list", "models rm")
COMMANDS = (*SET_UP, "rollout", "start", "stop", "restart", "status", "doctor", "logs", "exec")
WITHOUT_JSON = {"logs", "trust"}
"""Logs are lines, and trust is a conversation."""


def options(command: str) -> set[str]:
    found: Any = app._parser()
    for word in command.split():
        found = found.commands[word]
    return {option for param in found.params for option in param.opts}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_hosts_has_the_same_options(command: str) -> None:
    there = options(command)
    assert {"--host", "--role", "--model", "--group", "--exclude", "--config", "--quiet"} <= there
    assert ("--json" in there) == (command not in WITHOUT_JSON)


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each call of Fleet.select returns."""
    calls: list[list[str]] = []
    select = Fleet.select

    def noted(fleet: Fleet, *arguments: Any, **named: Any) -> Any:
        hosts = select(fleet, *arguments, **named)
        calls.append([host.name for host in hosts])
        return hosts

    monkeypatch.setattr(Fleet, "select", noted)
    return calls


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["--host", "decode-1"], ["decode-1"]),
        (["--host", "prefill-*"], ["prefill-1", "prefill-2"]),
        (["--role", "decode"], ["decode-1", "decode-2"]),
        (["--model", "small-alias"], ["prefill-2", "decode-2"]),
        (["--group", "first"], ["prefill-1", "decode-1"]),
        (["--exclude", "*-1"], ["prefill-2", "decode-2"]),
        (["--group", "first", "--role", "decode"], ["decode-1"]),
        (["--host", "decode-*", "--exclude", "decode-1"], ["decode-2"]),
    ],
)
def test_options_select_the_same_hosts_whichever_command_they_are_given_to(
    tmp_path: Path, selected: list[list[str]], capsys: pytest.CaptureFixture[str], given: list[str], names: list[str]
) -> None:
    path = write_fleet(tmp_path, ("tiny", "small"))
    path.write_text(path.read_text() + '\n[groups]\nfirst = ["*-1"]\n')
    for command in ("status", "stop"):
        selected.clear()
        run("--config", path, command, *given, "--json")
        body = json.loads(capsys.readouterr().out)
        assert [row["host"] for row in body["hosts"]] == names
        assert names in selected
