"""Options with values that no request may have, with the real client and no fleet."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from disagg.cli.chat import command
from disagg.errors import RequestError
from disagg.token import TOKEN_FILE_VARIABLE
from tests.cli.commandline import run, write_fleet


def fleet_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hosts.toml of a fleet with a token."""
    token = folder / "token"
    token.write_text("test-token-of-sixteen-or-more")
    token.chmod(0o600)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(token))
    return write_fleet(folder, ("tiny", "other"))


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "0", "-1", "86401"])
@pytest.mark.parametrize("models", [("tiny",), ("tiny", "other")])
def test_a_timeout_that_no_request_may_have_is_an_error_with_its_range(
    value: str,
    models: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = fleet_file(tmp_path, monkeypatch)
    chosen = [word for model in models for word in ("-m", model)]
    assert run("--config", path, "generate", *chosen, f"--timeout={value}", "hi") == RequestError.exit_code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert err.startswith(f"error: --timeout: over 0, at most 86,400 (got {float(value)})\n hint: see")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("option", "value"), [("timeout", "inf"), ("timeout", "0"), ("temperature", "nan")])
def test_chat_refuses_an_option_before_the_first_message(
    option: str,
    value: str,
    terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def talk(*_: object) -> None:
        raise AssertionError("the conversation has begun")

    monkeypatch.setattr(command, "_talk", talk)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal)
    monkeypatch.setattr(command, "stdout", lambda: Console(force_terminal=True))
    path = fleet_file(tmp_path, monkeypatch)
    assert run("--config", path, "chat", "-m", "tiny", f"--{option}={value}") == RequestError.exit_code
    assert f"error: --{option}: " in capsys.readouterr().err
