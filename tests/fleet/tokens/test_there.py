"""Whose token the hosts have, read from this machine with another HOME."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from disagg.config import Host
from disagg.errors import ConfigError, HostUnreachable, UsageError
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import Machine
from disagg.fleet.tokens.here import OwnTokens
from disagg.fleet.tokens.there import KnownTokens, adopt_or_make, adoptable, foreign_token, known_tokens
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
    assert known_tokens(HOSTS, connect).common() == ("the-token-of-this-fleet",)


def test_of_different_tokens_none_is_chosen(home: Path) -> None:
    give(home, "a", "one-token-of-this-fleet")
    give(home, "b", "two-token-of-this-fleet")
    with pytest.raises(UsageError) as refused:
        known_tokens(HOSTS, connect).common()
    assert f"{token_digest('one-token-of-this-fleet')[:8]} on a" in refused.value.message
    assert "one-token" not in refused.value.message and "(c did not answer)" in refused.value.message


def test_no_token_is_an_error(home: Path) -> None:
    with pytest.raises(UsageError, match="no host has a token"):
        known_tokens(HOSTS[:2], connect).common()


def test_if_no_host_with_a_token_answers_the_error_is_that_of_the_one_that_does_not(home: Path) -> None:
    with pytest.raises(HostUnreachable, match="c: no route"):
        known_tokens(HOSTS, connect).common()


def test_a_file_that_holds_no_token_is_not_adopted(home: Path) -> None:
    give(home, "a", "short")
    with pytest.raises(UsageError, match="the token of a is no token of disagg"):
        known_tokens(HOSTS, connect).common()


OURS, THEIRS = "the-token-of-this-machine", "the-token-of-another-machine"


def known(**tokens: str) -> KnownTokens:
    """Hosts and the tokens in their files."""
    return KnownTokens({name: tuple(text.split()) for name, text in tokens.items()}, {})


@pytest.mark.parametrize(
    ("hosts", "common"),
    [
        (known(a=OURS, b=OURS), (OURS,)),
        (known(a=f"{OURS} {THEIRS}", b=OURS), (OURS,)),
        (known(a=f"{OURS} {THEIRS}", b=f"{THEIRS} {OURS}"), (OURS, THEIRS)),
    ],
)
def test_while_tokens_are_rotated_the_ones_that_all_hosts_have_are_adopted(
    hosts: KnownTokens, common: tuple[str, ...]
) -> None:
    assert hosts.common() == common


@pytest.mark.parametrize(
    ("ours", "there", "foreign"),
    [
        ((OURS,), (), False),
        ((), (), False),
        ((OURS,), (OURS,), False),
        ((OURS,), (THEIRS, OURS), False),
        ((THEIRS, OURS), (OURS,), False),
        ((OURS,), (THEIRS,), True),
        ((), (THEIRS,), True),
    ],
)
def test_a_host_is_another_operators_if_it_has_none_of_this_machines_tokens(
    ours: tuple[str, ...], there: tuple[str, ...], foreign: bool
) -> None:
    assert (foreign_token(ours, [token_digest(token) for token in there], "a") is not None) is foreign


def test_a_token_that_other_hosts_have_from_this_machine_is_not_replaced(tmp_path: Path) -> None:
    own = OwnTokens(tmp_path / "token", made=True)
    own.write((OURS,))
    with pytest.raises(UsageError) as refused:
        adoptable(own, HOSTS[:1], known(a=THEIRS, b=OURS))
    assert refused.value.message.startswith("b has this machine's token") and OURS not in refused.value.message
    assert refused.value.hint.startswith("disagg deploy --replace-token --host a ")
    assert adoptable(own, HOSTS[:1], known(a=THEIRS, b=THEIRS)) == (THEIRS,)
    assert adoptable(own, HOSTS[:1], known(a=THEIRS, b="a-third-token-of-others")) == (THEIRS,)
    assert adoptable(own, HOSTS[:2], known(a=OURS, b=OURS)) == (OURS,)


def test_a_machine_without_a_token_makes_none_while_a_host_has_one(tmp_path: Path) -> None:
    own = OwnTokens(tmp_path / "token", made=True)
    with pytest.raises(UsageError, match=r"this machine has no token, and the fleet has one: \w+ on a, b"):
        adopt_or_make(own, (), replace=False, read=lambda: known(a=THEIRS, b=THEIRS))
    assert not own.exists()
    assert adopt_or_make(own, (), replace=False, read=known) and own.exists()


def test_a_file_that_a_setting_names_is_not_overwritten_by_adopted_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was named for the fleet's token"):
        adoptable(OwnTokens(tmp_path / "token"), HOSTS[:1], known(a=THEIRS))


def test_a_tokens_digest_is_that_of_its_file() -> None:
    assert token_digest("x") == hashlib.sha256(b"x\n").hexdigest()
