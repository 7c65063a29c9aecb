"""`disagg keys` and what `disagg serve` refuses before it listens."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from disagg.cli.gateway.keys import keys_view
from disagg.config import Host, load
from disagg.errors import DisaggError, HostUnreachable
from disagg.fleet.machine.fan_out import HostOutcome
from disagg.gateway.clients.keys import Key, KeyFile, KeyRing, parsed
from tests.cli.commandline import run, write_fleet
from tests.values import present


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


def test_a_key_that_is_edited_keeps_its_secret_and_what_was_not_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("keys", "add", "editor", "-m", "tiny", "--requests", 5, "--parallel", 4, "--config", config) == 0
    secret = capsys.readouterr().out.strip()
    ring = KeyRing(KeyFile.of(load(config)))
    before = present(ring.find(secret))
    assert run("keys", "edit", "editor", "--weight", 3, "--monitor", "--tokens", 900, "--config", config) == 0
    changed = present(ring.find(secret))
    assert (changed.models, changed.requests_per_minute, changed.parallel) == (("tiny",), 5, 4)
    assert (changed.weight, changed.monitor, changed.tokens_per_minute, changed.id) == (3, True, 900, before.id)
    assert "Changed the key of editor." in capsys.readouterr().err
    assert run("keys", "edit", "editor", "--weight", 3, "--monitor", "--config", config) == 0
    assert "The key of editor has these already." in capsys.readouterr().err
    more = ("--remove", "requests", "--remove", "model", "--no-monitor", "--parallel", 512)
    assert run("keys", "edit", "editor", *more, "--json", "--config", config) == 0
    shown = json.loads(capsys.readouterr().out)["key"]
    last = present(ring.find(secret))
    assert (last.models, last.requests_per_minute, last.monitor, last.parallel) == (None, None, False, 512)
    assert (shown["weight"], shown["parallel"]) == (3, 512) and "sha256" not in shown


def test_what_a_key_may_do_with_models_is_stated_and_listed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("keys", "add", "ops", "--admin", "--keep-alive", "1h30m", "--config", config) == 0
    assert run("keys", "add", "guest", "--no-load", "--config", config) == 0
    ops, guest = KeyFile.of(load(config)).read()
    assert (ops.admin, ops.load, ops.keep_alive_s) == (True, True, 5400)
    assert (guest.admin, guest.load, guest.keep_alive_s) == (False, False, None)
    capsys.readouterr()
    assert run("keys", "list", "--config", config) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "keeps models for 5400 s" in out and "admin" in out and "loads no models" in out
    assert run("keys", "edit", "ops", "--no-admin", "--remove", "keep-alive", "--config", config) == 0
    assert run("keys", "edit", "guest", "--load", "--config", config) == 0
    ops, guest = KeyFile.of(load(config)).read()
    assert (ops.admin, ops.keep_alive_s, guest.load) == (False, None, True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("add", "new", "--keep-alive", "soon"), "--keep-alive: not a length of time (got 'soon')"),
        (("add", "new", "--keep-alive", "-1"), "a key without this limit keeps models as long as it likes"),
        (("edit", "editor", "--keep-alive", "5m", "--remove", "keep-alive"), "--keep-alive sets it"),
        (("add", "new", "--parallel", 0), "--parallel: at least 1 (got 0)"),
        (("add", "new", "--parallel", -1), "--parallel: at least 1 (got -1)"),
        (("edit", "editor", "--parallel", 1_000_000), "--parallel: at most 512 (got 1000000)"),
        (("edit", "editor", "--weight", 0), "--weight: at least 1 (got 0)"),
        (("edit", "editor", "--weight", 101), "--weight: at most 100 (got 101)"),
        (("edit", "editor"), "nothing is to be changed about the key of editor"),
        (("edit", "editor", "--tokens", 5, "--remove", "tokens"), "--remove tokens: --tokens sets it"),
        (("edit", "chat", "--weight", 2), "there is no key named chat"),
        (("edit", "editor", "-m", "gpt"), 'no model "gpt"'),
    ],
)
def test_a_wrong_limit_is_one_error_and_changes_nothing(
    options: Sequence[object], text: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("keys", "add", "editor", "--config", config) == 0
    before = KeyFile.of(load(config)).read()
    assert run("keys", *options, "--config", config) == 2
    assert text in " ".join(capsys.readouterr().err.split())
    assert KeyFile.of(load(config)).read() == before


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
    assert f"port {port} on 127.0.0.1 is in use by " in capsys.readouterr().err, "and by which program"


class Gateways:
    """Gateways elsewhere, by name, each with its file of keys; None: nothing is deployed there."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | None] = {"near": b"", "far": b"", "bare": None}
        self.lost: set[str] = set()
        self.meanwhile: dict[str, bytes | None] = {}  # what others write between a command's `fetch` and its `deliver`

    def fetch(self, hosts: Sequence[Host]) -> list[HostOutcome[bytes | None]]:
        return [
            HostOutcome(host, 0.0, error=self._error(host))
            if host.name in self.lost
            else HostOutcome(host, 0.0, self.files[host.name])
            for host in hosts
        ]

    def deliver(self, hosts: Sequence[Host], merged: Callable[[str, bytes], bytes]) -> list[HostOutcome[bool]]:
        self.files |= self.meanwhile
        for host in hosts:
            self.files[host.name] = merged(host.name, self.files[host.name] or b"")
        return [HostOutcome(host, 0.0, value=True) for host in hosts]

    def _error(self, host: Host) -> DisaggError:
        return HostUnreachable(f"{host.name}: no route")


