"""Whose token the hosts have, read from this machine with another HOME."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from disagg.config import Host
from disagg.errors import HostUnreachable, UsageError
from disagg.fleet.changes.tokens import token_of
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.local import LocalMachine
from disagg.token import token_digest
from tests.fleet.facts.fixture_facts import spark

HOSTS = [spark(name=name) for name in ("a", "b", "c")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def give(home: Path, name: str, token: str) -> None:
    folder = home / ".disagg/hosts" / name
    folder.mkdir(parents=True)
    (folder / "token").write_text(f"{token}\n")


def connect(host: Host) -> Machine:
    if host.name == "c":
        raise HostUnreachable("c: no route", "ping c")
    return LocalMachine(host.name)


def test_the_token_is_that_of_the_hosts_that_answer_and_have_one(home: Path) -> None:
    give(home, "b", "the-token-of-this-fleet")
    assert token_of(HOSTS, connect) == "the-token-of-this-fleet"


def test_of_different_tokens_none_is_chosen(home: Path) -> None:
    give(home, "a", "one-token-of-this-fleet")
    give(home, "b", "two-token-of-this-fleet")
    with pytest.raises(UsageError) as refused:
        token_of(HOSTS, connect)
    assert f"{token_digest('one-token-of-this-fleet')[:8]} on a" in refused.value.message
    assert "one-token" not in refused.value.message


def test_no_token_is_an_error(home: Path) -> None:
    with pytest.raises(UsageError, match="no host has a token"):
        token_of(HOSTS, connect)


def test_a_tokens_digest_is_that_of_its_file() -> None:
    assert token_digest("x") == hashlib.sha256(b"x\n").hexdigest()
