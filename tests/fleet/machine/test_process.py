from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.errors import FleetError, ModelError
from disagg.fleet.machine import process as local
from disagg.fleet.services import supervise
from tests.deadlines import ends_by_itself, wait_until
from tests.programs import need
from tests.values import present


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that nobody asked to end."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_end_leaves_a_process_with_another_identity_alone(bystander: subprocess.Popen[bytes]) -> None:
    assert local.end(bystander.pid, "another boot:1", grace_s=1) is False
    with pytest.raises(subprocess.TimeoutExpired):
        bystander.wait(0.5)


def test_an_identity_is_stable_and_a_processs_own(bystander: subprocess.Popen[bytes]) -> None:
    assert local.identity(bystander.pid) == local.identity(bystander.pid) != local.identity(os.getpid())


def test_a_process_that_ended_or_is_a_zombie_has_no_identity(bystander: subprocess.Popen[bytes]) -> None:
    bystander.kill()
    wait_until(lambda: local.identity(bystander.pid) is None)  # not reaped yet: a zombie
    bystander.wait()
    assert local.identity(bystander.pid) is None


def test_a_process_runs_until_the_last_of_its_threads_has_ended() -> None:
    need("ps")
    code = """if True:
        import ctypes, threading, time
        threading.Thread(target=time.sleep, args=(60,)).start()
        print(flush=True)
        ctypes.CDLL(None).pthread_exit(None)
    """
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            present(process.stdout).readline()
            stat = Path(f"/proc/{process.pid}/stat")
            wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
            assert local.identity(process.pid) and supervise._began(process.pid)
        finally:
            process.kill()


def test_ended_servers_leave_no_zombies(tmp_path: Path) -> None:
    pid = local.spawn(python("print('hello')"), tmp_path / "log", {})
    wait_until(lambda: local.identity(pid) is None)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    assert (tmp_path / "log").read_text() == "hello\n"


def test_the_environment_adds_to_this_processes_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "1")
    code = "import os; print(os.environ['INHERITED'], os.environ['ADDED'], os.getcwd())"
    pid = local.spawn(python(code), tmp_path / "log", {"ADDED": "2"})
    wait_until(lambda: local.identity(pid) is None)
    assert (tmp_path / "log").read_text() == f"1 2 {tmp_path}\n"


@pytest.mark.parametrize("own_session", [True, False])
def test_a_process_has_a_group_of_its_own_and_a_session_if_it_is_to_run_on(tmp_path: Path, own_session: bool) -> None:
    pid = local.spawn(python("import time; time.sleep(60)"), tmp_path / "log", {}, own_session=own_session)
    try:
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == (pid if own_session else os.getsid(0))
    finally:
        local.end(pid, present(local.identity(pid)), grace_s=5)
    assert local.identity(pid) is None


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(FleetError, match=r"cannot listen on 192\.0\.2\.1:80.*needs an address of this machine"):
        local.port_taken("192.0.2.1", 80)


def test_a_port_in_time_wait_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()
        client.close()
        assert local.port_taken("127.0.0.1", port)
    assert not local.port_taken("127.0.0.1", port)


def test_run_json_returns_the_object_and_raises_the_described_error() -> None:
    assert local.run_json(python("print('{\"a\": 1}')"), {}, 20) == {"a": 1}
    described = python('print(\'{"error": {"code": "ModelError", "message": "no weights", "hint": ""}}\')')
    with pytest.raises(ModelError, match="no weights"):
        local.run_json(described, {}, 20)


def test_run_json_ends_the_whole_process_group_at_its_timeout(tmp_path: Path) -> None:
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); \
open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    with ends_by_itself(), pytest.raises(FleetError, match="no result after 1 s"):
        local.run_json(python(code), {}, 1)
    wait_until(lambda: local.identity(int((tmp_path / "pid").read_text())) is None)