@pytest.fixture
def gateways(config: Path, monkeypatch: pytest.MonkeyPatch) -> Gateways:
    found = Gateways()
    tables = [
        f'[hosts.{name}]\naddress = "10.0.0.{n}"\nroles = ["gateway"]\nport = 8080\nservice = "systemd"\n'
        for n, name in enumerate(found.files, 1)
    ]
    config.write_text(config.read_text() + "\n" + "\n".join(tables))
    monkeypatch.setattr("disagg.cli.gateway.keys.fetch_keys", found.fetch)
    monkeypatch.setattr("disagg.cli.gateway.keys.deliver_keys", found.deliver)
    return found


def listed(config: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """The names of the keys that are not revoked, and what the command says beside them."""
    capsys.readouterr()
    assert run("keys", "list", "--json", "--config", config) == 0
    out, err = capsys.readouterr()
    return [key["name"] for key in json.loads(out)["keys"] if not key["revoked"]], err


def test_a_key_that_somebody_else_has_added_to_the_gateways_is_kept(
    config: Path, gateways: Gateways, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("keys", "add", "mine", "--config", config) == 0
    theirs = KeyFile(config.parent / "elsewhere" / "keys.json")
    theirs.add("theirs")
    gateways.files["far"] = theirs.path.read_bytes()
    assert listed(config, capsys)[0] == ["mine", "theirs"]
    assert run("keys", "revoke", "mine", "--config", config) == 0
    names, notes = listed(config, capsys)
    assert names == ["theirs"] and "keys sync" not in notes
    assert gateways.files["near"] == gateways.files["far"] and gateways.files["bare"] is None


def test_an_edit_reaches_every_gateway_and_the_latest_of_two_stands(
    config: Path, gateways: Gateways, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("keys", "add", "chat", "--parallel", 4, "--config", config) == 0
    elsewhere = KeyFile(config.parent / "elsewhere" / "keys.json")
    elsewhere.join([KeyFile.of(load(config)).read()])
    elsewhere.edit("chat", parallel=8, weight=5)
    gateways.files["far"] = elsewhere.path.read_bytes()
    assert run("keys", "edit", "chat", "--parallel", 2, "--config", config) == 0
    gateways.meanwhile = {"near": elsewhere.path.read_bytes()}  # written by somebody who has not seen the edit
    assert run("keys", "sync", "--config", config) == 0
    [key] = KeyFile.of(load(config)).read()
    assert (key.parallel, key.weight) == (2, 5)
    assert parsed(present(gateways.files["near"]), "near") == parsed(present(gateways.files["far"]), "far") == (key,)


def test_a_key_that_is_revoked_while_another_is_added_stays_revoked(
    config: Path, gateways: Gateways, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("keys", "add", "leaked", "--config", config) == 0
    elsewhere = KeyFile(config.parent / "elsewhere" / "keys.json")
    elsewhere.join([KeyFile.of(load(config)).read()])
    elsewhere.revoke("leaked")
    gateways.meanwhile = {"near": elsewhere.path.read_bytes()}
    assert run("keys", "add", "mine", "--config", config) == 0
    gateways.meanwhile = {}
    assert listed(config, capsys)[0] == ["mine"]


def test_a_gateway_s_damaged_file_of_keys_hinders_no_command_and_is_replaced(
    config: Path, gateways: Gateways, capsys: pytest.CaptureFixture[str]
) -> None:
    gateways.files["near"] = b"{"
    assert run("keys", "sync", "--config", config) == 1, "there is nothing to replace it with"
    assert "the file of keys on near is damaged" in capsys.readouterr().err
    names, notes = listed(config, capsys)
    assert names == [] and "near: not all of these keys" in notes
    assert run("keys", "add", "mine", "--config", config) == 0
    assert gateways.files["near"] == gateways.files["far"] and "mine" in str(gateways.files["far"])


def test_a_gateway_that_could_not_be_reached_gets_the_keys_by_the_next_sync(
    config: Path, gateways: Gateways, capsys: pytest.CaptureFixture[str]
) -> None:
    gateways.lost = {"far"}
    assert run("keys", "add", "mine", "--config", config) == 4
    out, err = capsys.readouterr()
    assert out.startswith("sk-disagg-") and "far still has the earlier keys" in err
    gateways.lost = set()
    names, notes = listed(config, capsys)
    assert names == ["mine"] and "far: not all of these keys" in notes
    assert run("keys", "sync", "--config", config) == 0
    assert gateways.files["far"] == gateways.files["near"] and "mine" in str(gateways.files["far"])


def test_in_80_columns_no_model_and_no_date_of_a_key_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=80, color_system=None, file=(file := io.StringIO()))
    models = ("qwen3-demo-30b", "gpt-oss-demo-120b")
    key = Key(id="0123abcd", name="the editor of a friend", sha256="0" * 64, created=0.0, models=models)
    limited = msgspec.structs.replace(key, requests_per_minute=100, tokens_per_minute=5000, parallel=4, weight=2)
    console.print(keys_view([msgspec.structs.replace(limited, monitor=True, revoked=1e9)]))
    out = file.getvalue()
    limits = ("100 requests/min", "5,000 tokens/min", "4 answers at once", "weight 2", "monitor")
    for text in (*models, *limits, "0123abcd", "1970-01-01", "2001-09-09"):
        assert text in out
    assert "…" not in out and max(map(len, out.splitlines())) <= 80


def test_a_key_that_cannot_be_kept_is_one_error_and_leaves_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = KeyFile.of(load(config))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert run("keys", "add", "editor", "--config", config) == 2
    out, err = capsys.readouterr()
    told = " ".join(err.split())
    assert out == "" and "cannot write the keys to" in told and told.endswith("hint: free space on that disk")
    assert not file.required and [path.name for path in file.path.parent.iterdir()] == ["keys.lock"]


def test_keys_in_a_folder_that_cannot_be_made_are_one_error(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert run("keys", "add", "editor", "--config", config) == 2
    assert "cannot write the keys to" in " ".join(capsys.readouterr().err.split())
