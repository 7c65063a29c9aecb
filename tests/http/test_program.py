"""The command line of the processes that serve one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg import logs
from disagg.config import Fleet, Host
from disagg.errors import ConfigError, PortInUse, UsageError
from disagg.extras import install
from disagg.http.program import run_host

HOSTS = (Path(__file__).parents[2] / "hosts.toml").read_text()


def serve(fleet: Fleet, host: Host) -> int:
    if host.name == "mac-studio-1":
        raise PortInUse("port 8001 is in use", "stop its program")
    return host.port


def run(folder: Path, name: str, config: str = HOSTS) -> int:
    (folder / "hosts.toml").write_text(config)
    argv = ["--config", str(folder / "hosts.toml"), "--host", name]
    return run_host("disagg.test", argv, serve, kind="prefill host", serves=lambda host: "prefill" in host.roles)


@pytest.fixture(autouse=True)
def not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log stays that of pytest."""
    monkeypatch.setattr(logs, "configure", lambda: None)


def failure(caplog: pytest.LogCaptureFixture) -> Any:
    (record,) = caplog.records
    assert record.message == "start_failed"
    return record.fields  # type: ignore[attr-defined]  # set by `extra`


def test_the_named_host_is_served_and_its_exit_code_returned(tmp_path: Path) -> None:
    assert run(tmp_path, "dgx-spark-1") == 8000


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("nobody", HOSTS, "has no prefill host 'nobody'"),
        ("mac-studio-1", HOSTS, "has no prefill host 'mac-studio-1'"),
        ("dgx-spark-1", "not TOML", "hosts.toml"),
    ],
)
def test_a_start_that_fails_is_one_line_of_log_and_the_errors_exit_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, config: str, message: str
) -> None:
    assert run(tmp_path, name, config) == ConfigError.exit_code
    assert message in failure(caplog)["message"]


def test_an_error_while_serving_is_one_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    assert run_host("disagg.test", ["--config", str(tmp_path / "hosts.toml"), "--host", "mac-studio-1"], serve) == 1
    assert failure(caplog)["code"] == "PortInUse"


def test_a_server_whose_packages_are_not_installed_says_which_command_brings_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def without_uvicorn(*_: Any) -> int:
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    (tmp_path / "hosts.toml").write_text(HOSTS)
    argv = ["--config", str(tmp_path / "hosts.toml"), "--host", "mac-studio-1"]
    assert run_host("disagg.test", argv, without_uvicorn) == UsageError.exit_code
    assert failure(caplog)["message"] == "not installed here: uvicorn"
    assert failure(caplog)["hint"] == install("server")


SEVERAL = HOSTS.replace(
    'model = "gpt-oss:120b"\nport = 8001\nkv_port = 9001',
    'models = ["gpt-oss:120b"]\nport = 8001\nports = "8100-8103"',
)


@pytest.mark.parametrize(
    ("name", "ports", "message"),
    [
        ("mac-studio-1/gpt-oss:120b", [], "hosts.toml states no ports for one model"),
        ("mac-studio-1/gpt-oss:120b", ["--port", "8100"], "hosts.toml states no ports for one model"),
        ("mac-studio-1/gpt-oss:120b", ["--port", "8100", "--kv-port", "8100"], "are both 8100"),
        ("mac-studio-1/gpt-oss:120b", ["--port", "8100", "--kv-port", "9001"], "9001 is not one of the ports"),
        ("dgx-spark-1", ["--port", "8100"], "hosts.toml states its ports"),
    ],
)
def test_one_model_of_a_host_with_several_is_told_its_ports_and_nothing_else_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, ports: list[str], message: str
) -> None:
    (tmp_path / "hosts.toml").write_text(SEVERAL)
    argv = ["--config", str(tmp_path / "hosts.toml"), "--host", name, *ports]
    assert run_host("disagg.test", argv, serve, ports=True) == ConfigError.exit_code
    assert message in failure(caplog)["message"]


def test_one_model_of_a_host_with_several_is_served_at_the_ports_that_were_given(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(SEVERAL)
    hosts: list[Host] = []
    argv = ["--config", str(tmp_path / "hosts.toml"), "--host", "mac-studio-1/gpt-oss:120b"]
    ports = ["--port", "8102", "--kv-port", "8103"]

    def kept(fleet: Fleet, host: Host) -> int:
        hosts.append(host)
        return 0

    assert run_host("disagg.test", [*argv, *ports], kept, ports=True) == 0
    assert [(host.model, host.port, host.kv_port) for host in hosts] == [("gpt-oss:120b", 8102, 8103)]
