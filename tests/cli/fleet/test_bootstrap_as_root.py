"""`disagg bootstrap` on a host of the test bed where accounts are really made: with sudo, and by root without sudo."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.config import load
from tests.cli.commandline import run
from tests.testbed import network
from tests.testbed.bed import Bed, BedHost, await_sshd, make_client, make_known, namespace_host

NAME = "spark-1"
FLEET = """\
[fleet]
name = "lab"

[deploy]
installer = "pip"

[models.tiny]
context = 2048
[models.tiny.sources]
transformers = "./weights"

[hosts.spark-1]
address = "169.254.150.11"
user = "llm"
roles = ["prefill"]
model = "tiny"
port = 8000
connector = "ssh"
service = "process"
python = "/bin/sh" # its place is all that is looked at

[hosts.spark-1.engine]
name = "transformers"
device = "cpu"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.toml"
    path.write_text(FLEET)
    return path


@pytest.fixture
def bare(tmp_path: Path, config: Path) -> Iterator[BedHost]:
    """A host with an account that may become root, and without the one of hosts.toml."""
    if not network.may_make_namespaces():
        pytest.skip("needs network namespaces: run as root")
    if shutil.which("sudo") is None:
        pytest.skip("needs sudo: run tests/testbed/requirements.sh")
    folder = tmp_path / "bed"
    folder.mkdir()
    sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin") or "sshd"
    client = make_client(folder)
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    with network.hub() as hub, namespace_host(folder, client, load(config).hosts[NAME], sshd, hub, sudo=True) as host:
        with network.inside(hub):
            await_sshd(host)
        make_known(client, {NAME: host})
        with Bed(folder, {NAME: host}, client, hub, True, config).entered():
            yield host


def bootstrap(config: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The steps by name."""
    code = run("--config", config, "bootstrap", NAME, "--yes", "--json", *options)
    body = json.loads(capsys.readouterr().out)
    assert (code == 0) == body["ok"], body
    return {one["name"]: one for one in body["steps"]}


def test_an_account_made_with_sudo_can_log_in(bare: BedHost, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "bootstrap", NAME, "--dry-run") == 4
    assert f"disagg bootstrap {NAME} --login" in capsys.readouterr().err
    done = bootstrap(config, capsys, "--login", bare.user)
    assert {name: one["state"] for name, one in done.items()} == {
        "account": "done",
        "python": "in place",
        "clock": "failed",  # there is no systemd on this host
    }
    assert "systemd" in done["clock"]["error"]
    keys = bare.as_root("stat", "-c", "%U %a", "/home/llm/.ssh", "/home/llm/.ssh/authorized_keys").stdout
    assert keys.decode().splitlines() == ["llm 700", "llm 600"]
    again = bootstrap(config, capsys, "--login", bare.user)
    assert again["account"]["state"] == "in place"
    own = bootstrap(config, capsys)
    assert {name: one["state"] for name, one in own.items()} == {"python": "in place", "clock": "by hand"}


def test_root_needs_no_sudo(bare: BedHost, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = "/home/root/.ssh"
    bare.as_root("sed", "-i", "s#^root:.*#root:x:0:0::/home/root:/bin/sh#", "/etc/passwd")
    bare.as_root("mkdir", "-p", home)
    bare.as_root("cp", f"{bare.remote_home}/.ssh/authorized_keys", home)
    bare.as_root("mount", "--bind", "/dev/null", "/usr/bin/sudo")
    done = bootstrap(config, capsys, "--login", "root")
    assert (done["account"]["state"], done["python"]["state"]) == ("done", "in place"), done
    assert bootstrap(config, capsys)["clock"]["state"] == "by hand"
