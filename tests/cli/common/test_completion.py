from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

from disagg.cli.common.completion import join_at_colons
from tests.cli.commandline import ROOT, run
from tests.testbed.bed import HOSTS_TOML


class Complete(Protocol):
    def __call__(self, line: str, **environment: str) -> list[str]:
        """What bash would offer behind this line."""


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complete:
    """Completes lines in this process, whose current folder is `tmp_path`."""
    for name in os.environ:
        if name.startswith("DISAGG"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def offered(line: str, **environment: str) -> list[str]:
        variables = {
            "_DISAGG_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
            **environment,
        }
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            run()
        out, err = capsys.readouterr()
        assert err == ""
        return out.split()

    return offered


def test_host_names_are_offered_behind_host(complete: Complete) -> None:
    there = {"DISAGG_CONFIG": str(HOSTS_TOML)}
    names = ["dgx-spark-1", "dgx-spark-2", "mac-studio-1", "mac-studio-2"]
    assert complete("disagg status --host ", **there) == names
    assert complete("disagg doctor --host mac", **there) == names[2:]
    assert complete("disagg ssh dgx", **there) == names[:2]


def test_models_are_offered_by_alias_and_name(complete: Complete) -> None:
    there = {"DISAGG_CONFIG": str(HOSTS_TOML)}
    assert complete("disagg generate -m q", **there) == ["qwen", "qwen3-coder", "qwen3-coder:30b"]
    assert complete("disagg bench -m gpt", **there) == ["gpt-oss", "gpt-oss:120b"]
    assert complete("disagg models pull gpt", **there) == ["gpt-oss", "gpt-oss:120b"]


def test_config_of_the_command_line_counts(complete: Complete) -> None:
    line = f"disagg --config {shlex.quote(str(HOSTS_TOML))} ssh mac-studio-1"
    assert complete(line, COMP_CWORD="4") == ["mac-studio-1"]


@pytest.mark.parametrize("text", [None, "[hosts\nbroken = ", ""])
def test_a_missing_or_broken_file_offers_nothing_and_says_nothing(
    complete: Complete, tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "hosts.toml").write_text(text)
    assert complete("disagg status --host ") == []


def test_the_script_for_the_shell_can_be_shown(tmp_path: Path) -> None:
    show = shlex.join([sys.executable, "-c", "from disagg.cli.app import main; main()", "--show-completion"])
    argv = ["bash", "-c", f"{show}; exit $?"]  # the shell is the one that it runs in
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and "complete -o default" in done.stdout


def test_completing_loads_no_framework_ssh_or_http(tmp_path: Path) -> None:
    code = (
        "import sys, atexit\n"
        "heavy = ('fabric', 'httpx', 'torch')\n"
        "atexit.register(lambda: sys.stderr.write(' '.join(m for m in heavy if m in sys.modules)))\n"
        "from disagg.cli.app import main\nmain()"
    )
    variables = {
        **os.environ,
        "PYTHONPATH": ROOT,
        "_DISAGG_COMPLETE": "complete_bash",
        "COMP_WORDS": "disagg ssh ",
        "COMP_CWORD": "2",
        "DISAGG_CONFIG": str(HOSTS_TOML),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=variables, timeout=60
    )
    assert done.stderr == "" and "dgx-spark-1" in done.stdout


def complete_as_bash_does(complete: Complete, words: list[str], **environment: str) -> list[str]:
    """Candidates for the last word, of a line that bash has broken into words at its colons too."""
    variables = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1), **environment}
    return complete(" ".join(words), **variables)


def test_names_with_colons_are_completed_though_bash_breaks_words_at_them(complete: Complete) -> None:
    there = {"DISAGG_CONFIG": str(HOSTS_TOML)}
    broken = ["disagg", "generate", "-m", "qwen3-coder", ":"]
    assert complete_as_bash_does(complete, broken, **there) == ["30b"]
    assert complete_as_bash_does(complete, [*broken, "3"], **there) == ["30b"]
    assert complete_as_bash_does(complete, ["disagg", "verify", "gpt-oss", ":", "12"], **there) == ["120b"]


@pytest.mark.parametrize(
    ("words", "position", "joined", "moved"),
    [
        (["a", "b"], 1, ["a", "b"], 1),
        (["a", "q", ":", "3"], 3, ["a", "q:3"], 1),
        (["a", "q", ":", ""], 3, ["a", "q:", ""], 2),
        (["a", "q", ":", "3", "next", "w"], 5, ["a", "q:3", "next", "w"], 3),
    ],
)
def test_words_are_joined_at_colons(words: list[str], position: int, joined: list[str], moved: int) -> None:
    assert join_at_colons(words, position) == (joined, moved)


def test_verify_devices_and_shapes_are_completed(complete: Complete) -> None:
    there = {"DISAGG_CONFIG": str(HOSTS_TOML)}
    assert complete("disagg verify gpt", **there) == ["gpt-oss", "gpt-oss:120b"]
    assert "dgx-spark" in complete("disagg bench predict --prefill-device dgx", **there)
    assert "dgx-spark" in complete("disagg bench --prefill-device dgx", **there)
    assert "qwen3-8b" in complete("disagg bench handoff --shape qwen3-8", **there)


def test_config_behind_the_command_counts_too(complete: Complete) -> None:
    line = f"disagg ssh --config {shlex.quote(str(HOSTS_TOML))} mac-studio-1"
    assert complete(line, COMP_CWORD="4") == ["mac-studio-1"]


def test_a_completion_that_cannot_be_written_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert run("--install-completion", "bash") == 1
    written = capsys.readouterr().err
    assert written.startswith("error: cannot write the completion to ") and "--show-completion prints it" in written
