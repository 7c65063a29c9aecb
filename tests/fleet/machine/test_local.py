"""This machine through the same interface as the others."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import Cancelled, CommandFailed, FleetError
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import Invocation, Payload, program, script
from disagg.fleet.machine.upload import put_tree
from tests.deadlines import LONG_S, ends_by_itself, wait_until

VALUE = "a 'b' \"c\" ; $(id) `id`\n-x \\ ünï\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalMachine]:
    monkeypatch.setenv("HOME", str(tmp_path))
    machine = LocalMachine("here")
    yield machine
    machine.close()


SLEEP = f"sleep {50_000 + os.getpid()}"
"""In no other run of the tests on this machine."""


def running(word: str) -> bool:
    for process in psutil.process_iter():
        try:
            if word in " ".join(process.cmdline()):
                return True
        except psutil.Error:
            continue
    return False


def test_a_command_has_code_streams_environment_and_hostile_values(here: LocalMachine) -> None:
    script = 'printf "%s|" "$@" "$V"; cat; echo err >&2; exit 3'
    result = here.run([VALUE], script=script, environment={"V": VALUE})
    assert (result.code, result.stdout, result.stderr) == (3, f"{VALUE}|{VALUE}|", "err\n")


def test_commands_begin_in_the_home_folder(here: LocalMachine, tmp_path: Path) -> None:
    assert here.run(["pwd"]).stdout == f"{tmp_path}\n"


def test_files_and_trees_round_trip(here: LocalMachine, tmp_path: Path) -> None:
    here.write("~/conf/token", VALUE.encode(), mode=0o600)
    assert here.read("conf/token") == VALUE.encode()
    assert (tmp_path / "conf/token").stat().st_mode & 0o777 == 0o600
    big = os.urandom(1 << 20)
    put_tree(here, {"a/b": b"x", "big": big}, "tree")
    assert here.read("tree/big", limit=2 << 20) == big
    assert here.read("tree/none") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "tree"]


def test_a_file_is_private_from_the_moment_it_exists(
    here: LocalMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    chmod = tools / "chmod"  # looks at the file just before its mode is set
    chmod.write_text(f'#!/bin/sh\nls -l "$2" | cut -c1-10 >{tmp_path}/before\nexec /bin/chmod "$@"\n')
    chmod.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    here.write("public", b"x", mode=0o644)
    assert (tmp_path / "before").read_text() == "-rw-------\n"
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["write.sh", "put_tree.sh"])
def test_content_that_ends_early_changes_nothing(here: LocalMachine, tmp_path: Path, name: str) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("file"))
    content = whole.getvalue()
    for length in (*range(0, len(content), 20), len(content) - 1):
        argv = ("target", "644", str(len(content)))
        sent = program(argv, script("path.sh", "beside.sh", name), takes_input=True)
        payload = Payload(io.BytesIO(content[:length]))
        code = here.execute(Invocation(sent, LONG_S, payload))
        assert code != 0 and list(tmp_path.iterdir()) == [], f"{length} of {len(content)} bytes"


def test_what_cannot_be_written_is_told(here: LocalMachine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandFailed, match=r"here: cannot write file/below: .*(Not a directory|File exists)"):
        here.write("file/below", b"x" * 100_000)


def test_a_timeout_kills_the_whole_process_group(here: LocalMachine) -> None:
    with ends_by_itself(), pytest.raises(FleetError, match=r"did not end within 0\.3 s and was killed"):
        here.run([], script=f"(trap '' TERM; {SLEEP}) | {SLEEP}", timeout=0.3)
    wait_until(lambda: not running(SLEEP))


def test_closing_from_another_thread_ends_what_runs(here: LocalMachine) -> None:
    def close_midway() -> None:
        wait_until(lambda: running(SLEEP))
        here.close()

    closer = threading.Thread(target=close_midway)
    closer.start()
    assert here.run(SLEEP.split()).code == 128 + signal.SIGTERM
    closer.join()


def test_a_process_left_in_the_background_does_not_hold_the_command(here: LocalMachine) -> None:
    began = time.monotonic()
    result = here.run([], script=f"sleep {LONG_S} & echo $!")
    assert time.monotonic() - began < LONG_S
    os.kill(int(result.stdout), signal.SIGKILL)


def test_lines_are_reported_as_they_come(here: LocalMachine) -> None:
    lines: list[str] = []
    here.run([], script="echo one; echo two; printf three", on_line=lines.append)
    assert lines == ["one", "two", "three"]


def test_an_interruption_ends_local_commands_too() -> None:
    host = Host("here", "127.0.0.1", ("prefill",), "tiny", EngineOptions("transformers"), 8000, connector="local")
    errors: list[Cancelled] = []

    def action(host: Host) -> None:
        try:
            machine_for(host).run(SLEEP.split())
        except Cancelled as error:
            errors.append(error)
            raise

    def interrupt() -> None:
        wait_until(lambda: running(SLEEP))
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        each([host], action)
    interrupter.join()
    assert len(errors) == 1
    wait_until(lambda: not running(SLEEP))
