"""`disagg bench --simulate`: real servers on this machine, whose engines simulate their machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.commandline import ROOT, run
from tests.deadlines import wait_until
from tests.simulated import write_simulated
from tests.testbed.bed import HOSTS_TOML

SMALL = ["--prompt-tokens", "16", "--output-tokens", "2", "-n", "2", "--warmup", "0"]
LONG = ["--prompt-tokens", "64", "--output-tokens", "4000", "-n", "50", "--warmup", "0"]


def servers(folder: Path) -> list[int]:
    """The processes whose hosts.toml lies below `folder`, where TMPDIR is."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "disagg.servers" in words and any(word.startswith(str(folder)) for word in words):
            found.append(process.pid)
    return found


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made in this test. No server of it is left at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    for pid in servers(folder):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def started(temporary: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `disagg bench --simulate ARGUMENTS` as a process of its own; its stderr goes to tmp_path/stderr."""
    path, processes = write_simulated(tmp_path), []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "disagg", "--config", str(path), "bench", "--simulate", *arguments]
        environment = {**os.environ, "PYTHONPATH": ROOT}
        with (tmp_path / "stderr").open("w") as stderr:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_shipped_fleet_is_simulated_here_and_everything_says_so(
    temporary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--output", tmp_path / "r.json", "--report", tmp_path / "r.html"]
    assert run("--config", HOSTS_TOML, "bench", "--simulate", "-m", "qwen", *SMALL, *files) == 0
    out, err = capsys.readouterr()
    body, page = json.loads((tmp_path / "r.json").read_text()), (tmp_path / "r.html").read_text()
    machines = {"mac-studio-2": "m4-max", "dgx-spark-1": "dgx-spark"}
    assert (body["simulated"], body["simulated_machines"]) == (True, machines)
    assert all(one["simulated"] and one["completed"] == 2 for one in body["results"]) and len(body["results"]) == 4
    assert out.startswith("simulated: qwen3-coder:30b on studio")
    assert "simulated: speedup" in out and "│ simulated: " in out and "No model ran" in out
    assert all("simulated" in line for line in err.splitlines() if not line.startswith("wrote"))
    assert "<title>disagg bench: simulated: " in page and "Simulated: dgx-spark-1 as dgx-spark" in page
    assert '<p class="headline">simulated: ' in page
    assert not servers(temporary) and not list(temporary.iterdir())


def test_other_machines_may_be_simulated(temporary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--prefill-device", "dgx-spark", "--decode-device", "m3-ultra", "--mode", "disaggregated", "--json"]
    assert run("--config", write_simulated(tmp_path), "bench", "--simulate", *SMALL, *devices) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["simulated_machines"] == {"m-decode": "m3-ultra", "m-prefill": "dgx-spark"}


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGINT] * 3, 130),
        ([signal.SIGTERM] * 3, 143),
    ],
)
def test_an_interruption_ends_the_servers_however_often_it_comes(
    signals: Any, code: int, started: Callable[..., subprocess.Popen[str]], temporary: Path, tmp_path: Path
) -> None:
    process = started(*LONG, "--json")
    wait_until(lambda: "simulated: measuring" in (tmp_path / "stderr").read_text(), 60, "the run to begin")
    assert len(servers(temporary)) == 2
    process.send_signal(signals[0])
    for number in signals[1:]:
        wait_until(lambda: "stopping" in (tmp_path / "stderr").read_text(), 30, "the servers to be stopped")
        process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code and not servers(temporary) and not list(temporary.iterdir())
    assert json.loads(out)["stopped"] == "interrupted"
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_a_second_sigterm_on_the_heels_of_the_first_leaves_no_server(
    started: Callable[..., subprocess.Popen[str]], temporary: Path, tmp_path: Path
) -> None:
    process = started(*LONG)
    wait_until(lambda: "simulated: measuring" in (tmp_path / "stderr").read_text(), 60, "the run to begin")
    process.terminate()
    time.sleep(0.005)  # to be in the middle of the run's end, or as near to it as can be seen from here
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143 and not servers(temporary)


def test_a_terminal_that_is_closed_leaves_no_server(temporary: Path, tmp_path: Path) -> None:
    master, slave = os.openpty()
    path = write_simulated(tmp_path)
    command = [sys.executable, "-m", "disagg", "--config", str(path), "bench", "--simulate", *LONG]
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    while b"ETA" not in shown:
        shown += os.read(master, 4096)
    assert len(servers(temporary)) == 2
    os.close(master)
    process.wait(60)
    wait_until(lambda: not servers(temporary), 30, "the servers to end")
    assert not list(temporary.iterdir())


def test_sigterm_while_the_servers_start_ends_them(
    started: Callable[..., subprocess.Popen[str]], temporary: Path, tmp_path: Path
) -> None:
    process = started(*LONG)
    wait_until(lambda: servers(temporary), 60, "a server")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143 and not servers(temporary) and not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill-device", "dgx-spark"], "--prefill-device and --decode-device need --simulate"),
        (["--simulate", "--decode-device", "abacus"], "error: unknown device 'abacus'"),
    ],
)
def test_devices_that_cannot_be_simulated_are_a_usage_error(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", write_simulated(tmp_path), "bench", *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_host_whose_machine_is_unknown_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = HOSTS_TOML.read_text().replace('hardware = "m4-max"\n', "")
    (tmp_path / "hosts.toml").write_text(text)
    assert run("--config", tmp_path / "hosts.toml", "bench", "--simulate", "-m", "qwen") == 2
    assert "the hardware of mac-studio-2" in capsys.readouterr().err
