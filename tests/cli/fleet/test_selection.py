"""The options that select hosts, that bound the work on them, and --json are the same on every command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.cli import app
from disagg.config import Fleet
from disagg.errors import UsageError
from disagg.fleet.machine import fan_out
from tests.cli.commandline import run, write_fleet

SELECTION = {"--host", "--role", "--model", "--group", "--exclude"}
WORK = {"--parallel", "--timeout"}
ALL = {*SELECTION, *WORK, "--json"}

AS_A_CLIENT = SELECTION | WORK
"""It sends requests to the servers of a model, as any client, or needs none."""
ALL_HOSTS = SELECTION
"""It has to work on all of its hosts, or on the pairs that its own options name."""
ONE_HOST = SELECTION | WORK
"""It prepares the host that its argument names."""
REQUESTS_DEADLINE = {"generate", "chat"}
"""Their --timeout is a field of the request, which has its own bounds."""
LACKS: dict[str, set[str]] = {
    "demo": AS_A_CLIENT,
    "generate": AS_A_CLIENT,
    "chat": {*AS_A_CLIENT, "--json"},  # a conversation
    "serve": {*AS_A_CLIENT, "--json"},  # it prints nothing but its log
    "history": AS_A_CLIENT,
    "top": AS_A_CLIENT,
    "serve endpoints": AS_A_CLIENT,
    "verify": AS_A_CLIENT,
    "bench": AS_A_CLIENT,
    "bench handoff": AS_A_CLIENT,
    "bench link": ALL_HOSTS,
    "bench predict": AS_A_CLIENT,
    "init": AS_A_CLIENT,
    "keys add": ALL_HOSTS,
    "keys edit": ALL_HOSTS,
    "keys list": ALL_HOSTS,
    "keys revoke": ALL_HOSTS,
    "keys sync": ALL_HOSTS,
    "token rotate": ALL_HOSTS,
    "token certificate": AS_A_CLIENT,
    "bootstrap": ONE_HOST,
    "ssh": {*AS_A_CLIENT, "--json"},  # it becomes the ssh of one host
}
"""Which of ALL a command need not have. A new command has all of them, or its reason is stated here."""


def commands(found: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command of the program, with typer's object; groups only if they are a command themselves."""
    found = found or app._parser()
    below = getattr(found, "commands", {})
    if not below or (name and found.invoke_without_command):
        yield name, found
    for word, command in below.items():
        yield from commands(command, f"{name} {word}".strip())


COMMANDS = dict(commands())


def options(command: str) -> set[str]:
    return {option for param in COMMANDS[command].params for option in param.opts}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_options_of_all_or_a_reason(command: str) -> None:
    assert {"--config", "--quiet"} <= options(command)
    assert options(command) >= ALL - LACKS.get(command, set())


def test_the_commands_that_lack_options_exist() -> None:
    assert LACKS.keys() <= COMMANDS.keys() and len(COMMANDS) > 35


def test_a_command_has_no_option_twice() -> None:
    for command, found in COMMANDS.items():
        given = [option for param in found.params for option in (*param.opts, *param.secondary_opts)]
        assert len(given) == len(set(given)), command


@pytest.mark.parametrize("option", ["--timeout", "--every"])
@pytest.mark.parametrize("seconds", ["inf", "nan", "1e12", "-1"])
def test_seconds_that_no_timer_can_wait_are_a_usage_error_of_every_command(option: str, seconds: str) -> None:
    having = [name for name in COMMANDS if option in options(name) and name not in REQUESTS_DEADLINE]
    assert having
    for command in having:
        with pytest.raises(UsageError, match=f"{option}: .* to 86,400 "):
            app.invoke([*command.split(), f"{option}={seconds}"])


@pytest.mark.parametrize("command", [name for name in COMMANDS if "--json" in options(name)])
def test_an_error_is_json_too(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", tmp_path / "none.toml", *command.split(), "--no-such-option", "--json") == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["code"] == "UsageError" and "--no-such-option" in shown.err


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


def test_the_limits_of_the_command_line_hold_for_all_work_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[fan_out.FanOutLimits] = []
    select = Fleet.select

    def noted(fleet: Fleet, *arguments: Any, **named: Any) -> Any:
        found.append(fan_out._limits.get())
        return select(fleet, *arguments, **named)

    monkeypatch.setattr(Fleet, "select", noted)
    path = write_fleet(tmp_path)
    for given, limits in (
        ((), fan_out.FanOutLimits()),
        (("--parallel", 3, "--timeout", 1.5), fan_out.FanOutLimits(3, 1.5)),
    ):
        found.clear()
        run("--config", path, "stop", "--host", "*", "--json", *given)
        assert found and set(found) == {limits}
    run("--config", path, "status", "--host", "*", "--json", "--timeout", 5)
    assert found[-1] == fan_out.FanOutLimits()  # a timeout of its own, for one reading
    capsys.readouterr()
    assert run("--config", path, "stop", "--parallel", 0) == 2
