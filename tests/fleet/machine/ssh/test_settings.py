"""ssh_config as disagg understands it, checked against what `ssh -G` says, and through a real gateway."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import FleetError, HostKeyRefused, LoginRefused
from disagg.fleet.machine.ssh import settings as ssh_settings
from disagg.fleet.machine.ssh.machine import SSHMachine
from disagg.fleet.machine.ssh.settings import settings_for
from tests.programs import needs
from tests.testbed.bed import Bed

Write = Callable[[str], Path]


def host(address: str = "spark", **fields: Any) -> Host:
    return Host("spark-1", address, ("prefill",), "tiny", EngineOptions("transformers"), 8000, **fields)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write ~/.ssh/config of an empty home; there is no system-wide one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh_settings, "SYSTEM_CONFIG", tmp_path / "none")
    (tmp_path / ".ssh").mkdir()

    def write(text: str) -> Path:
        path = tmp_path / ".ssh/config"
        path.write_text(text)
        return path

    return write


CONFIG = """\
IdentitiesOnly yes
Host spark
    HostName 10.0.0.7
    User ubuntu
    Port 2222
    IdentityFile ~/.ssh/special
    ConnectTimeout 3
    ProxyJump none
Host *
    User somebody
    UserKnownHostsFile ~/.ssh/a ~/.ssh/b
"""


@needs("ssh")
def test_ssh_config_means_what_it_means_to_ssh(write: Write, tmp_path: Path) -> None:
    path = write(CONFIG)
    settings = settings_for(host())
    printed = subprocess.run(["ssh", "-F", path, "-G", "spark"], check=True, capture_output=True, text=True).stdout
    said = dict(line.split(" ", 1) for line in printed.splitlines() if " " in line)
    assert (settings.address, str(settings.port), settings.user) == (said["hostname"], said["port"], said["user"])
    assert settings.identities == (tmp_path / ".ssh/special",) and settings.identities_only
    assert settings.known_hosts[:2] == (tmp_path / ".ssh/a", tmp_path / ".ssh/b")
    assert (settings.connect_timeout, settings.jump, settings.known_as) == (3.0, None, "[10.0.0.7]:2222")


def test_hosts_toml_goes_before_ssh_config(write: Write, tmp_path: Path) -> None:
    write(CONFIG)
    settings = settings_for(host(user="root", ssh_port=22, key="~/.ssh/own"))
    assert (settings.user, settings.port, settings.known_as) == ("root", 22, "10.0.0.7")
    assert settings.identities == (tmp_path / ".ssh/own",)


def test_without_ssh_config_the_usual_keys_and_files_are_used(write: Write, tmp_path: Path) -> None:
    settings = settings_for(host("10.0.0.9"))
    assert [path.name for path in settings.identities] == ["id_ed25519", "id_ecdsa", "id_rsa"]
    assert settings.known_hosts[0] == tmp_path / ".ssh/known_hosts"
    assert not settings.identities_only and settings.jump is None


def test_included_files_stand_in_the_block_that_includes_them(write: Write, tmp_path: Path) -> None:
    (tmp_path / ".ssh/conf.d").mkdir()
    (tmp_path / ".ssh/conf.d/one").write_text("User included\nHost other\n  User wrong\n")
    write("Host spark\n  Include conf.d/*\n  Port 2200\nHost *\n  User last\n")
    settings = settings_for(host())
    assert (settings.user, settings.port) == ("included", 2200)
    assert settings_for(host("elsewhere")).user == "last"


def test_an_include_in_a_circle_is_told(write: Write) -> None:
    write("Include config\n")
    with pytest.raises(FleetError, match="is circular"):
        settings_for(host())


def test_a_jump_list_is_a_chain_of_hops(write: Write) -> None:
    write("Host spark\n  ProxyJump me@first:2201,second\nHost second\n  User other\n  ProxyJump ignored\n")
    settings = settings_for(host())
    second = settings.jump
    assert second is not None and (second.address, second.user) == ("second", "other")
    assert second.jump is not None
    assert (second.jump.address, second.jump.port, second.jump.user) == ("first", 2201, "me")
    assert second.jump.jump is None


def test_a_gateway_that_a_wildcard_sends_through_itself_is_reached_directly(write: Write) -> None:
    write("Host *\n  ProxyJump gate\n")
    settings = settings_for(host())
    assert settings.jump is not None and settings.jump.address == "gate" and settings.jump.jump is None


def test_gateways_in_a_circle_are_told(write: Write) -> None:
    write("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(FleetError, match="is circular"):
        settings_for(host("a"))


@pytest.mark.parametrize(
    "line", ["Port many", 'Host "unclosed', "ProxyJump me@gate:abc", 'Include "a', 'UserKnownHostsFile "a']
)
def test_a_file_that_cannot_be_understood_is_told(write: Write, line: str) -> None:
    write(line)
    with pytest.raises(FleetError, match="ssh/config"):
        settings_for(host())


def test_a_host_key_alias_is_the_name_in_known_hosts(write: Write) -> None:
    write("Host spark\n  HostKeyAlias Spark-One\n  Port 99\n")
    assert settings_for(host()).known_as == "spark-one"


# With real hosts


@pytest.fixture
def configured(bed: Bed) -> Iterator[Path]:
    """The client's ~/.ssh/config, put back as it was afterwards."""
    path = bed.home / ".ssh/config"
    before = path.read_text()
    yield path
    path.write_text(before)


