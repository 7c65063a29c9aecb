"""`disagg keys` and what `disagg serve` refuses before it listens."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from disagg.config import load
from disagg.gateway.clients.keys import KeyFile, KeyRing
from tests.cli.commandline import run, write_fleet


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_fleet(tmp_path, ("tiny", "other"))


def test_a_key_is_printed_once_and_opens_the_gateway(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("keys", "add", "editor", "-m", "tiny-alias", "--requests", 5, "--config", config) == 0
    secret = capsys.readouterr().out.strip()
    found = KeyRing(KeyFile.of(load(config))).find(secret)
    assert found is not None
    assert (found.name, found.models, found.requests_per_minute) == ("editor", ("tiny",), 5)
    assert run("keys", "list", "--config", config) == 0
    out = capsys.readouterr().out
    assert "editor" in out and "tiny" in out and secret not in out


def test_the_list_as_json_has_no_hashes_and_says_what_is_revoked(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("keys", "add", "editor", "--json", "--config", config) == 0
    added = json.loads(capsys.readouterr().out)
    assert run("keys", "revoke", "editor", "--config", config) == 0
    assert run("keys", "list", "--json", "--config", config) == 0
    out = capsys.readouterr().out
    [listed] = json.loads(out)["keys"]
    assert listed["name"] == added["name"] and listed["revoked"] >= listed["created"]
    assert "sha256" not in listed and added["key"] not in out


def test_a_key_for_an_unknown_model_and_a_revoked_stranger_are_errors(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("keys", "add", "editor", "-m", "gpt", "--config", config) == 2
    assert run("keys", "revoke", "editor", "--config", config) == 2
    assert run("keys", "list", "--config", config) == 0
    err = capsys.readouterr().err
    assert 'no model "gpt"' in err and "no key named editor" in err and "There are no keys." in err


def test_serve_refuses_an_address_that_others_reach_until_there_is_a_key(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", "--host", "0.0.0.0", "--config", config) == 2
    assert "disagg keys add NAME" in capsys.readouterr().err


def test_serve_names_a_port_that_is_in_use(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run("serve", "--port", port, "--config", config) == 1
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err
