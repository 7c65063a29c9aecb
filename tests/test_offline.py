"""Tests do not leave this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.offline import NETWORK_VARIABLE, _is_here
from tests.testbed.bed import HOSTS_TOML

ROOT = Path(__file__).parents[1]
MACHINES = [line.split('"')[1] for line in HOSTS_TOML.read_text().splitlines() if line.startswith("address = ")]
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=10)"

whole_run = pytest.mark.skipif(NETWORK_VARIABLE not in os.environ, reason="may make no network namespace")


@pytest.mark.parametrize("address", [*MACHINES, "192.0.2.1", "2001:db8::1"])
def test_a_connection_to_another_machine_is_refused_at_once(address: str) -> None:
    with pytest.raises(OSError, match=r"may not connect|unreachable|Cannot assign"):
        socket.create_connection((address, 22), timeout=10)


@whole_run
def test_there_is_no_network_but_loopback() -> None:
    assert list(psutil.net_if_stats()) == ["lo"] and psutil.net_if_stats()["lo"].isup


@whole_run
def test_programs_that_tests_start_do_not_leave_either() -> None:
    assert "Network is unreachable" in _said_by(CONNECT)


def test_a_user_gains_no_capability() -> None:
    if os.geteuid() != 0 and sys.platform == "linux":
        assert "CapEff:\t0000000000000000\n" in Path("/proc/self/status").read_text()


def test_where_there_are_no_namespaces_a_process_of_the_tests_is_refused() -> None:
    refuse = "import sys; from tests.offline import _refuse_to_connect; sys.addaudithook(_refuse_to_connect); "
    assert f"a test may not connect to {MACHINES[0]}" in _said_by(refuse + CONNECT)
    assert [_is_here(one) for one in ("127.0.0.1", "::1", "127.8.9.1", "localhost")] == [True] * 4
    assert not any(_is_here(one) for one in (*MACHINES, "::ffff:8.8.8.8", "fe80::1%eth0", "pypi.example"))


def _said_by(code: str) -> str:
    argv = [sys.executable, "-c", code, MACHINES[0]]
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT).stderr
