"""Steps carried out on this machine with another HOME and stand-ins for sudo and the system's programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Deploy, EngineOptions
from disagg.errors import HostUnreachable
from disagg.fleet.bootstrap import Bootstrap, SetUpStep, StepResult, steps
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import Invocation
from tests.fleet.facts.fixture_facts import spark

HOST = spark(engine=EngineOptions("transformers", device="cpu"), service="process", python="~/own/python")
SUDO = """\
test -f "$HOME/no-sudo" && { echo "a password is required" >&2; exit 1; }
test "$1" = -n && shift
exec "$@"
"""
TIMEDATECTL = """\
case $1 in
    set-ntp) test -f "$HOME/read-only" || echo yes >"$HOME/ntp" ;;
    show) cat "$HOME/ntp" ;;
esac
"""
TOOLS = {
    "sudo": SUDO,
    "timedatectl": TIMEDATECTL,
    "curl": 'echo \'mkdir -p "$HOME/.local/bin"; echo >"$HOME/.local/bin/uv"; chmod 755 "$HOME/.local/bin/uv"\'\n',
    "id": "case $1 in -un) echo me ;; -u) echo 1000 ;; esac\n",
}
ACCOUNTS = {
    "sudo": """\
test "$1" = -n && shift
if test "$1" = -H; then
    test -d "$accounts/$3" || { echo "unknown user $3" >&2; exit 1; }
    HOME=$accounts/$3
    export HOME
    shift 3
fi
exec "$@"
""",
    "id": 'case $*: in -un:) echo me ;; -u:) echo 1000 ;; -u*) test -d "$accounts/$2" ;; -gn*) echo users ;; esac\n',
    "getent": 'echo "$2:x:1:1::$accounts/$2:/bin/sh"\n',
    "useradd": 'for name; do :; done; mkdir "$accounts/$name"\n',
    "install": 'case $1 in -d) for last; do :; done; mkdir -p "$last" ;; *) cp "$7" "$8" ;; esac\n',
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without uv, whose clock is not set."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in TOOLS.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}")
        (tools / name).chmod(0o755)
    own = tmp_path / "own/python"
    own.parent.mkdir()
    own.touch(mode=0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")

    def own_steps(*arguments: Any) -> tuple[SetUpStep, ...]:
        """Those of the table. This machine's own uv, if it has one, does not count."""
        check = 'test -x "$HOME/.local/bin/uv" && echo "$HOME/.local/bin/uv"'
        return tuple(replace(one, check=check) if one.name == "uv" else one for one in steps(*arguments))

    monkeypatch.setattr("disagg.fleet.bootstrap.steps", own_steps)
    return tmp_path


@pytest.fixture
def work(home: Path) -> Bootstrap:
    return Bootstrap(HOST, Deploy(), LocalMachine(HOST.name))


def states(results: list[StepResult]) -> dict[str, str]:
    return {one.step.name: one.state for one in results}


def test_a_look_changes_nothing(work: Bootstrap, home: Path) -> None:
    before = sorted(home.rglob("*"))
    assert states(work.look()) == {"uv": "missing", "python": "in place", "clock": "missing"}
    assert sorted(home.rglob("*")) == before


def test_only_what_is_missing_is_done_and_a_second_time_nothing_is(work: Bootstrap, home: Path) -> None:
    ran: list[tuple[str, str]] = []
    bootstrap = Bootstrap(HOST, Deploy(), work.machine, lambda *line: ran.append(line))
    done = bootstrap.carry_out(bootstrap.look())
    assert states(done) == {"uv": "done", "python": "in place", "clock": "done"}
    assert {one.step.name: one.found for one in done}["uv"] == f"{home}/.local/bin/uv"
    assert [name for name, line in ran if line.startswith("$ ")] == ["uv", "clock"]
    assert states(bootstrap.look()) == dict.fromkeys(("uv", "python", "clock"), "in place")


def test_a_command_that_changes_nothing_has_failed(work: Bootstrap, home: Path) -> None:
    (home / "read-only").touch()
    done = {one.step.name: one for one in work.carry_out(work.look())}
    assert done["clock"].state == "failed" and "still missing" in done["clock"].error
    assert done["uv"].state == "done", "one step's failure is its own"


def test_a_command_that_fails_is_shown_with_its_last_words(work: Bootstrap, home: Path) -> None:
    (home / "tools/timedatectl").write_text("#!/bin/sh\necho 'no systemd' >&2\nexit 1\n")
    done = {one.step.name: one for one in work.carry_out(work.look())}
    assert (done["clock"].state, done["clock"].error) == ("failed", "no systemd")


