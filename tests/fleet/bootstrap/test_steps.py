"""Which steps a machine needs, as a table; what can be done, and what only a person can do."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Deploy, EngineOptions, Host
from disagg.fleet.bootstrap import CheckedMachine, CheckResult, SetUpStep, as_account, check_line, judged, steps
from tests.fleet.facts.fixture_facts import spark, studio

CPU = EngineOptions("transformers", device="cpu")
DEPLOY = Deploy()
QUOTED = shlex.quote("a 'b'")
UV = SetUpStep("uv", "why", "true", "install uv")
CLOCK = SetUpStep("clock", "why", "true", "set the clock", root=True)
DRIVER = SetUpStep("driver", "why", "true", by_hand="install it")


def names(host: Host, os: str = "Linux", login: str = "me", deploy: Deploy = DEPLOY) -> list[str]:
    return [step.name for step in steps(host, deploy, os, login)]


@pytest.mark.parametrize(
    ("host", "os", "login", "deploy", "wanted"),
    [
        (spark(), "Linux", "me", DEPLOY, ["uv", "python", "clock", "linger", "driver"]),
        (spark(engine=CPU), "Linux", "me", DEPLOY, ["uv", "python", "clock", "linger"]),
        (spark(service="process", engine=CPU), "Linux", "me", DEPLOY, ["uv", "python", "clock"]),
        (spark(engine=CPU), "Linux", "me", Deploy(installer="pip"), ["python", "clock", "linger"]),
        (spark(user="disagg", engine=CPU), "Linux", "me", DEPLOY, ["account", "uv", "python", "clock", "linger"]),
        (spark(user="me", engine=CPU), "Linux", "me", DEPLOY, ["uv", "python", "clock", "linger"]),
        (studio(), "Darwin", "me", DEPLOY, ["uv", "clock", "sleep"]),
        (studio(), "Darwin", "me", Deploy(installer="pip"), ["python", "clock", "sleep"]),
        (studio(python="/opt/python"), "Darwin", "me", DEPLOY, ["uv", "python", "clock", "sleep"]),
        (studio(user="disagg"), "Darwin", "me", DEPLOY, ["account", "uv", "clock", "sleep"]),
    ],
)
def test_a_machine_needs_what_its_system_and_hosts_toml_ask_for(
    host: Host, os: str, login: str, deploy: Deploy, wanted: list[str]
) -> None:
    assert names(host, os, login, deploy) == wanted


def every_step() -> list[SetUpStep]:
    hosts = [(spark(user="other", python="~/my python"), "Linux"), (studio(user="other", python="/x"), "Darwin")]
    plain = [(spark(), "Linux"), (studio(), "Darwin")]
    deploys = (DEPLOY, Deploy(installer="pip"))
    return [step for host, os in (*hosts, *plain) for deploy in deploys for step in steps(host, deploy, os, "me")]


@pytest.mark.parametrize("step", every_step(), ids=lambda step: step.name)
def test_every_step_has_a_reason_a_check_and_either_a_command_or_what_a_person_does(step: SetUpStep) -> None:
    assert step.why and step.check and bool(step.command) != bool(step.by_hand)
    for line in filter(None, (step.check, step.command)):
        subprocess.run(["sh", "-n", "-c", line], check=True)


@pytest.mark.parametrize(
    ("user", "uid", "account", "root", "line"),
    [
        ("me", 1000, "me", False, "a 'b'"),
        ("me", 1000, "me", True, f"sudo -n /bin/sh -c {QUOTED}"),
        ("me", 1000, "other", False, f"sudo -n -H -u other /bin/sh -c {QUOTED}"),
        ("root", 0, "root", True, "a 'b'"),
        ("root", 0, "other", True, "a 'b'"),
        ("root", 0, "other", False, f"su -s /bin/sh -c {QUOTED} other"),
    ],
)
def test_a_line_runs_as_root_or_as_the_hosts_account(user: str, uid: int, account: str, root: bool, line: str) -> None:
    assert as_account("a 'b'", account, CheckedMachine("Linux", user, uid), root) == line


def test_on_a_mac_root_has_sudo_and_its_su_takes_no_shell() -> None:
    line = as_account("a 'b'", "other", CheckedMachine("Darwin", "root", 0))
    assert line == f"sudo -n -H -u other /bin/sh -c {QUOTED}"


def test_a_check_that_needs_root_does_not_need_it_of_the_hosts_account() -> None:
    (clock,) = [step for step in steps(studio(user="other"), DEPLOY, "Darwin", "me") if step.name == "clock"]
    line = check_line(clock, "other", CheckedMachine("Darwin", "me", sudo=True))
    assert line.startswith("sudo -n /bin/sh -c ") and line.count("sudo") == 1


def states(step: SetUpStep, host: Host, **machine: Any) -> tuple[str, str]:
    """(state, what a person does) of a step that is not in place."""
    (found,) = judged((step,), CheckedMachine("Linux", "me", **machine), host)
    return found.state, found.step.by_hand


def test_what_is_in_place_is_shown_with_what_was_found() -> None:
    there = CheckedMachine("Linux", "me", results={"uv": CheckResult(True, "/bin/uv")})
    found, lacks = judged((UV, CLOCK), there, spark())
    assert (found.state, found.found) == ("in place", "/bin/uv") and lacks.state == "by hand"


@pytest.mark.parametrize(
    ("step", "host", "machine", "state", "hint"),
    [
        (UV, spark(), {}, "missing", ""),
        (CLOCK, spark(), {"sudo": True}, "missing", ""),
        (CLOCK, spark(), {"uid": 0}, "missing", ""),
        (DRIVER, spark(), {"sudo": True}, "by hand", "install it"),
        (CLOCK, spark(), {}, "by hand", "disagg ssh dgx-spark-1 -- "),
        (CLOCK, spark(user="me"), {}, "by hand", "disagg ssh dgx-spark-1 -- "),
        (CLOCK, spark(user="other"), {}, "by hand", "ssh -t me@10.0.0.3 "),
        (UV, spark(user="other"), {}, "by hand", "ssh -t me@10.0.0.3 "),
        (UV, spark(user="other", ssh_port=2222, key="/k"), {}, "by hand", "ssh -t -p 2222 -i /k me@10.0.0.3 "),
        (UV, spark(user="other"), {"sudo": True}, "missing", ""),
    ],
)
def test_what_needs_a_password_or_has_no_command_is_for_a_person(
    step: SetUpStep, host: Host, machine: dict[str, Any], state: str, hint: str
) -> None:
    found, shown = states(step, host, **machine)
    assert found == state and hint in shown


@pytest.mark.parametrize("place", ["tools/uv", ".local/bin/uv", ".cargo/bin/uv", ""])
def test_uv_is_looked_for_where_a_deployment_finds_it(tmp_path: Path, place: str) -> None:
    (check,) = [step.check for step in steps(spark(), DEPLOY, "Linux", "me") if step.name == "uv"]
    if place:
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch(mode=0o755)
    own = {"HOME": str(tmp_path), "PATH": f"{tmp_path}/tools"}
    done = subprocess.run(["/bin/sh", "-c", check], env=own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == ((0, str(tmp_path / place)) if place else (1, ""))


def test_a_plain_command_needs_no_shell() -> None:
    assert as_account("timedatectl set-ntp true", "me", CheckedMachine("Linux", "me"), root=True) == (
        "sudo -n timedatectl set-ntp true"
    )


def test_what_a_person_runs_with_a_password_is_a_whole_command_line() -> None:
    _, hint = states(replace(CLOCK, command="a 'b' && c"), spark())
    *_, line = shlex.split(hint.partition(": ")[2])
    assert shlex.split(line) == ["sudo", "/bin/sh", "-c", "a 'b' && c"]
