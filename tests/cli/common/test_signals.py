"""What ends a command from outside, in a process of its own: a signal in this one would end pytest."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

WAITING = """
import signal, sys, time
from disagg.cli import app

@app.app.command()
def wait():
    try:
        print("waiting", flush=True)
        time.sleep(60)
    finally:
        print("given back", flush=True)

for name in sys.argv[1:]:
    signal.signal(signal.Signals[name], signal.SIG_IGN)
app.main(["wait"])
"""


def waiting(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WAITING, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    return process


@pytest.mark.usefixtures("a_hangup_ends_programs")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_command_that_is_ended_gives_back_what_it_holds_and_its_code_tells_the_signal(number: int, code: int) -> None:
    process = waiting()
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert (said, process.returncode) == ("given back\n", code)


def test_a_closed_terminal_does_not_end_a_command_under_nohup() -> None:
    process = waiting("SIGHUP")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)  # a signal that is ignored leaves nothing to wait for
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=60)[0], process.returncode) == ("given back\n", 143)


def test_a_background_job_of_a_script_which_ignores_ctrl_c_is_ended_by_sigterm() -> None:
    process = waiting("SIGINT")
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=60)[0], process.returncode) == ("given back\n", 143)
