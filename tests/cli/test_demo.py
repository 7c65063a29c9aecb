from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg.config import Fleet, load
from disagg.errors import ServerUnavailable
from disagg.fleet.lifecycle import fleet_servers, temporary
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.machine import process as local
from disagg.inference import client
from tests.cli.answers import FakeClient
from tests.cli.commandline import run, write_fleet
from tests.fleet.yards import fake_server

SIGNALLED = Path(__file__).with_name("signalled.py")


@dataclass
class Stage:
    """The demo with fake servers and a fake client: what it started, and how to misbehave."""

    behaviour: dict[str, str] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    fleets: list[Fleet] = field(default_factory=list)
    client: type[FakeClient] = FakeClient

    def argv(self, fleet: Any, host: Any) -> tuple[list[str], dict[str, str]]:
        self.fleets.append(fleet)
        how = self.behaviour.get(host.name, "serve")
        return fake_server(host, how), {}


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> Stage:
    class Client(FakeClient):
        pass

    stage, real_spawn = Stage(client=Client), local.spawn

    def spawn(*arguments: Any, **options: Any) -> int:
        stage.pids.append(real_spawn(*arguments, **options))
        return stage.pids[-1]

    monkeypatch.setattr(local, "spawn", spawn)
    monkeypatch.setattr(fleet_servers, "FleetServers", functools.partial(FleetServers, argv=stage.argv))
    monkeypatch.setattr(client, "AsyncClient", Client)
    return stage


def nothing_left(farm: Any) -> bool:
    return bool(farm.pids) and all(local.identity(pid) is None for pid in farm.pids)


