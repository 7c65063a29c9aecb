"""`disagg serve`: what it offers its clients, as options of the command."""

from __future__ import annotations

import re
import secrets
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from disagg.token import TOKEN_FILE_VARIABLE
from tests.cli.commandline import run
from tests.deadlines import wait_until
from tests.served_gateway import served_gateway
from tests.simulated import write_simulated
from tests.values import present

PAGE = "https://chat.example.org"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet with a token, none of whose hosts runs."""
    token = tmp_path / "token"
    token.write_text(secrets.token_urlsafe(32))
    token.chmod(0o600)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(token))
    return write_simulated(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cors-origin", "chat.example.org"), '--cors-origin: "chat.example.org" is not an origin'),
        (("--tls-cert", "a.pem"), "--tls-key is missing"),
        (("--tls-key", "a.key"), "--tls-cert is missing"),
        (("--tls-cert", "a.pem", "--tls-key", "a.key", "--tls-self-signed"), "only one of them"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    config: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", *options, "--config", config) == 2
    assert message in capsys.readouterr().err


def test_a_certificate_that_is_not_there_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = config.parent / "a.pem"
    assert run("serve", "--port", 0, "--tls-cert", missing, "--tls-key", missing, "--config", config) == 2
    error = capsys.readouterr().err
    assert f"{missing}: there is no such file" in error and "Traceback" not in error


@pytest.mark.slow
def test_a_gateway_makes_a_certificate_prints_its_fingerprint_and_is_asked_by_https(config: Path) -> None:
    options = ["--tls-self-signed", "--cors-origin", PAGE, "--keep-responses", "3"]
    with served_gateway(config, options=options) as gateway:
        assert gateway.url.startswith("https://")
        printed = re.compile(r"TLS certificate: (\S+), SHA-256 ([0-9A-F:]{95})\n")
        wait_until(lambda: printed.search(gateway.log.read_text()), 60, "its certificate")
        line = present(printed.search(gateway.log.read_text()))
        trusted = ssl.create_default_context(cafile=line[1])
        with httpx.Client(base_url=gateway.url, verify=trusted, trust_env=False, headers={"origin": PAGE}) as http:
            answer = http.get("/v1/models")
        plain = httpx.get(gateway.url.replace("https:", "http:"), trust_env=False)
        top = [sys.executable, "-m", "disagg", "top", "--url", gateway.url, "--config", str(config)]
        untrusted = subprocess.run(top, capture_output=True, text=True, check=False)
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert [one["id"] for one in answer.json()["data"]] == ["m"]
    assert (plain.status_code, plain.text) == (400, "this server speaks TLS: ask it by https://\n")
    assert "is not one that this machine trusts" in untrusted.stdout + untrusted.stderr
    assert "PRIVATE KEY" not in gateway.log.read_text()
