"""What each command does with whole-request hosts, in a fleet of nothing else and beside a decode host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.fleet.doctor import examine
from disagg.fleet.lifecycle.status.host_status import HealthState, HostStatus
from tests.cli.commandline import HOST, MODEL, run
from tests.ports import free_ports
from tests.whole.fake_openai import MODEL_THERE, Script, ended, openai_server, said

WHOLE = """
[hosts.mini]
roles = ["whole"]
model = "tiny"
engine = {{name = "openai", url = "http://127.0.0.1:{port}/v1", model = "{model}"}}
"""
UNMANAGED = "disagg asks this server and does not manage it"
NONE_MANAGED = "is a whole-request host: disagg manages none of them"


@pytest.fixture
def port() -> Iterator[int]:
    with openai_server(Script([said("Hello"), *ended()])) as port:
        yield port


def write(folder: Path, port: int, *, decode: bool) -> Path:
    parts = ['[fleet]\nname = "test"\n', MODEL.format(name="tiny"), WHOLE.format(port=port, model=MODEL_THERE)]
    if decode:
        own, kv = free_ports(2)
        host = {"name": "mac", "role": "decode", "engine": "mlx", "kv": f"kv_port = {kv}", "connector": "local"}
        parts.append(HOST.format(**host, model="tiny", port=own))
    path = folder / "hosts.toml"
    path.write_text("".join(parts))
    return path


@pytest.mark.parametrize("decode", [False, True], ids=["whole", "decode and whole"])
@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("status --host mini", 0, "healthy"),
        ("doctor --host mini", 0, "no problems on 1 host"),
        ("start --host mini", 0, "not managed"),
        ("stop --host mini", 0, "not managed"),
        ("restart --host mini", 0, "not managed"),
        ("generate tiny hi --alone whole", 0, "Hello"),
        ("plan --host mini", 2, UNMANAGED),
        ("deploy --host mini --yes", 2, UNMANAGED),
        ("rollback --host mini", 2, UNMANAGED),
        ("uninstall --host mini --yes", 2, UNMANAGED),
        ("trust mini", 2, UNMANAGED),
        ("logs --host mini", 2, UNMANAGED),
        ("models list --host mini", 2, UNMANAGED),
        ("exec --host mini -- true", 2, UNMANAGED),
        ("ssh mini", 2, UNMANAGED),
    ],
)
def test_a_host_that_disagg_does_not_manage(
    command: str, code: int, words: str, *, decode: bool, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts_toml = write(tmp_path, port, decode=decode)
    if decode and command.startswith("generate"):
        (tmp_path / "token").write_text("a token of this fleet, long enough")
        (tmp_path / "token").chmod(0o600)
        hosts_toml.write_text(hosts_toml.read_text().replace('"test"', '"test"\ntoken_file = "token"', 1))
    assert run("--config", hosts_toml, *command.split()) == code
    assert words in printed(capsys)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("status", 0, "healthy"),
        ("doctor", 0, "no problems on 1 host"),
        ("start", 0, "not managed"),
        ("stop", 0, "not managed"),
        ("restart", 0, "not managed"),
        ("generate tiny hi", 0, "Hello"),
        ("deploy --dry-run", 2, NONE_MANAGED),
        ("deploy --yes", 2, NONE_MANAGED),
        ("uninstall --yes", 2, NONE_MANAGED),
        ("exec -- true", 2, NONE_MANAGED),
    ],
)
def test_a_fleet_of_whole_hosts_only_is_used_as_it_is(
    command: str, code: int, words: str, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--config", write(tmp_path, port, decode=False), *command.split()) == code
    assert words in printed(capsys)


@pytest.mark.parametrize(("command", "code"), [("status", 3), ("stop", 0), ("stop --host mac", 0)])
def test_a_decode_host_beside_it_is_managed_as_ever(command: str, code: int, port: int, tmp_path: Path) -> None:
    assert run("--config", write(tmp_path, port, decode=True), *command.split()) == code


@pytest.mark.parametrize(("state", "code"), [("unreachable", 4), ("not running", 1), ("failed", 1), ("healthy", 0)])
def test_doctor_ends_with_4_if_the_host_cannot_be_reached(
    state: HealthState, code: int, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = HostStatus("mini", ("whole",), "tiny", "http://127.0.0.1/v1", state, "" if code == 0 else "it is off")
    monkeypatch.setattr(examine, "poll", lambda *_: [status])
    assert run("--config", write(tmp_path, port, decode=False), "doctor") == code


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    return " ".join((output.out + output.err).replace("│", " ").split())
