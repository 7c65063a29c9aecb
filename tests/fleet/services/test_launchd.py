"""The daemons as launchd reads them."""

from __future__ import annotations

import os
import plistlib
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import EngineOptions, Host
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.machine import script
from disagg.fleet.services import Verb, command, definitions
from disagg.fleet.services.launchd import server_plist

HOST = Host(
    "mac-1", "10.0.0.1", ("decode",), "m", EngineOptions("mlx"), 8001, kv_port=9001, service="launchd",
    wired_limit_mb=400_000,
)  # fmt: skip
FACTS = HostFacts("mac-1", os="Darwin", user="studio", home="/Users/studio", launchd=True)
HOSTILE = ["a b", "it's", "<string>&amp;</string>", "$(id)", "a;b", "é"]


def test_the_server_runs_as_the_user_restarts_and_brings_its_own_environment() -> None:
    server, wired = definitions(HOST, FACTS)
    assert server.path == "/Library/LaunchDaemons/disagg.mac-1.plist"
    said = plistlib.loads(server.content)
    assert said["ProgramArguments"] == ["/bin/sh", "/Users/studio/.disagg/hosts/mac-1/running/run"]
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
    said = plistlib.loads(server_plist("h", HostPaths(f"/Users/{name}", "h"), name))
    assert said["ProgramArguments"][1] == f"/Users/{name}/.disagg/hosts/h/running/run"
    assert said["UserName"] == name


def test_the_same_facts_make_the_same_bytes() -> None:
    assert definitions(HOST, FACTS) == definitions(HOST, FACTS)


def test_every_verb_asks_for_root_without_a_password_and_names_what_is_missing() -> None:
    for verb in ("start", "stop", "restart", "remove"):
        made = command("launchd", FACTS.paths, verb)
        assert made.argv == (verb, "disagg.mac-1", "/Library/LaunchDaemons/disagg.mac-1.plist")
        assert "exit 77" in made.script
    assert "-o root -g wheel -m 644" in script("install_plists.sh")


FAKE_LAUNCHCTL = """\
# A daemon that takes $STATE/print calls to end, once it was booted out with code $STATE/code.
case $1 in
    print) test -f "$STATE/loaded" || exit 113
        left=$(cat "$STATE/ending" 2>/dev/null) || exit 0
        [ "$left" -gt 0 ] || { rm "$STATE/loaded"; exit 113; }
        echo $((left - 1)) >"$STATE/ending" ;;
    bootout) code=$(cat "$STATE/code"); [ "$code" -eq 5 ] || echo 2 >"$STATE/ending"
        [ "$code" -eq 0 ] || echo "Boot-out failed: $code" >&2
        exit "$code" ;;
esac
"""


@pytest.mark.parametrize("verb", ["stop", "remove"])
@pytest.mark.parametrize(("code", "well"), [(0, True), (36, True), (3, True), (5, False)])
def test_a_daemon_has_ended_when_stopping_it_has(tmp_path: Path, verb: Verb, code: int, well: bool) -> None:
    state, tools = tmp_path / "state", tmp_path / "tools"
    state.mkdir()
    tools.mkdir()
    (state / "loaded").touch()
    (state / "code").write_text(str(code))
    for name, text in (
        ("launchctl", FAKE_LAUNCHCTL),
        ("sudo", 'shift\nexec "$@"\n'),
        ("sleep", "exec /bin/sleep 0.01\n"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{text}")
        (tools / name).chmod(0o755)
    made = command("launchd", FACTS.paths, verb)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "STATE": str(state)}
    argv = ["sh", "-c", made.script, "sh", *made.argv]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode == 0, (state / "loaded").exists()) == (well, not well), done.stderr
    assert well or done.stderr == "Boot-out failed: 5\n"


def test_a_wired_limit_that_changed_is_loaded_anew() -> None:
    assert script("install_plists.sh").index("bootout") < script("install_plists.sh").index("bootstrap")


def test_scripts_are_posix_sh() -> None:
    scripts = [command(service, FACTS.paths, verb).script for service in ("systemd", "launchd", "process")
               for verb in ("start", "stop", "restart", "remove")]  # fmt: skip
    for text in (*scripts, script("install_plists.sh")):
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)
