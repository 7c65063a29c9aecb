"""The daemons as launchd reads them."""

from __future__ import annotations

import plistlib
from dataclasses import replace

import pytest

from disagg.config import EngineOptions, Host
from disagg.fleet.deploy.facts import Facts
from disagg.fleet.deploy.layout import Layout
from disagg.fleet.services import command, definitions
from disagg.fleet.services.launchd import INSTALL, server_plist

HOST = Host(
    "mac-1", "10.0.0.1", ("decode",), "m", EngineOptions("mlx"), 8001, kv_port=9001, service="launchd",
    wired_limit_mb=400_000,
)  # fmt: skip
FACTS = Facts("mac-1", os="Darwin", user="studio", home="/Users/studio", launchd=True)
HOSTILE = ["a b", "it's", "<string>&amp;</string>", "$(id)", "a;b", "é"]


def test_the_server_runs_as_the_user_restarts_and_brings_its_own_environment() -> None:
    server, wired = definitions(HOST, FACTS)
    assert (server.path, server.as_root) == ("/Library/LaunchDaemons/disagg.mac-1.plist", True)
    said = plistlib.loads(server.content)
    assert said["ProgramArguments"] == ["/bin/sh", "/Users/studio/.disagg/hosts/mac-1/current/run"]
    assert said["UserName"] == "studio" and said["KeepAlive"] is True and said["RunAtLoad"] is True
    assert said["EnvironmentVariables"]["HOME"] == "/Users/studio"
    assert said["ExitTimeOut"] >= 30
    assert wired.path == "/Library/LaunchDaemons/disagg.mac-1.wired-limit.plist"
    assert plistlib.loads(wired.content)["ProgramArguments"] == ["/usr/sbin/sysctl", "iogpu.wired_limit_mb=400000"]
    assert "UserName" not in plistlib.loads(wired.content), "only root may set it"


def test_without_a_limit_there_is_no_second_daemon() -> None:
    assert len(definitions(replace(HOST, wired_limit_mb=None), FACTS)) == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_paths_of_any_name_come_back_as_they_were(name: str) -> None:
    said = plistlib.loads(server_plist("h", Layout(f"/Users/{name}", "h"), name))
    assert said["ProgramArguments"][1] == f"/Users/{name}/.disagg/hosts/h/current/run"
    assert said["UserName"] == name


def test_the_same_facts_make_the_same_bytes() -> None:
    assert definitions(HOST, FACTS) == definitions(HOST, FACTS)


def test_every_verb_asks_for_root_without_a_password_and_names_what_is_missing() -> None:
    for verb in ("start", "stop", "restart", "remove"):
        made = command("launchd", FACTS, verb)
        assert made.argv == ("disagg.mac-1", "/Library/LaunchDaemons/disagg.mac-1.plist")
        assert "exit 77" in made.script
    assert "-o root -g wheel -m 644" in INSTALL


def test_scripts_are_posix_sh() -> None:
    import subprocess

    scripts = [command(service, FACTS, verb).script for service in ("systemd", "launchd", "process")
               for verb in ("start", "stop", "restart", "remove")]  # fmt: skip
    for script in (*scripts, INSTALL):
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)
