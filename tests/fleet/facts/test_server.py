from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.config import EngineOptions, Host
from disagg.fleet.facts.server import PortHolder, ServerFacts, read_server_facts
from disagg.fleet.machine.local import LocalMachine
from tests.programs import needs
from tests.values import present


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = tmp_path / ".disagg/hosts/spark"
    (own / "logs").mkdir(parents=True)
    return own


def host(port: int = 1) -> Host:
    return Host("spark", "127.0.0.1", ("prefill",), "tiny", EngineOptions("transformers"), port, service="process")


def seen(port: int = 1) -> ServerFacts:
    return read_server_facts(LocalMachine("spark"), "spark", host(port))


def deploy(own: Path) -> None:
    (own / "releases/0123456789abcdef").mkdir(parents=True)
    (own / "current").symlink_to("releases/0123456789abcdef")


def test_a_machine_without_anything_shows_nothing(home: Path) -> None:
    facts = seen()
    assert (facts.home, facts.current, facts.pid, facts.managers, facts.log) == (str(home.parents[2]), "", None, {}, ())
    assert not facts.supervised and facts.port_conflict is None


@needs("ps")
def test_a_running_server_shows_pid_release_and_token(home: Path) -> None:
    deploy(home)
    (home / "token").write_text("secret\n")
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", f"{home}/releases"], stdin=subprocess.PIPE
    ) as process:
        (home / "serving").write_text(f"{process.pid} fedcba9876543210\n")
        facts = seen()
        process.communicate()
    assert (facts.pid, facts.release, facts.current) == (process.pid, "fedcba9876543210", "0123456789abcdef")
    assert facts.token_digests == (hashlib.sha256(b"secret\n").hexdigest(),)
    assert seen().pid is None, "it has ended"


def test_a_later_process_with_the_same_pid_is_no_server(home: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        (home / "serving").write_text(f"{process.pid} fedcba9876543210\n")
        facts = seen()
        process.communicate()
    assert facts.pid is None


def test_the_supervisors_record_tells_restarts_and_whether_it_lives(home: Path) -> None:
    (home / "supervisor.json").write_text(
        '{"pid": 999999, "child": null, "child_began": "", "restarts": 7, "last_exit": -9}'
    )
    facts = seen()
    assert facts.managers == {"process": False} and facts.restarts == 7 and not facts.supervised


@needs("ss")
def test_another_program_on_the_port_is_named(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        facts = seen(port)
    assert facts.port_conflict is not None
    taken, holder = facts.port_conflict
    assert (taken, holder.pid) == (port, os.getpid()) and str(holder) == f"{holder.name} (pid {os.getpid()})"


@needs("ss")
def test_a_program_of_a_hostile_name_on_the_port_breaks_nothing(home: Path) -> None:
    code = """if True:
        import socket
        open("/proc/self/comm", "w").write("a\\tb c")
        with socket.create_server(("127.0.0.1", 0)) as other:
            print(other.getsockname()[1], flush=True)
            input()
    """
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        facts = seen(int(present(process.stdout).readline()))
        process.communicate("\n")
    assert facts.port_conflict is not None and facts.port_conflict[1] == PortHolder(process.pid, "a b c")


def test_the_servers_own_port_is_no_intruder() -> None:
    assert ServerFacts("/h", pid=7, ports={80: PortHolder(7, "python")}).port_conflict is None
    assert ServerFacts("/h", pid=7, ports={80: PortHolder(None, "")}).port_conflict is None, (
        "the machine does not tell whose it is"
    )
    assert ServerFacts("/h", pid=7, ports={80: PortHolder(8, "x")}).port_conflict == (80, PortHolder(8, "x"))
    assert ServerFacts("/h", ports={80: PortHolder(None, "")}).port_conflict == (80, PortHolder(None, ""))


def test_the_last_50_lines_come_whole_with_tabs_and_signs(home: Path) -> None:
    lines = [f"line {number}" for number in range(60)] + ["tab\there $(no) 'quote' \u2028 ü"]
    (home / "logs/server.log").write_text("\n".join(lines))
    assert seen().log == (*lines[-50:-1], "tab here $(no) 'quote' \u2028 ü")


def test_a_log_that_was_begun_anew_is_read_together_with_the_one_before(home: Path) -> None:
    (home / "logs/server.log.1").write_text("".join(f"old {n}\n" for n in range(60)))
    (home / "logs/server.log").write_text("new\n")
    log = seen().log
    assert len(log) == 50 and log[-2:] == ("old 59", "new")
