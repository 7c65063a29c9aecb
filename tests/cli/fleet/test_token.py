"""`disagg token`: what it prints, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg.fleet.machine import interruption
from disagg.fleet.tokens.rotation import GRACE_S
from disagg.tls.certificate import certificate_pem
from disagg.token import token_digest
from tests.cli.commandline import run, write_fleet

TOKEN = "the-token-of-this-machine"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = write_fleet(tmp_path)
    folder = tmp_path / "state/disagg/test"
    folder.mkdir(parents=True)
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "token").chmod(0o600)
    return path


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long commands would have waited."""
    waited: list[float] = []
    monkeypatch.setattr(interruption, "sleep", waited.append)
    return waited


def test_show_prints_digits_of_a_hash_and_no_secret(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "token", "show") == 0
    shown = capsys.readouterr()
    assert token_digest(TOKEN)[:8] in shown.out and TOKEN not in shown.out + shown.err
    assert run("--config", config, "token", "show", "--json") == 0
    assert json.loads(capsys.readouterr().out)["here"] == [token_digest(TOKEN)]


def test_only_reveal_prints_the_token(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", config, "token", "show", "--reveal") == 0
    assert capsys.readouterr().out == f"{TOKEN}\n"


def test_certificate_is_that_of_the_current_token_and_no_secret(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", config, "token", "certificate") == 0
    printed = capsys.readouterr().out
    assert printed == certificate_pem(TOKEN) and "PRIVATE" not in printed


def test_rotate_confirms_and_then_replaces_the_token_of_a_fleet_on_this_machine(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, waits: list[float]
) -> None:
    file = tmp_path / "state/disagg/test/token"
    assert run("--config", config, "token", "rotate") == 2
    assert "disagg token rotate --yes" in capsys.readouterr().err and file.read_text() == f"{TOKEN}\n"
    assert run("--config", config, "token", "rotate", "--yes", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    new = file.read_text().strip()
    assert body == {"fleet": "test", "before": token_digest(TOKEN), "token": token_digest(new)} and new != TOKEN
    assert {path.name for path in file.parent.iterdir()} == {"token", "token.lock"}
    assert waits == [GRACE_S]


def test_a_rotation_that_goes_on_names_the_token_that_is_removed(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, waits: list[float]
) -> None:
    new = "the-token-that-replaces-it"
    (tmp_path / "state/disagg/test/token").write_text(f"{new}\n{TOKEN}\n")
    assert run("--config", config, "token", "show") == 0
    assert f"disagg token rotate removes {token_digest(TOKEN)[:8]}" in capsys.readouterr().err
    assert run("--config", config, "token", "rotate", "--yes", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body == {"fleet": "test", "before": token_digest(TOKEN), "token": token_digest(new)}
    assert (tmp_path / "state/disagg/test/token").read_text() == f"{new}\n"
