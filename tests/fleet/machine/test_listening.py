"""A program that prints its port, run in the background while the caller uses that port."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from disagg.errors import FleetError
from disagg.fleet.machine.listening import OnLine, listening
from disagg.fleet.machine.local import LocalMachine
from tests.deadlines import wait_until

SERVER = """
import json, socket, time
listener = socket.create_server(("127.0.0.1", 0))
print("a greeting", flush=True)
print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
connection, _ = listener.accept()
connection.sendall(b"hello")
connection.close()
"""
ENDLESS = SERVER + "time.sleep(6437)\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalMachine]:
    monkeypatch.setenv("HOME", str(tmp_path))
    machine = LocalMachine("here")
    yield machine
    machine.close()


def greeting(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        return connection.recv(5)


def running(word: str) -> bool:
    return any(word in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize("program", [SERVER, ENDLESS])
def test_its_port_can_be_used_and_nothing_runs_on_afterwards(machine: LocalMachine, program: str) -> None:
    def run(on_line: OnLine) -> None:
        machine.run([sys.executable, "-c", program], on_line=on_line, timeout=60)

    with listening(machine, run, start_timeout=30, end_timeout=0.5) as port:
        assert greeting(port) == b"hello"
    wait_until(lambda: not running("sleep(6437)"))


def test_it_is_killed_at_once_if_the_block_raises(machine: LocalMachine) -> None:
    def run(on_line: OnLine) -> None:
        machine.run([sys.executable, "-c", ENDLESS], on_line=on_line, timeout=60)

    with pytest.raises(ZeroDivisionError), listening(machine, run, start_timeout=30, end_timeout=60):
        raise ZeroDivisionError
    wait_until(lambda: not running("sleep(6437)"))


def test_an_interruption_of_the_wait_for_its_end_kills_it(
    machine: LocalMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InterruptedThread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            if timeout == 60:
                raise KeyboardInterrupt
            super().join(timeout)

    def run(on_line: OnLine) -> None:
        machine.run([sys.executable, "-c", ENDLESS], on_line=on_line, timeout=60)

    monkeypatch.setattr("disagg.fleet.machine.listening.Thread", InterruptedThread)
    with pytest.raises(KeyboardInterrupt), listening(machine, run, start_timeout=30, end_timeout=60) as port:
        assert greeting(port) == b"hello"
    wait_until(lambda: not running("sleep(6437)"))


def test_a_failure_before_the_port_is_raised_to_the_caller(machine: LocalMachine) -> None:
    def fail(on_line: OnLine) -> None:
        raise FleetError("here: no python")

    with pytest.raises(FleetError, match="no python"), listening(machine, fail, start_timeout=30):
        pass
    with (
        pytest.raises(FleetError, match="ended before it listened"),
        listening(machine, lambda on_line: machine.run(["true"]), start_timeout=30),
    ):
        pass
    with (
        pytest.raises(FleetError, match=r"listens on no port after 0\.5 s"),
        listening(machine, lambda on_line: machine.run(["sleep", "30"]), start_timeout=0.5),
    ):
        pass
