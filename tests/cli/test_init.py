"""`disagg init` as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from disagg.cli.init import init
from disagg.config import load
from disagg.errors import ConfigError, UsageError

SERVERS = {
    "prefill_servers": [{"host": "10.0.0.1", "port": 8000, "model": "gpt-oss:120b", "name": "spark", "rack": 4}],
    "decode_servers": [{"host": "10.0.0.2", "port": 8001, "model": "gpt-oss:120b"}],
}

QUICKSTART = Path(__file__).parents[2] / "docs/quickstart.md"
NEXT = "Then run: disagg trust, disagg deploy, disagg models pull, disagg start"


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """An application of this one command, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(init)
    return app


def test_a_starter_file_is_written_that_loads(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert result.stdout == f"Wrote hosts.toml. Put your machines' addresses in it.\n{NEXT}\n"
    assert load(Path("hosts.toml")).hosts


def test_the_next_commands_are_those_of_the_quickstart() -> None:
    _, _, after = QUICKSTART.read_text().partition("disagg init ")
    commands = [line.strip() for line in after.partition("```")[0].splitlines()[1:]]
    assert f"Then run: {', '.join(filter(None, commands))}" == NEXT


def test_path_says_where(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["--path", "other.toml"]).exit_code == 0
    assert [path.name for path in Path().iterdir()] == ["other.toml"]


def test_a_file_that_is_there_is_overwritten_only_by_force(app: typer.Typer) -> None:
    Path("hosts.toml").write_text("mine")
    assert isinstance(CliRunner().invoke(app, []).exception, UsageError)
    assert Path("hosts.toml").read_text() == "mine"
    assert CliRunner().invoke(app, ["--force"]).exit_code == 0
    assert load(Path("hosts.toml")).hosts


def test_json_is_converted_and_what_was_left_out_is_said_on_stderr(app: typer.Typer) -> None:
    Path("s.json").write_text(json.dumps(SERVERS))
    result = CliRunner().invoke(app, ["--from-json", "s.json"])
    assert result.exit_code == 0
    assert result.stdout == f"Wrote hosts.toml. Look at the lines marked CHECK.\n{NEXT}\n"
    assert result.stderr == "s.json: prefill_servers[0].rack: unknown, ignored\n"
    assert list(load(Path("hosts.toml")).hosts) == ["spark", "decode-1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "s.json: no such file"), (b"{", "s.json:1:2: not valid JSON"), (b"\xff", "s.json:1:1: not UTF-8")],
)
def test_json_that_cannot_be_read_is_an_error_and_writes_nothing(
    app: typer.Typer, content: bytes | None, message: str
) -> None:
    if content is not None:
        Path("s.json").write_bytes(content)
    error = CliRunner().invoke(app, ["--from-json", "s.json"]).exception
    assert isinstance(error, ConfigError)
    assert error.message.startswith(message)
    assert "init" not in error.hint
    assert not Path("hosts.toml").exists()


def test_the_command_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "mlx", "mlx_lm", "fabric", "paramiko", "numpy", "httpx"}
    script = "import sys, disagg.cli.init; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not heavy & set(loaded.stdout.split())
