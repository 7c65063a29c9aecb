"""What is found on a machine, whichever host and fleet it belongs to."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from disagg.fleet.facts import probe
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.server import FoundHost, MachineContents, read_contents
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import script
from disagg.fleet.services import launchd

ENVIRONMENT = "e" * 16
HOSTS_TOML = """\
[fleet]
name = "lab"

[models."qwen:30b"]
context = 2048

[models."qwen:30b".sources]
transformers = "owner/qwen"
mlx = '/home/a"b/qwen'

[hosts.old]
name = "no fleet"
model = "no source"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def contents() -> MachineContents:
    return read_contents(LocalMachine("spark"))


def test_a_bare_machine_has_nothing_and_is_known_again(home: Path) -> None:
    first = contents()
    assert (first.home, first.hosts, first.environments, first.carried, first.cached) == (str(home), (), (), (), ())
    assert first.machine.startswith(f"{os.uname().nodename}/") and contents().machine == first.machine


def test_another_account_of_the_same_machine_is_another_place(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = contents().machine
    (home / "other").mkdir()
    monkeypatch.setenv("HOME", str(home / "other"))
    assert contents().machine != here


def test_hosts_are_found_with_fleet_environment_sources_token_and_services(home: Path) -> None:
    own = home / ".disagg/hosts/old"
    release = own / "releases" / ("1" * 16)
    release.mkdir(parents=True)
    (release / "environment").write_text(f"{ENVIRONMENT}\n")
    (release / "hosts.toml").write_text(HOSTS_TOML)
    (own / "token").write_text("secret\n")
    (own / "lock").mkdir()
    (own / "supervisor.json").write_text("{}")
    unit = home / ".config/systemd/user/disagg-unit-only.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Unit]\n")
    assert contents().hosts == (
        FoundHost(
            "old",
            True,
            frozenset({"lab"}),
            1,
            frozenset({ENVIRONMENT}),
            frozenset({"owner/qwen", '/home/a"b/qwen'}),
            ("process",),
            token_digests=(hashlib.sha256(b"secret\n").hexdigest(),),
            token_mode="-rw-r--r--",
            locked=True,
        ),
        FoundHost("unit-only", False, managers=("systemd",)),
    )


def test_environments_and_models_are_found(home: Path) -> None:
    for name in (f".disagg/envs/{ENVIRONMENT}", ".disagg/models/carried/tiny-1", ".cache/huggingface/hub/models--a--b"):
        (home / name).mkdir(parents=True)
    found = contents()
    assert (found.environments, found.carried, found.cached) == ((ENVIRONMENT,), ("tiny-1",), ("models--a--b",))


def test_of_launchds_daemons_only_those_of_this_account_are_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemons, text = home / "daemons", script
    daemons.mkdir()
    monkeypatch.setattr(probe, "script", lambda *names: text(*names).replace(launchd.FOLDER, str(daemons)))
    for name, account in (("ours", str(home)), ("theirs", "/Users/other"), ("both", "/Users/other")):
        plist = launchd.server_plist(name, HostPaths(account, name), "somebody")
        (daemons / f"disagg.{name}.plist").write_bytes(plist)
    for name in ("ours", "theirs", "both", "limited", "lost"):
        limit = launchd.wired_limit_plist(f"{name}.wired-limit", 4096)
        (daemons / f"disagg.{name}.wired-limit.plist").write_bytes(limit)
    for name in ("both", "limited"):
        (home / ".disagg/hosts" / name).mkdir(parents=True)
    managers = {one.name: one.managers for one in contents().hosts}
    assert managers == {"both": (), "limited": ("launchd",), "ours": ("launchd",)}