def test_the_demo_shows_answers_costs_and_health_and_stops_everything(
    farm: Stage, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    svg = tmp_path / "demo.svg"
    assert run("demo", "--svg", svg) == 0
    out, err = capsys.readouterr()
    for text in ("At the same time", "one after the other", "same answers", "4 of 4 servers healthy"):
        assert text in out
    assert "speedup" not in out and len(out.splitlines()) < 40 and len(err.splitlines()) < 6
    assert "\n  disagg start\n" in out and "\n  disagg init --prefill " in out  # what to do next
    assert "qwen3-demo" in out and "gpt-oss-demo" in out and "servers: starting …" in err
    long = [line for line in out.splitlines() if len(line) > 80]
    assert all(line.startswith(("  export DISAGG_CONFIG=", "  disagg generate ", "The demo's ")) for line in long)
    assert nothing_left(farm) and len(farm.pids) == 4
    assert svg.read_text().startswith("<svg") and "speedup" in svg.read_text()
    assert "DISAGG_CONFIG" not in svg.read_text(), "a picture has no path of the machine that it was drawn on"


def test_the_servers_of_the_demo_are_in_its_session_so_that_what_computes_waits_for_it(farm: Stage) -> None:
    found: set[tuple[bool, bool]] = set()

    def note(model: Any) -> None:
        found.update((os.getsid(pid) == os.getsid(0), os.getpgid(pid) == pid) for pid in farm.pids)

    farm.client.on_stream = staticmethod(note)
    assert run("demo", "--json") == 0
    assert found == {(True, True)}


def test_json_is_one_object_on_stdout(farm: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--json", "--prompt", "x") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["prompt"] == "x" and [r["model"] for r in body["together"]] == ["qwen3-demo", "gpt-oss-demo"]
    assert body["comparison"]["same_text"] is True and len(body["health"]) == 4
    assert body["comparison"]["speedup"] == pytest.approx(
        body["comparison"]["sequential_sum"] / body["comparison"]["parallel_wall"]
    )


def test_a_server_that_does_not_start_stops_all_the_others(farm: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    farm.behaviour["decode-2"] = "crash"
    assert run("demo") == 1
    assert "error: decode-2 did not start: no weights in /models/x" in capsys.readouterr().err
    assert nothing_left(farm) and len(farm.pids) == 4


def test_a_request_that_fails_stops_everything(farm: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(model: Any) -> None:
        raise ServerUnavailable("Decode server unavailable - request failed")

    farm.client.on_stream = staticmethod(fail)
    assert run("demo") == 4
    assert nothing_left(farm) and "Decode server unavailable" in capsys.readouterr().err


@pytest.mark.usefixtures("a_hangup_ends_programs")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_everything(tmp_path: Path, number: Any, code: int) -> None:
    pids = tmp_path / "pids"
    demo = subprocess.run(
        [sys.executable, str(SIGNALLED), str(number.value), str(pids), "demo"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert demo.returncode == code, demo.stderr
    assert "Traceback" not in demo.stderr
    spawned = [int(line) for line in pids.read_text().split()]
    assert len(spawned) == 4 and all(local.identity(pid) is None for pid in spawned)


def test_ports_that_are_taken_are_replaced(farm: Stage, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    packaged = load(Path(disagg.__file__).parent / "demo" / "hosts.toml")
    port = packaged.hosts["prefill-1"].port
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # something else on this machine may have it already: as good
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert run("demo") == 0
    assert f"port {port} is in use here; using " in capsys.readouterr().err
    used = farm.fleets[0]
    assert used.hosts["prefill-1"].port != port
    assert used.hosts["decode-1"].model == packaged.hosts["decode-1"].model
    assert used.models == packaged.models


def test_a_fleet_given_by_config_keeps_its_ports(
    farm: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_fleet(tmp_path)
    taken = load(path).hosts["prefill-1"].port
    with socket.create_server(("127.0.0.1", taken)):
        assert run("--config", path, "demo") == 1
    assert f"port {taken} on 127.0.0.1 is in use" in capsys.readouterr().err
    assert all(local.identity(pid) is None for pid in farm.pids)


def test_an_empty_prompt_starts_nothing(farm: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--prompt", "") == 2
    assert farm.pids == [] and "is empty" in capsys.readouterr().err


def test_a_server_that_loads_too_long_is_said_to_be_stopped(farm: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    farm.behaviour["decode-2"] = "slow"
    assert run("demo", "--timeout", "1") == 1
    err = capsys.readouterr().err
    assert re.search(r"error: \S+ was not ready after 1 s; all servers were stopped", err)
    assert "left running" not in err and "disagg logs" not in err and "disagg demo --timeout 180" in err
    assert nothing_left(farm)


class Thief:
    """Takes a port of the demo's fleet once the demo has chosen its ports, `times` times."""

    def __init__(self, times: int) -> None:
        self.times, self.held = times, contextlib.ExitStack()
        self.stolen: list[int] = []

    def after(self, choose: Any) -> Callable[..., Any]:
        def chosen(*arguments: Any, **options: Any) -> Any:
            fleet, moved = choose(*arguments, **options)
            if len(self.stolen) < self.times:
                host = fleet.hosts["prefill-2"]
                self.held.enter_context(socket.create_server((host.address, host.port)))
                self.stolen.append(host.port)
            return fleet, moved

        return chosen


@pytest.mark.parametrize(("times", "code"), [(1, 0), (2, 0), (3, 1)])
def test_a_port_lost_to_another_program_moves_the_demo_elsewhere_twice(
    farm: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], times: int, code: int
) -> None:
    thief = Thief(times)
    monkeypatch.setattr(temporary, "with_free_ports", thief.after(temporary.with_free_ports))
    with thief.held:
        assert run("demo") == code
    err = capsys.readouterr().err
    assert err.count("trying again on other ports") == min(times, 2)
    assert (f"port {thief.stolen[-1]} on 127.0.0.1 is in use" in err) == (code == 1)
    assert nothing_left(farm)


def test_a_server_that_meets_anothers_on_its_port_moves_the_demo_too(
    farm: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one listens only after the look at the port, so no PortInUse tells of it."""
    thief = Thief(1)
    monkeypatch.setattr(temporary, "with_free_ports", thief.after(temporary.with_free_ports))
    monkeypatch.setattr(local, "port_taken", lambda address, port: False)
    with thief.held:
        assert run("demo") == 0
    assert "trying again on other ports" in capsys.readouterr().err and nothing_left(farm)
