"""`disagg init` as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from disagg.cli.init import OFFERS
from disagg.config import load
from tests.cli.commandline import run

SERVERS = {
    "prefill_servers": [{"host": "10.0.0.1", "port": 8000, "model": "gpt-oss:120b", "name": "spark", "rack": 4}],
    "decode_servers": [{"host": "10.0.0.2", "port": 8001, "model": "gpt-oss:120b"}],
}

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "docs/quickstart.md"
NEXT = "Then run: disagg trust, disagg doctor, disagg deploy, disagg models pull, disagg start"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISAGG_CONFIG", raising=False)


def test_a_starter_file_is_written_that_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("init") == 0
    assert capsys.readouterr().out == f"Wrote hosts.toml. Put your machines' addresses in it.\n{NEXT}\n"
    assert load(Path("hosts.toml")).hosts


def test_the_next_commands_are_those_of_the_quickstart() -> None:
    _, _, after = QUICKSTART.read_text().partition("disagg init ")
    lines = [line.strip() for line in after.partition("```")[0].splitlines()[1:]]
    commands = [line for line in lines if line.startswith("disagg")]
    assert f"Then run: {', '.join(commands)}" == NEXT


def test_config_says_where_and_the_output_how_it_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--config", "my other.toml", "init") == 0
    assert [path.name for path in Path().iterdir()] == ["my other.toml"]
    assert f"after: export DISAGG_CONFIG='{tmp_path}/my other.toml'\n" in capsys.readouterr().out


def test_the_environment_says_where(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_CONFIG", str(tmp_path / "named.toml"))
    assert run("init") == 0
    assert [path.name for path in Path().iterdir()] == ["named.toml"]
    assert "export" not in capsys.readouterr().out


def test_in_a_clone_another_file_is_written_beside_the_shipped_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = ROOT / "hosts.toml"
    content = shipped.read_bytes()
    for place in (shipped, ROOT / "disagg" / "demo" / "hosts.toml"):
        monkeypatch.setenv("DISAGG_CONFIG", str(place))
        assert run("init", "--force") == 0
        assert capsys.readouterr().out == (
            f"Wrote fleet.toml. Put your machines' addresses in it.\n{place} is part of disagg and stays as it is.\n"
            f"Commands read the new file after: export DISAGG_CONFIG={tmp_path}/fleet.toml\n{NEXT}\n"
        )
    assert shipped.read_bytes() == content
    assert load(Path("fleet.toml")).hosts


def test_a_clone_of_another_installation_is_one_too() -> None:
    for place in (Path("hosts.toml"), Path("disagg", "demo", "hosts.toml")):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    assert run("init") == 0
    assert Path("hosts.toml").read_text() == "" and load(Path("fleet.toml")).hosts


def test_any_number_of_hosts_is_given_by_their_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prefill", "spark@10.0.0.1", "--prefill", "10.0.0.2", "--decode", "10.0.0.3", "--decode", "127.0.0.1"]
    assert run("init", *words) == 0
    hosts = load(Path("hosts.toml")).hosts.values()
    assert [(one.name, one.address, one.user, one.connector) for one in hosts] == [
        ("prefill-1", "10.0.0.1", "spark", "ssh"),
        ("prefill-2", "10.0.0.2", None, "ssh"),
        ("decode-1", "10.0.0.3", None, "ssh"),
        ("decode-2", "127.0.0.1", None, "local"),
    ]
    assert capsys.readouterr().out == f"Wrote hosts.toml. Its model and engines are examples.\n{NEXT}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefill", "10.0.0.1:22"], "--prefill 10.0.0.1:22: not an address"),
        (["--decode", "a b@10.0.0.1"], "--decode a b@10.0.0.1: not a user"),
        (["--decode", '10.0.0.1"'], '--decode 10.0.0.1": not an address'),
        (["--decode", "10.0.0.1", "--decode", "10.0.0.1"], "--decode 10.0.0.1: given twice"),
        (["--decode", "10.0.0.1", "--from-json", "s.json"], "--prefill and --decode do not go with it"),
    ],
)
def test_hosts_that_cannot_be_are_one_clear_error_and_write_nothing(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("init", *words) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not list(Path().iterdir())


def test_at_a_terminal_the_next_commands_are_offered_and_run_with_the_new_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def confirm(question: str, console: Console) -> bool:
        asked.append(question)
        return "trust" in question

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("disagg.cli.init.stdout", lambda: Console(force_terminal=True))
    monkeypatch.setattr("disagg.cli.init.confirm", confirm)
    assert run("--config", "new.toml", "init", "--prefill", "127.0.0.1") == 0
    assert capsys.readouterr().out.endswith(f"{NEXT}\nprefill-1: this machine, no key needed\n")
    assert asked == [question for _, question in OFFERS]


def test_a_file_that_is_there_is_overwritten_only_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts.toml").write_text("mine")
    assert run("init") == 2
    assert "hosts.toml: exists already" in capsys.readouterr().err
    assert Path("hosts.toml").read_text() == "mine"
    assert run("init", "--force") == 0
    assert load(Path("hosts.toml")).hosts


def test_json_is_converted_and_what_was_left_out_is_said_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.json").write_text(json.dumps(SERVERS))
    assert run("init", "--from-json", "s.json") == 0
    captured = capsys.readouterr()
    assert captured.out == f"Wrote hosts.toml. Look at the lines marked CHECK.\n{NEXT}\n"
    assert captured.err == "s.json: prefill_servers[0].rack: unknown, ignored\n"
    assert list(load(Path("hosts.toml")).hosts) == ["spark", "decode-1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "s.json: no such file"), (b"{", "s.json:1:2: not valid JSON"), (b"\xff", "s.json:1:1: not UTF-8")],
)
def test_json_that_cannot_be_read_is_an_error_and_writes_nothing(
    content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("s.json").write_bytes(content)
    assert run("init", "--from-json", "s.json") == 2
    said = capsys.readouterr().err
    assert message in said and "init" not in said
    assert not Path("hosts.toml").exists()


def test_the_command_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "mlx", "mlx_lm", "fabric", "paramiko", "numpy", "httpx"}
    script = "import sys, disagg.cli.init; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not heavy & set(loaded.stdout.split())
