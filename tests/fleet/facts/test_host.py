"""The probe on this machine, and what is made of what it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.errors import FleetError
from disagg.fleet.facts.host import (
    HostFacts,
    InstalledService,
    Python,
    Release,
    Systemd,
    parse,
    read_host_facts,
)
from disagg.fleet.facts.probe import ProbeOutput
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import script
from disagg.nvidia import GPU
from tests.fleet.facts.fixture_facts import facts, spark


def parsed(host: str, text: str) -> HostFacts:
    return parse(host, ProbeOutput.parse(host, text))


def probed(home: Path, *argv: str, shell: str = "sh", path: str = "/usr/bin:/bin") -> HostFacts:
    environment = {"HOME": str(home), "PATH": path}
    done = subprocess.run(
        [shell, "-s", "--", *(argv or ("h", ""))],
        input=script("probe.sh", "host.sh"),
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return parsed((argv or ("h",))[0], done.stdout)


def test_a_spark_is_read_whole() -> None:
    found = facts("spark_deployed")
    assert (found.os, found.arch, found.user, found.home) == ("Linux", "aarch64", "nvidia", "/home/nvidia")
    assert found.hardware.memory == 125829120 * 1024 and found.disk_free == 3565158400 * 1024
    assert found.hardware.gpus == (GPU("NVIDIA GB10", "580.95.05", temperature=41, utilisation=0.0),)
    assert found.pythons == (Python("/usr/bin/python3.12", (3, 12, 3)),)
    assert found.systemd == Systemd(255, usable=True, linger=True)
    assert found.installed == {"systemd": InstalledService("aaaa", True)}
    assert found.own_releases == {"1" * 16, "2" * 16}
    assert Release("other", "3" * 16, "c" * 16) in found.releases
    assert found.environment_of("2" * 16) == "b" * 16
    assert (found.pid, found.release) == (4242, "2" * 16)
    assert found.listening == (8000,)


def test_a_studio_is_read_whole() -> None:
    found = facts("studio_bare", "mac-studio-1")
    assert (found.sys_platform, found.launchd, found.sudo) == ("darwin", True, False)
    assert [python.version for python in found.pythons] == [(3, 13, 1), (3, 9, 6)]


def test_a_broken_off_deployment_is_seen() -> None:
    found = facts("spark_half")
    assert found.leftovers == ("incoming", "releases/.1111111111111111.part.77")
    assert found.environments == {"a" * 16: False}


def test_output_that_ends_early_is_an_error_that_points_at_login_scripts() -> None:
    with pytest.raises(FleetError, match="ended early") as caught:
        parsed("h", "machine\tLinux\n")
    assert ".bashrc" in caught.value.hint


def test_lines_of_another_version_of_the_probe_do_no_harm() -> None:
    text = "future\tx\nmachine\tLinux\nhome\t/h\t1\textra\npython\t0\tnonsense\t1\t/p\ndisk\t\nend\n"
    found = parsed("h", text)
    assert (found.os, found.home, found.pythons, found.disk_free) == ("", "/h", (), None)


@pytest.mark.parametrize("shell", [name for name in ("dash", "bash", "busybox") if shutil.which(name)])
def test_the_probe_runs_in_plain_shells_and_changes_nothing(tmp_path: Path, shell: str) -> None:
    found = probed(tmp_path, shell=shell)
    assert (found.os, found.home, found.writable) == ("Linux", str(tmp_path), True)
    assert found.disk_free and found.hardware.memory
    assert (found.current, found.releases, found.folder) == ("", (), False)
    assert list(tmp_path.iterdir()) == []


def test_the_configured_python_is_looked_at_under_the_path_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "my python").symlink_to(sys.executable)
    configured = [python for python in probed(tmp_path, "h", "~/my python").pythons if python.configured]
    assert [python.version for python in configured] == [sys.version_info[:3]]
    assert probed(tmp_path, "h", "~/no/python").no_python == f"{tmp_path}/no/python"


def test_what_is_deployed_is_read_from_the_folders(tmp_path: Path) -> None:
    mine = tmp_path / ".disagg/hosts/h"
    release = mine / "releases/1111111111111111"
    release.mkdir(parents=True)
    (release / "environment").write_text("a" * 16 + "\n")
    (mine / "current").symlink_to("releases/1111111111111111")
    (mine / "token").write_text("x")
    (mine / "token").chmod(0o600)
    (mine / "incoming").mkdir()
    (mine / "releases/.2222222222222222.part.9").mkdir()
    (mine / ".serving.12").touch()
    (mine / "uploads").mkdir()
    (mine / "uploads" / ("0" * 32)).write_bytes(b"12345")
    (mine / "serving").write_text(f"{os.getpid()} {'1' * 16}\n")
    environment = tmp_path / ".disagg/envs" / ("a" * 16)
    (environment / "bin").mkdir(parents=True)
    found = probed(tmp_path)
    assert (found.current, found.previous, found.own_releases) == ("1" * 16, "", frozenset({"1" * 16}))
    assert found.damaged == {"1" * 16}, "the name is not that of its content"
    assert found.environments == {"a" * 16: False}, "no stamp yet"
    assert found.token_mode == "-rw-------" and [len(one) for one in found.token_digests] == [64]
    assert set(found.leftovers) == {"incoming", "releases/.2222222222222222.part.9", ".serving.12"}
    assert found.uploads == {"0" * 32: 5}
    (environment / ".complete").touch()
    (environment / "bin/python").symlink_to("/nowhere/python")
    assert probed(tmp_path).environments == {"a" * 16: False}, "its python is gone"
    (environment / "bin/python").unlink()
    (environment / "bin/python").symlink_to(sys.executable)
    assert probed(tmp_path).environments == {"a" * 16: True}


def test_a_server_that_has_ended_is_not_serving(tmp_path: Path) -> None:
    mine = tmp_path / ".disagg/hosts/h"
    mine.mkdir(parents=True)
    ended = subprocess.Popen(["true"])
    ended.wait()
    (mine / "serving").write_text(f"{ended.pid} {'1' * 16}\n")
    found = probed(tmp_path)
    assert (found.pid, found.release) == (None, "1" * 16)


def test_a_tab_or_newline_in_a_value_cannot_forge_a_line(tmp_path: Path) -> None:
    release = tmp_path / ".disagg/hosts/h/releases/1111111111111111"
    release.mkdir(parents=True)
    (release / "environment").write_text("x\ncurrent\tffffffffffffffff\nend\n")
    found = probed(tmp_path)
    assert (found.current, found.environment_of("1" * 16)) == ("", "x current ffffffffffffffff end")


def test_gather_goes_through_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_host_facts(LocalMachine("dgx-spark-1"), spark()).home == str(tmp_path)
