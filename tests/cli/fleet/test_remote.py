from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg.cli.fleet.remote import Prefixed
from disagg.errors import UsageError
from disagg.fleet.machine.ssh.settings import ssh_command
from tests.cli.commandline import ROOT, run, write_fleet
from tests.deadlines import LONG_S, wait_until
from tests.testbed.bed import HOSTS_TOML, Bed


def test_exec_runs_everywhere_and_marks_each_line_with_its_host(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    bed.need_links()
    assert run("--config", HOSTS_TOML, "exec", "--", "hostname; echo 'a  b'") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"{name:<12} │ {text}" for name in bed.hosts for text in (name, "a  b"))


def test_exec_gives_several_words_to_no_shell(bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            "--config",
            bed.write_hosts_toml(tmp_path / "hosts.toml"),
            "exec",
            "--host",
            "dgx-spark-1",
            "--",
            "echo",
            "$(id)",
            "x  y",
        )
        == 0
    )
    assert capsys.readouterr().out == "dgx-spark-1 │ $(id) x  y\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_exec_passes_no_escape_sequence_on(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None)
    Prefixed(console, ["spark"]).line("spark", "\x1b]0;title\x07 red \x1b[31m")
    assert "\x1b" not in console.file.getvalue() and "\x07" not in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


def test_exec_fails_where_one_host_fails_and_the_others_finish(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    bed.need_links()
    assert (
        run("--config", HOSTS_TOML, "exec", "--role", "decode", "--", "hostname; test $(hostname) = mac-studio-1") == 1
    )
    captured = capsys.readouterr()
    assert "mac-studio-1 │ mac-studio-1" in captured.out and "mac-studio-2 │ mac-studio-2" in captured.out
    assert captured.err == "mac-studio-2: exit code 1\n"


def test_exec_tells_a_host_that_cannot_be_reached_by_its_exit_code(
    bed: Bed, capsys: pytest.CaptureFixture[str]
) -> None:
    bed.need_links()
    with bed.cut("dgx-spark-2"):
        assert run("--config", HOSTS_TOML, "exec", "--role", "prefill", "--", "true") == 4
    assert "dgx-spark-2" in capsys.readouterr().err


def test_exec_ends_what_takes_too_long(bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--config",
        bed.write_hosts_toml(tmp_path / "hosts.toml"),
        "exec",
        "--host",
        "dgx-spark-1",
        "--timeout",
        "1",
        "--",
        "sleep",
        "4327",
    )
    assert run(*argv) == 1
    assert "did not end within 1 s and was killed" in capsys.readouterr().err
    there = bed.hosts["dgx-spark-1"]
    wait_until(lambda: not any(line.startswith("sleep 4327") for line in there.command_lines()))


def test_a_role_that_there_is_not_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", HOSTS_TOML, "exec", "--role", "cook", "--", "true") == 2


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": LONG_S}
    return subprocess.run(argv, check=False, env={**os.environ, "PYTHONPATH": ROOT}, **options)


@pytest.mark.parametrize(("words", "out"), [
    (["echo", "a  b", "$(id -un)"], "a  b $(id -un)\n"),
    (["hostname | tr a-z A-Z"], "MAC-STUDIO-1\n"),
])  # fmt: skip
def test_ssh_reaches_the_host_with_its_user_keys_and_known_hosts(bed: Bed, words: list[str], out: str) -> None:
    bed.need_links()
    argv = [sys.executable, "-m", "disagg", "--config", str(HOSTS_TOML), "ssh", "mac-studio-1", "--", *words]
    done = _run(argv)
    assert (done.returncode, done.stdout) == (0, out), done.stderr


def test_ssh_passes_the_commands_exit_code_on(bed: Bed) -> None:
    bed.need_links()
    argv = [sys.executable, "-m", "disagg", "--config", str(HOSTS_TOML), "ssh", "mac-studio-1", "--", "exit 7"]
    assert _run(argv).returncode == 7


def test_ssh_says_what_hosts_toml_says_before_ssh_config(bed: Bed, tmp_path: Path) -> None:
    from dataclasses import replace

    key = tmp_path / "key"
    host = replace(bed.host("dgx-spark-1"), user="admin", ssh_port=2222, key=str(key))
    argv = ssh_command(host, ["ls", "a b"], terminal=True)
    assert argv[:5] == ["ssh", "-l", "admin", "-p", "2222"]
    assert ["-i", str(key)] == argv[argv.index("-i") : argv.index("-i") + 2] and argv.count("-i") == 1
    assert "IdentitiesOnly=yes" in argv and "-t" in argv
    assert argv[-3:] == ["--", host.address, "ls 'a b'"]


def test_ssh_to_this_machine_is_a_usage_error(bed: Bed) -> None:
    from dataclasses import replace

    with pytest.raises(UsageError, match="is this machine"):
        ssh_command(replace(bed.host("dgx-spark-1"), connector="local"))


def test_a_port_that_speaks_no_ssh_is_one_error_without_a_traceback(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing:

        def hang_up() -> None:
            closing.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        path = write_fleet(tmp_path, connector="ssh")
        port = f'connector = "ssh"\nssh_port = {closing.getsockname()[1]}'
        path.write_text(path.read_text().replace('connector = "ssh"', port))
        argv = [sys.executable, "-m", "disagg", "exec", "--config", str(path), "--host", "decode-1", "--", "true"]
        environment = {**os.environ, "PYTHONPATH": ROOT}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LONG_S, env=environment, check=False)
    assert done.returncode == 4 and done.stderr.startswith("error: decode-1") and "Traceback" not in done.stderr
