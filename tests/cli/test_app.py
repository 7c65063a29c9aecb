from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import disagg
from disagg.cli import app
from disagg.cli.program import OTHER_WORDS, SOURCES
from disagg.errors import ConfigError, Overloaded, ServerUnavailable
from tests.cli.commandline import ROOT, run, write_fleet

HEAVY = ("torch", "transformers", "mlx", "mlx_lm", "numpy", "fabric", "starlette")


def test_commands_that_need_no_engine_import_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process runs them all: what one of them imports, the later ones have, too."""
    path = write_fleet(tmp_path)
    text = path.read_text().replace('connector = "local"', 'connector = "local"\npython = "/no/such/python"')
    path.write_text(text)
    monkeypatch.setenv("DISAGG_CONFIG", str(path))
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.chdir(tmp_path)
    commands = {"--help": 0, "start": 1, "status": 3, "stop": 0, "init --config new.toml": 0}
    script = (
        "import json, sys\nfrom disagg.cli.app import main\n"
        "for command in sys.argv[1:]:\n"
        "    try:\n        code = 0\n        main(command.split())\n"
        "    except SystemExit as end:\n        code = end.code or 0\n"
        "    sys.stderr.write('\\nran ' + json.dumps([command, code, [*sys.modules]]) + '\\n')\n"
    )
    argv = [sys.executable, "-c", script, *commands]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    ran = [json.loads(line.removeprefix("ran ")) for line in done.stderr.splitlines() if line.startswith("ran ")]
    assert {command: code for command, code, _ in ran} == commands
    for command, _, modules in ran:
        assert "disagg.cli.app" in modules and not set(modules) & set(HEAVY), command
        if command == "--help":
            assert "httpx" not in modules and "rich.live" not in modules


def command_names(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
    """Of all commands below this one."""
    for name, command in group.commands.items():
        yield from command_names(command, *before, name) if hasattr(command, "commands") else [(*before, name)]


def test_on_80_columns_the_help_of_every_option_has_a_column_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = {}
    for words in command_names(typer.main.get_command(app.app)):
        assert run(*words, "--help") == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "Show this message" in line)
        if (columns := 78 - line.index("Show this")) < 25:
            narrow[" ".join(words)] = columns
    assert not narrow


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("bad", "fix it"), 2), (Overloaded("full"), 3), (ServerUnavailable("gone"), 4)]
)
def test_an_error_is_one_message_on_stderr_with_its_exit_code(
    error: Any, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(app, "invoke", fail)
    assert run("anything") == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert err == f"error: {error.message}\n" + (f" hint: {error.hint}\n" if error.hint else "")


def test_markup_in_an_error_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise ConfigError("hosts.toml: [hosts.a] is wrong [bold]")

    monkeypatch.setattr(app, "invoke", fail)
    run("anything")
    assert "[hosts.a] is wrong [bold]" in capsys.readouterr().err


def test_an_interruption_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "invoke", interrupted)
    assert run("anything") == 130


@pytest.mark.parametrize("arguments", [["frobnicate"], ["generate", "--max-tokens", "0", "x"], ["--nonsense"]])
def test_a_wrong_command_line_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"disagg {disagg.__version__}\n"


def test_a_missing_file_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("status") == 2
    assert "there is no hosts.toml" in capsys.readouterr().err
    assert run("--config", "nope.toml", "status") == 2
    assert "there is no nope.toml" in capsys.readouterr().err


def test_a_malformed_file_exits_2_with_line_and_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts.toml").write_text("[fleet\n")
    assert run("--config", tmp_path / "hosts.toml", "status") == 2
    assert "hosts.toml:1:" in capsys.readouterr().err


def test_output_into_a_closed_pipe_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"{shlex.quote(sys.executable)} -m disagg status --json --host prefill-1 | true"
    monkeypatch.setenv("DISAGG_CONFIG", str(write_fleet(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", ROOT)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("rest", [["--json"], [], ["--help"]])
def test_a_closed_pipe_exits_as_other_unix_tools_do(rest: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "disagg", "status", "--config", str(write_fleet(tmp_path)), *rest]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, env=environment, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("words", [["status", "--config"], ["verify"], ["init", "--config"]])
def test_a_path_that_is_too_long_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words, "a" * 5000) == 2
    assert capsys.readouterr().err == f"error: {'a' * 63}…: File name too long\n hint: name a shorter path\n"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left", "some file"), OSError(errno.ENAMETOOLONG, "File name too long")]
)
def test_a_system_error_of_no_path_that_was_given_stays_a_fault(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(app, "invoke", fail)
    with pytest.raises(OSError, match=str(error.strerror)):
        app.main(["anything"])


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["exec", "--", "tool", "--json"]])
def test_ctrl_c_during_the_imports_ends_without_a_traceback(words: list[str]) -> None:
    script = (
        "import os, signal, sys\nimport disagg.cli\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\ndisagg.cli.main()"
    )
    argv = [sys.executable, "-c", script, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130 and done.stderr == "interrupted\n"
    if app.wants_json(words):
        assert json.loads(done.stdout)["error"]["code"] == "Cancelled"
    else:
        assert done.stdout == ""


def test_what_is_imported_before_ctrl_c_is_handled_is_small() -> None:
    script = "import sys; before = set(sys.modules); import disagg.cli; print(*set(sys.modules) - before)"
    argv = [sys.executable, "-S", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, cwd=Path(__file__).parents[2])
    slow = {"contextlib", "hashlib", "inspect", "logging", "pathlib", "re", "threading", "typing", "disagg.version"}
    assert "disagg.cli" in done.stdout.split() and not slow & set(done.stdout.split())


ENDING = """
import atexit, logging, logging.handlers, os, threading, typer
import disagg.cli
from disagg.cli import app
from disagg.cli.program import OTHER_WORDS, SOURCES