def test_what_an_earlier_step_has_brought_is_not_done_again(work: Bootstrap, home: Path) -> None:
    found = work.look()
    (home / "ntp").write_text("yes\n")
    assert states(work.carry_out(found))["clock"] == "in place"


def test_where_sudo_asks_for_a_password_steps_of_root_are_left_to_a_person(work: Bootstrap, home: Path) -> None:
    (home / "no-sudo").touch()
    found = work.look()
    assert states(found) == {"uv": "missing", "python": "in place", "clock": "by hand"}
    assert states(work.carry_out(found)) == {"uv": "done", "python": "in place", "clock": "by hand"}
    assert not (home / "ntp").exists()


def test_a_step_whose_command_fails_is_not_done_although_its_check_passes(work: Bootstrap, home: Path) -> None:
    (home / "tools/timedatectl").write_text(
        f"#!/bin/sh\n{TIMEDATECTL}test $1 = show || {{ echo 'half of it' >&2; exit 1; }}\n"
    )
    done = {one.step.name: one for one in work.carry_out(work.look())}
    assert (done["clock"].state, done["clock"].error) == ("failed", "half of it")


@pytest.mark.parametrize("curl", ["echo 'no route' >&2; exit 6", "echo 'touch ~/half'; echo 'no route' >&2; exit 18"])
def test_of_a_download_that_fails_nothing_is_run_and_the_cause_is_shown(work: Bootstrap, home: Path, curl: str) -> None:
    (home / "tools/curl").write_text(f"#!/bin/sh\n{curl}\n")
    done = {one.step.name: one for one in work.carry_out(work.look())}
    assert (done["uv"].state, done["uv"].error) == ("failed", "no route") and not (home / "half").exists()


class Restarting(LocalMachine):
    """Is out of reach as soon as there is a file `gone`."""

    def execute(self, invocation: Invocation) -> int:
        if Path.home().joinpath("gone").exists():
            raise HostUnreachable("it restarts")
        return super().execute(invocation)


@pytest.mark.parametrize(("tool", "uv", "clock"), [("curl", "failed", "missing"), ("timedatectl", "done", "failed")])
def test_what_was_done_before_a_machine_went_out_of_reach_is_still_shown(
    home: Path, tool: str, uv: str, clock: str
) -> None:
    work = Bootstrap(HOST, Deploy(), Restarting(HOST.name))
    found = work.look()
    (home / "tools" / tool).write_text('#!/bin/sh\ntest "$1" = show || touch "$HOME/gone"\n')
    done = work.carry_out(found)
    assert states(done) == {"uv": uv, "python": "in place", "clock": clock}
    assert [one.error for one in done if one.state == "failed"] == ["it restarts"]


@pytest.fixture
def accounts(home: Path) -> Path:
    """The homes of a machine's accounts. `me`, which is logged in, has a key."""
    folder = home / "accounts"
    for name, text in ACCOUNTS.items():
        (home / "tools" / name).write_text(f"#!/bin/sh\naccounts={folder}\n{text}")
        (home / "tools" / name).chmod(0o755)
    (folder / "me/.ssh").mkdir(parents=True)
    (folder / "me/.ssh/authorized_keys").write_text("the key\n")
    return folder


@pytest.fixture
def account(accounts: Path) -> Callable[[], StepResult]:
    """Carries out the step that makes the account `llm`."""

    def carry_out() -> StepResult:
        work = Bootstrap(replace(HOST, user="llm"), Deploy(), LocalMachine(HOST.name))
        (result,) = work.carry_out([one for one in work.look() if one.step.name == "account"])
        return result

    return carry_out


@pytest.mark.parametrize("exists", [False, True])
def test_an_account_that_is_missing_or_has_no_key_gets_the_keys_of_the_one_that_is_logged_in(
    account: Callable[[], StepResult], accounts: Path, exists: bool
) -> None:
    if exists:
        (accounts / "llm").mkdir()
    assert account().state == "done"
    assert (accounts / "llm/.ssh/authorized_keys").read_text() == "the key\n"
    assert account().state == "in place"


def test_no_account_is_made_for_which_there_is_no_key(account: Callable[[], StepResult], accounts: Path) -> None:
    (accounts / "me/.ssh/authorized_keys").unlink()
    result = account()
    assert result.state == "failed" and result.error.startswith("no keys to copy: ")
    assert not (accounts / "llm").exists()


def test_keys_that_an_account_has_are_kept(account: Callable[[], StepResult], accounts: Path) -> None:
    own = accounts / "llm/.ssh/authorized_keys"
    own.parent.mkdir(parents=True)
    own.write_text("its own\n")
    assert account().state == "in place" and own.read_text() == "its own\n"
