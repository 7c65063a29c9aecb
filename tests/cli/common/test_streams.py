"""Commands whose standard streams are closed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commandline import ROOT, run, write_fleet


def test_a_closed_stdin_is_an_empty_prompt_and_answers_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, reason in (
        (("generate", "tiny"), "the prompt from stdin is empty"),
        (("chat",), "the prompt from stdin is empty"),
        (("uninstall",), "stdin is not a terminal"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", None)
            path = write_fleet(tmp_path, connector="ssh" if command == ("uninstall",) else "local")
            assert run("--config", path, *command) == 2
            sys.stdin.close()
        assert reason in capsys.readouterr().err


def test_a_closed_stdout_discards_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert run("--version") == 0
        assert not sys.stdout.isatty() and sys.stdout.write("text of an answer") > 0
        sys.stdout.close()


def test_no_file_that_a_command_opens_has_the_number_of_a_closed_stream() -> None:
    script = (
        "import os, sys\nfrom disagg.cli.common.process import open_closed_streams\nopen_closed_streams()\n"
        "sys.stderr.write(' '.join(os.readlink(f'/proc/self/fd/{number}') for number in (0, 1)))"
    )
    line = f'cd {shlex.quote(ROOT)} && exec {shlex.quote(sys.executable)} -c "$0" <&- >&-'
    done = subprocess.run(["sh", "-c", line, script], stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stderr == "/dev/null /dev/null"


def test_a_character_that_the_encoding_of_stdout_does_not_have_is_replaced(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "disagg", "status", "--config", str(write_fleet(tmp_path))]
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(argv, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, b"")
    assert "? disagg start" in done.stdout.decode("latin-1")


@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_marks_stay_apart_in_an_encoding_that_does_not_have_them(locale: dict[str, str]) -> None:
    begin = "from disagg.cli.common.process import replace_what_has_no_code as begin\nbegin()\n"
    script = f"{begin}print('\\u2714 \\u2718 \\xb7 \\u2192')"
    environment = {**os.environ, "PYTHONPATH": ROOT, "LC_ALL": "C", **locale}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, timeout=60, check=True)
    assert done.stdout == b"+ x - ?\n"