log = logging.handlers.MemoryHandler(10, target=logging.StreamHandler())

@app.app.command()
def leave(kept: str):
    print("the answer")
    log.handle(logging.makeLogRecord({"msg": "a line of the log", "levelno": 20}))
    if kept == "thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    atexit.register(os.write, 1, b"the interpreter's shutdown\\n")
    raise typer.Exit(4)

disagg.cli.main()
"""


@pytest.mark.parametrize(("kept", "shut_down"), [("thread", ""), ("nothing", "the interpreter's shutdown\n")])
def test_a_thread_that_still_runs_does_not_meet_the_interpreters_shutdown(kept: str, shut_down: str) -> None:
    argv = [sys.executable, "-c", ENDING, "leave", kept]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (4, f"the answer\n{shut_down}"), done.stderr
    assert done.stderr == "a line of the log\n"


def test_the_program_is_the_entry_point_that_catches_it() -> None:
    with (Path(ROOT) / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["scripts"] == {"disagg": "disagg.cli:main"}


def test_help_texts_are_filled_and_name_arguments_as_the_usage_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("deploy", "--help") == 0
    assert "host keeps its current release, and the next run goes on" in capsys.readouterr().out
    for command, usage in (
        (["ssh"], "disagg ssh [OPTIONS] {HOST} [CMD]..."),
        (["exec"], "disagg exec [OPTIONS] {CMD}..."),
        (["trust"], "disagg trust [OPTIONS] [HOST]..."),
        (["models", "pull"], "disagg models pull [OPTIONS] [MODEL]..."),
        (["generate"], "disagg generate [OPTIONS] [MODEL] [PROMPT]"),
    ):
        assert run(*command, "--help") == 0
        assert usage in capsys.readouterr().out


def test_the_commands_are_listed_in_the_order_of_a_first_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z]+) ", shown, re.MULTILINE)
    journey = ["demo", "init", "deploy", "start", "status"]
    assert [name for name in listed if name in journey] == journey
    further = [
        name for names in re.findall(r"^  [A-Z]\w+ \w+  +(.*)", shown, re.MULTILINE) for name in names.split(", ")
    ]
    assert sorted(name.strip() for name in [*listed, *further]) == sorted(SOURCES)
    assert len(shown.splitlines()) < 24 and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(("words", "stand_for"), OTHER_WORDS.items())
def test_other_words_for_a_command_are_understood_and_not_listed(
    words: str, stand_for: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, "--help") == 0
    (command, *_) = stand_for
    assert f"Usage: disagg {command}" in capsys.readouterr().out
    assert words not in typer.main.get_command(app.app).commands  # type: ignore[attr-defined]  # of a group


def test_gateway_alone_starts_no_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gateway") == 0
    assert "Usage: disagg serve" in capsys.readouterr().out


def test_a_mistyped_command_is_told_what_it_may_have_been(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("statsu") == 2
    assert "no such command 'statsu'. Did you mean 'status'" in capsys.readouterr().err


def test_options_of_notifying_need_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_fleet(tmp_path)
    for words, said in (
        (("status", "--run", "true"), "--run needs --notify"),
        (("status", "--watch", "--notify"), "--watch and --notify cannot be combined"),
        (("uninstall", "--all"), "--all needs --unused"),
        (("serve", "--port", 0, "endpoints"), "--port is an option of the gateway, not of `disagg serve endpoints`"),
    ):
        assert run("--config", path, *words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--config", "nope.toml", "status"], ["status", "--config", "nope.toml"]])
def test_config_is_read_before_and_after_the_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert "there is no nope.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["status", "--json", "--config", "nope.toml"], "ConfigError", "there is no nope.toml"),
        (["status", "--json", "--nonsense"], "UsageError", "no such option: --nonsense"),
        (["nonsense", "--json"], "UsageError", "no such command 'nonsense'"),
        (["generate", "--json", "--top-p", "0", "x"], "UsageError", "--top-p: over 0, at most 1 (got 0.0)"),
        (["generate", "--json", "--temperature", "11", "x"], "UsageError", "--temperature: 0 to 10 (got 11.0)"),
        (["bench", "--json", "--config", "nope.toml"], "ConfigError", "there is no nope.toml"),
        (["bench", "--json", "--xyzzy"], "UsageError", "no such option: --xyzzy"),
    ],
)
def test_json_prints_one_object_for_errors_too(
    words: list[str], code: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert (error["code"], error["message"]) == (code, message) and error["hint"]
    assert err.startswith(f"error: {message}\n hint: ")


def test_without_json_an_error_prints_nothing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--output", "figures.json", "--config", "nope.toml") == 2
    assert capsys.readouterr().out == ""
    assert not app.wants_json(["exec", "--", "tool", "--json"])


def test_an_interruption_with_json_is_an_object_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "invoke", interrupted)
    assert run("status", "--json") == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["code"] == "Cancelled" and err == "interrupted\n"


def test_help_states_the_ranges_and_defaults_that_the_servers_apply(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for range_ in ("0 to 10.", "Over 0, at most 1.", "1 to 1,048,576.", "[default: 256]", "0 to 20."):
        assert range_ in text


def test_the_options_in_help_texts_name_no_types_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("", "demo", "generate", "bench", "bench handoff", "bench predict", "verify", "status"):
        assert run(*command.split(), "--help") == 0
        assert not re.findall(r"<(?:bool|int|float|list)\b.*", capsys.readouterr().out), command


def test_every_command_takes_the_shared_options(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("demo", "generate", "bench", "bench link", "models", "models pull", "deploy", "status", "logs"):
        assert run(*command.split(), "--help") == 0
        text = capsys.readouterr().out
        assert "--config" in text and "--quiet" in text
