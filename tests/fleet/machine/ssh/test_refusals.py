"""What sshd and private keys are refused for, in words."""

from __future__ import annotations

from pathlib import Path

import paramiko
import pytest

from disagg.errors import HostUnreachable
from disagg.fleet.machine.ssh.connection import Keys
from disagg.fleet.machine.ssh.errors import explain
from disagg.fleet.machine.ssh.settings import HopSettings


def settings(*identities: Path) -> HopSettings:
    return HopSettings("10.0.0.3", 2222, "ubuntu", "spark", identities, True, ())


def test_a_second_session_that_sshd_refuses_names_max_sessions() -> None:
    error = explain("spark", settings(), paramiko.ChannelException(2, "Connect failed"))
    assert isinstance(error, HostUnreachable) and "too few sessions on one connection" in error.message
    assert "MaxSessions 10" in error.hint and "10.0.0.3:2222" in error.message


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_private_key_that_others_can_read_is_not_used(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "id_rsa"
    paramiko.RSAKey.generate(1024).write_private_key_file(str(path))
    keys = Keys(settings(path))
    assert keys._load(path) is not None and keys.unusable == []
    path.chmod(mode)
    assert keys._load(path) is None
    assert keys.unusable == [f"others can read {path}: chmod 600 {path}"]
