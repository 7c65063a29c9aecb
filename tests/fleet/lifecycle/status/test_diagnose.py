"""What HTTP and SSH tell together, without either."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Fleet, Host
from disagg.errors import Cancelled, HostUnreachable
from disagg.fleet.facts.server import PortHolder, ServerFacts
from disagg.fleet.lifecycle.status.ask import diagnose
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.status.judge import explained
from disagg.fleet.machine import interruption
from disagg.fleet.machine.machine import Machine

HOST = Host("spark", "10.0.0.1", ("prefill",), "tiny", EngineOptions("transformers"), 8000, service="process")
DEPLOYED = ServerFacts("/home/x", current="abc", release="abc", managers={"process": True})
TOKEN = "a-token"


def status(state: Any, why: str = "by http") -> HostStatus:
    return HostStatus("spark", ("prefill",), "tiny", "http://10.0.0.1:8000", state, why, "ping 10.0.0.1")


def line(event: str, **fields: Any) -> str:
    return json.dumps(
        {"time": "2026-01-01T00:00:00.000Z", "level": fields.pop("level", "info"), "event": event, **fields}
    )


STARTING = line("starting", release="abc", pid=5)
FAILED = line(
    "start_failed", level="error", code="ModelError", message="/m: no config.json", hint="copy the model there"
)
ENDED = line("server_ended", level="error", exit=3, restart_in_s=2.0, restarts=2)


@pytest.mark.parametrize(
    ("state", "facts", "expected", "why", "hint"),
    [
        ("not running", ServerFacts("/h"), "not running", "nothing is deployed there", "disagg deploy --host spark"),
        (
            "not running",
            replace(DEPLOYED, managers={"process": False}),
            "not running",
            "SSH is fine; no server process runs there",
            "disagg start --host spark",
        ),
        (
            "not running",
            replace(DEPLOYED, pid=5),
            "loading",
            "process 5 runs there but does not listen yet",
            "disagg logs -f --host spark",
        ),
        (
            "not running",
            replace(DEPLOYED, restarts=2, log=(STARTING, FAILED, ENDED, STARTING)),
            "failed",
            "it ended 2 times and is being restarted: /m: no config.json",
            "copy the model there",
        ),
        (
            "not running",
            replace(DEPLOYED, managers={"process": False}, log=(STARTING, "Killed")),
            "failed",
            "its process ended and nothing starts it again: Killed",
            "disagg logs --host spark; disagg start --host spark",
        ),
        (
            "not running",
            replace(DEPLOYED, ports={8000: PortHolder(9, "nginx")}),
            "foreign",
            "port 8000 there is in use by nginx (pid 9), so its server cannot start",
            "end that program: disagg ssh spark; or give the host another port in hosts.toml: "
            "disagg deploy && disagg restart --host spark",
        ),
        (
            "unreachable",
            replace(DEPLOYED, pid=5),
            "silent",
            "process 5 runs there, but from here by http",
            "a firewall on spark may close port 8000",
        ),
        (
            "unauthorised",
            replace(DEPLOYED, pid=5, token_digests=("other",)),
            "unauthorised",
            "its token differs from the one here",
            "disagg deploy --adopt-token --host spark uses its token here; or --replace-token, then "
            "disagg restart --host spark",
        ),
        (
            "unauthorised",
            replace(DEPLOYED, pid=5, token_digests=(hashlib.sha256(b"a-token\n").hexdigest(),)),
            "unauthorised",
            "it was started with an earlier token than the deployed one",
            "disagg restart --host spark",
        ),
    ],
)
def test_the_machine_tells_why_and_what_mends_it(state: str, facts: Any, expected: str, why: str, hint: str) -> None:
    found = explained(status(state), HOST, facts, TOKEN)
    assert (found.state, found.why, found.hint) == (expected, why, hint)


def test_a_server_that_was_stopped_after_it_failed_before_has_not_failed() -> None:
    log = (STARTING, FAILED, STARTING, line("ready"), line("stopped"))
    facts = replace(DEPLOYED, managers={"process": False}, log=log)
    assert explained(status("not running"), HOST, facts, TOKEN).state == "not running"


def test_a_server_that_ended_because_its_model_would_not_load_has_failed() -> None:
    log = (line("ready"), STARTING, line("loading"), line("stopped"), FAILED)
    found = explained(status("not running"), HOST, replace(DEPLOYED, managers={"process": False}, log=log), TOKEN)
    assert (found.state, found.hint) == ("failed", "copy the model there; then: disagg start --host spark")


@pytest.mark.parametrize("end", [(), (line("loading"), line("stopped"))])
def test_a_server_that_was_stopped_while_it_was_tried_again_has_failed(end: tuple[Any, ...]) -> None:
    log = (line("ready"), STARTING, FAILED, ENDED, STARTING, *end)
    found = explained(status("not running"), HOST, replace(DEPLOYED, managers={"process": False}, log=log), TOKEN)
    assert (found.state, found.hint) == ("failed", "copy the model there; then: disagg start --host spark")


def test_what_macos_says_about_the_local_network_stays_the_remedy() -> None:
    blocked = replace(
        status("unreachable"), hint="System Settings > Privacy & Security > Local Network: allow this program"
    )
    assert "Local Network" in explained(blocked, HOST, replace(DEPLOYED, pid=5), TOKEN).hint


def test_where_ssh_fails_too_both_are_told() -> None:
    found = explained(
        status("unreachable"), HOST, HostUnreachable("spark: 10.0.0.1:22 does not answer", "ping it"), TOKEN
    )
    assert (found.state, found.why, found.hint) == (
        "unreachable",
        "by http; 10.0.0.1:22 does not answer",
        "ping it",
    )


def test_only_hosts_in_trouble_are_asked_and_a_machine_that_hangs_is_given_up(tmp_path: Path) -> None:
    given_up = threading.Event()
    asked = []

    def connect(host: Any, seconds: float) -> Machine:
        asked.append(host.name)
        try:
            interruption.sleep(20)
        except Cancelled:
            given_up.set()
            raise
        raise AssertionError("nobody ended this")

    hosts = {name: replace(HOST, name=name) for name in ("well", "here", "far")}
    hosts["here"] = replace(hosts["here"], connector="local")
    fleet = Fleet("f", tmp_path / "hosts.toml", {}, hosts)
    states = {"well": "healthy", "here": "not running", "far": "unreachable"}
    statuses = [replace(status(state), host=name) for name, state in states.items()]
    found = diagnose(fleet, statuses, TOKEN, 0.3, connect)
    assert asked == ["far"] and found[:2] == statuses[:2]
    assert found[2].why == "by http; SSH did not answer within 0.3 s either"
    assert given_up.wait(30)
