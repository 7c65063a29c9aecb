"""The fleet's shared secret as every program reads it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.config import load
from disagg.errors import ConfigError
from disagg.token import (
    TOKEN_FILE_VARIABLE,
    Tokens,
    fleet_token,
    read_tokens,
    state_folder,
)
from tests.cli.commandline import write_fleet

TOKEN = "s3cret-s3cret-s3cret-s3cret"
OTHER = "another-another-another"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o600])
def test_a_private_token_is_read(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert read_tokens(path) == (TOKEN,)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (f"{TOKEN}\n{OTHER}\n", (TOKEN, OTHER)),
        (f"\n  {OTHER}  \n\n{TOKEN}", (OTHER, TOKEN)),
        (f"{TOKEN}\n{TOKEN}\n", (TOKEN,)),
    ],
)
def test_a_file_has_a_token_per_line_and_the_first_is_the_current_one(
    path: Path, text: str, tokens: tuple[str, ...]
) -> None:
    path.write_text(text)
    assert read_tokens(path) == tokens
    assert Tokens(path=path).current == tokens[0]


@pytest.mark.parametrize("text", ["", "\n\n", f"{TOKEN}\nshort\n", "x" * 21, f"{TOKEN}\n{'ü' * 22}\n"])
def test_a_file_with_a_line_that_is_no_token_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="no usable token"):
        read_tokens(path)


def test_a_server_accepts_each_token_and_reads_a_changed_file_without_a_restart(path: Path) -> None:
    tokens = Tokens(path=path)
    assert tokens.accepts(TOKEN) and not tokens.accepts(OTHER) and not tokens.accepts("")
    path.write_text(f"{TOKEN}\n{OTHER}\n")
    assert tokens.accepts(TOKEN) and tokens.accepts(OTHER)
    path.write_text(f"{OTHER}\n")
    assert tokens.accepts(OTHER) and not tokens.accepts(TOKEN) and tokens.current == OTHER


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_text("short")])
def test_a_file_that_cannot_be_read_any_more_leaves_the_tokens_before(
    path: Path, spoil: Callable[[Path], object]
) -> None:
    tokens = Tokens(path=path)
    spoil(path)
    assert tokens.all == (TOKEN,)


def test_tokens_are_not_printed(path: Path) -> None:
    assert TOKEN not in repr(Tokens(path=path)) + repr(Tokens(TOKEN))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_token_that_other_users_can_reach_is_refused_with_the_command_that_mends_it(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_tokens(path)
    assert caught.value.hint == f"chmod 600 {path}"


def test_a_token_that_is_not_there_is_made_by_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="there is no fleet token in") as caught:
        fleet_token(load(write_fleet(tmp_path)))
    assert "`disagg start`" in caught.value.hint


def test_the_token_of_a_fleet_on_other_machines_is_made_by_deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    with pytest.raises(ConfigError) as caught:
        fleet_token(load(Path(__file__).parents[1] / "hosts.toml"))
    assert caught.value.hint.startswith("run `disagg deploy`;")


def test_without_a_home_folder_the_error_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    fleet = load(write_fleet(tmp_path))
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder(fleet).parent == tmp_path / "disagg"
    monkeypatch.delenv("XDG_STATE_HOME")
    with pytest.raises(ConfigError, match="this user has no home folder") as caught:
        state_folder(fleet)
    assert "HOME" in caught.value.hint


def test_a_state_folder_does_not_follow_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert state_folder(load(write_fleet(tmp_path))).parent == tmp_path / ".local" / "state" / "disagg"