def test_a_host_behind_a_gateway_is_reached_through_it(bed: Bed, configured: Path) -> None:
    bed.need_links()
    spark, mac = bed.hosts["dgx-spark-1"], bed.hosts["mac-studio-1"]
    configured.write_text(f"Host {spark.address}\n  ProxyJump {mac.user}@{mac.address}\n  User {spark.user}\n")
    machine = SSHMachine(bed.host("dgx-spark-1"))
    try:
        result = machine.run(["sh", "-c", 'echo "$SSH_CONNECTION"; hostname'])
        assert result.stdout.split()[0] == mac.address and result.stdout.endswith("dgx-spark-1\n")
        assert machine.run(["echo", "again"]).stdout == "again\n"
    finally:
        machine.close()


def test_the_key_of_a_gateway_is_checked_too(bed: Bed, configured: Path) -> None:
    bed.need_links()
    spark, mac = bed.hosts["dgx-spark-1"], bed.hosts["mac-studio-1"]
    configured.write_text(
        f"Host {spark.address}\n  ProxyJump {mac.user}@{mac.address}\n  User {spark.user}\n"
        f"Host {mac.address}\n  UserKnownHostsFile /dev/null\n"
    )
    with pytest.raises(HostKeyRefused, match=f"the host key of {re.escape(mac.address)} is unknown"):
        SSHMachine(bed.host("dgx-spark-1")).run(["true"])


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty ssh-agent."""
    socket = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL) as process:
        while not socket.exists():
            assert process.poll() is None
            os.sched_yield()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        yield
        process.terminate()


def test_the_agents_keys_are_used_and_identities_only_holds_them_back(
    bed: Bed, agent: None, tmp_path: Path, configured: Path
) -> None:
    held = tmp_path / "held"
    shutil.copy(bed.home / ".ssh/id_ed25519", held)
    subprocess.run(["ssh-add", "-q", held], check=True, capture_output=True)
    held.unlink()
    elsewhere = f"IdentityFile {tmp_path}/none\n"
    before = configured.read_text()
    machine = SSHMachine(bed.host("dgx-spark-1"))
    configured.write_text(elsewhere + before)
    assert machine.run(["true"]).ok
    machine.close()
    configured.write_text(elsewhere + "IdentitiesOnly yes\n" + before)
    with pytest.raises(LoginRefused, match="there is no private key to try"):
        SSHMachine(bed.host("dgx-spark-1")).run(["true"])


def test_a_key_with_a_passphrase_works_through_the_agent(bed: Bed, agent: None, tmp_path: Path) -> None:
    key = tmp_path / "key"
    shutil.copy(bed.home / ".ssh/id_ed25519", key)
    subprocess.run(["ssh-add", "-q", key], check=True, capture_output=True)
    shutil.copy(bed.home / ".ssh/id_ed25519.pub", tmp_path / "key.pub")
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", key], check=True, capture_output=True)
    machine = SSHMachine(replace(bed.host("dgx-spark-1"), key=str(key)))
    assert machine.run(["true"]).ok
    machine.close()


def test_a_user_without_a_name_has_to_give_one(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    write("")
    monkeypatch.setattr(getpass, "getuser", no_name)
    with pytest.raises(FleetError, match="this user has no name to log in with"):
        settings_for(host("spark"))
