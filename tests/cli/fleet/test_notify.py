"""`disagg status --notify` from the command line, over readings that the tests give."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.api.host_change import HostChange
from disagg.cli.fleet.notify import _checked
from disagg.errors import ConfigError
from disagg.fleet.lifecycle.status import ask
from disagg.fleet.lifecycle.status.host_status import HealthState, HostStatus
from tests.cli.commandline import run, write_fleet

Give = Callable[..., None]


def status(state: HealthState) -> HostStatus:
    why, hint = ("", "") if state == "healthy" else ("nothing listens [there]", "disagg start")
    return HostStatus("prefill-1", ("prefill",), "tiny", "https://x", state, why, hint)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_fleet(tmp_path)


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """give(state, ...): what each reading finds; an exception is raised by it. Then Ctrl-C."""

    def prepare(*states: HealthState | Exception) -> None:
        readings: Iterator[HealthState | Exception] = iter(states)

        def poll(*arguments: Any) -> list[HostStatus]:
            found = next(readings, None)
            if found is None:
                raise KeyboardInterrupt
            if isinstance(found, Exception):
                raise found
            return [status(found)]

        monkeypatch.setattr(ask, "poll", poll)
        monkeypatch.setattr(ask, "diagnose", lambda fleet, statuses, *_: statuses)

    return prepare


def test_each_change_is_a_line_and_ctrl_c_ends_it(config: Path, give: Give, capsys: pytest.CaptureFixture[str]) -> None:
    give("healthy", "healthy", "not running", "not running", "not running", "healthy")
    assert run("--config", config, "status", "--notify", "--every", "0.1") == 130
    captured = capsys.readouterr()
    down, up = captured.out.splitlines()
    assert down.endswith(" prefill-1: down: not running: nothing listens [there] -> disagg start")
    assert " prefill-1: up again after " in up
    assert "watching 2 hosts of test every 0.1 s" in captured.err and "interrupted" in captured.err


def test_json_is_one_object_per_line_and_nothing_else(
    config: Path, give: Give, capsys: pytest.CaptureFixture[str]
) -> None:
    give("failed", "failed", "healthy")
    assert run("--config", config, "status", "--notify", "--every", "0.1", "--json") == 130
    changes = [HostChange.from_json(json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert [(one.change, one.state, one.fleet, one.host) for one in changes] == [
        ("down", "failed", "test", "prefill-1"),
        ("up", "healthy", "test", "prefill-1"),
    ]


def test_it_ends_when_nobody_reads_its_lines_any_more(
    config: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    give("healthy", "healthy", "healthy")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run("--config", config, "status", "--notify", "--every", "0.1") == 141


def test_an_error_of_this_machine_is_reported_once_and_the_watch_goes_on(
    config: Path, give: Give, capsys: pytest.CaptureFixture[str]
) -> None:
    give("healthy", ConfigError("no token"), ConfigError("no token"), "failed", "failed")
    assert run("--config", config, "status", "--notify", "--every", "0.1") == 130
    captured = capsys.readouterr()
    assert captured.err.count("no token") == 1 and "prefill-1: down: failed" in captured.out


def test_a_command_is_run_for_each_change(
    config: Path, give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    monkeypatch.setattr("disagg.fleet.lifecycle.watch.Notifier.send", lambda self, change: sent.append(change))
    give("failed", "failed")
    assert run("--config", config, "status", "--notify", "--every", "0.1", "--run", "true") == 130
    assert [change.change for change in sent] == ["down"]


@pytest.mark.parametrize(
    "url",
    [
        "alerts.example/secret",
        "ftp://alerts.example/secret",
        "https:///secret",
        "http://alerts.example:abc/secret",
        "http://alerts.example:99999/secret",
        "http://[::1/secret",
        f"http://{'a' * 70}.example/secret",
    ],
)
def test_a_url_that_is_none_is_a_usage_error_that_does_not_show_it(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    assert run("--config", config, "status", "--notify", "--url", url) == 2
    monkeypatch.setenv("DISAGG_WATCH_URL", url)
    assert run("--config", config, "status", "--notify") == 2
    err = capsys.readouterr().err
    assert err.count("is not a URL") == 2 and "secret" not in err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://me:password@proxy.example:1"),
        ("HTTPS_PROXY", "foo://me:password@proxy.example:1"),
        ("HTTP_PROXY", "http://me:password@[::1"),
        ("SSL_CERT_FILE", "/nowhere/password"),
    ],
)
def test_a_proxy_or_certificates_that_cannot_be_used_are_an_error_of_the_environment(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert run("--config", config, "status", "--notify", "--url", "https://alerts.example") == 2
    err = capsys.readouterr().err
    assert "nothing can be posted with the proxy or the certificates" in err and variable in err
    assert "password" not in err


def test_a_host_that_is_not_in_the_file_is_a_usage_error(config: Path) -> None:
    assert run("--config", config, "status", "--notify", "--host", "nobody") == 2


@pytest.mark.parametrize(
    "url", ["https://alerts.example/secret", "http://[::1]:8080/x?y=z", "http://täglich.example/x"]
)
def test_a_url_is_taken_as_it_is(url: str) -> None:
    assert _checked(url) == url
