"""disagg/servers/monitor.py: when a process ends itself, and what its service manager receives."""

from __future__ import annotations

import json
import logging
import socket
import tempfile
from pathlib import Path

import pytest

from disagg.http.program import notify
from disagg.servers.monitor import DEAD_S, EXIT_CODE, STUCK_S, WATCH_S, Problem, Watchdog

STUCK, DEAD = Problem("it is stuck"), Problem("it is dead", DEAD_S)


@pytest.mark.parametrize(
    ("ticks", "ends"),
    [
        ([(WATCH_S, STUCK)] * 12, False),
        ([(WATCH_S, STUCK)] * 13, True),
        ([(WATCH_S, STUCK)] * 12 + [(WATCH_S, Problem())] + [(WATCH_S, STUCK)] * 12, False),
        ([(WATCH_S, DEAD)] * 2, True),
        ([(3600.0, STUCK)] * 6, False),
    ],
    ids=["not yet", "too long", "it came back", "a dead engine", "the machine slept"],
)
def test_a_process_ends_only_after_a_problem_that_lasted(ticks: list[tuple[float, Problem]], ends: bool) -> None:
    codes: list[int] = []
    now = iter(problem for _, problem in ticks)
    watchdog = Watchdog(lambda: next(now), codes.append)
    for elapsed, _ in ticks:
        watchdog.tick(elapsed)
    assert codes == ([EXIT_CODE] if ends else [])


def test_the_log_says_why_the_process_ended(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(lambda: STUCK, lambda _: None)
    with caplog.at_level(logging.ERROR):
        for _ in range(13):
            watchdog.tick(WATCH_S)
    fields = vars(caplog.records[-1])["fields"]
    assert fields["message"] == f"it is stuck for {STUCK_S + WATCH_S:.0f} s, so the server ends with code {EXIT_CODE}"
    json.dumps(fields)


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_notified_through_its_socket(monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = str(Path(folder, "notify"))
        manager.bind("\0" + path if abstract else path)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + path if abstract else path)
        notify("WATCHDOG=1")
        assert manager.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("WATCHDOG=1")
