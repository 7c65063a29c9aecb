"""`disagg generate` in a process of its own, which a signal ends or whose terminal is looked at."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.commandline import write_fleet

SIGNALLED = str(Path(__file__).with_name("signalled.py"))


def test_an_interruption_ends_the_stream_and_exits_130(tmp_path: Path) -> None:
    config = write_fleet(tmp_path)
    command = [sys.executable, SIGNALLED, str(signal.SIGINT.value), str(tmp_path / "pids"), "--config", str(config)]
    done = subprocess.run([*command, "generate", "x"], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert "closed tiny" in done.stderr and "Traceback" not in done.stderr


def test_the_terminal_echoes_no_ctrl_c_into_panels_and_nothing_typed_into_a_conversation_and_is_restored() -> None:
    script = """
import sys, termios
from disagg.cli.common.context import stdout
from disagg.cli.views.stream import Panels, without_echo
from disagg.inference.several import ModelAnswer

def echoes():
    return [bool(termios.tcgetattr(1)[3] & mode) for mode in (termios.ECHO, termios.ECHOCTL)]

before = echoes()
with Panels([ModelAnswer("a"), ModelAnswer("b")], "p", stdout()):
    panels = echoes()
with without_echo(stdout(), typed=True):
    conversation = echoes()
sys.exit([before, panels, conversation, echoes()] != [[True, True], [True, False], [False, False], [True, True]])
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", script])
    with suppress(OSError):  # Linux ends a terminal without readers this way
        while os.read(terminal, 100_000):
            pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_during_two_models_keeps_both_partial_answers(tmp_path: Path, as_json: bool) -> None:
    config = write_fleet(tmp_path, ("tiny", "other"))
    command = [sys.executable, SIGNALLED, str(signal.SIGINT.value), str(tmp_path / "pids"), "--config", str(config)]
    words = ["generate", "-m", "tiny", "-m", "other", *(["--json"] if as_json else []), "x"]
    done = subprocess.run([*command, *words], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stderr.endswith("interrupted\n"), done.stderr
    if as_json:
        results = json.loads(done.stdout)["results"]
        assert [(one["text"], one["error"]["code"]) for one in results] == [
            ("begun by tiny", "Cancelled"),
            ("begun by other", "Cancelled"),
        ]
    else:
        assert "== tiny (incomplete) ==\nbegun by tiny\n" in done.stdout
        assert "== other (incomplete) ==\nbegun by other\n" in done.stdout
