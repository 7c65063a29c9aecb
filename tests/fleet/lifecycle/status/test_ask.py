from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from disagg.config import served_digest
from disagg.errors import UsageError
from disagg.fleet.lifecycle.local import LocalServer
from disagg.fleet.lifecycle.status import ask
from disagg.fleet.lifecycle.status.ask import poll
from disagg.fleet.lifecycle.status.host_status import exit_code
from disagg.fleet.machine import process as local
from disagg.version import code_hash
from tests.deadlines import wait_until
from tests.fleet.yards import Farm
from tests.fleets import RunningFleet
from tests.values import present


def states(farm: Farm, **options: Any) -> Any:
    return {status.host: status for status in poll(farm.fleet, farm.state.tokens.current, farm.state, **options)}


@pytest.fixture
def prepared(farm: Farm) -> Farm:
    farm.state.prepare(farm.fleet)
    return farm


def test_a_healthy_fleet_tells_what_its_servers_say(farm: Farm) -> None:
    farm.lifecycle.start()
    statuses = states(farm)
    assert [s.state for s in statuses.values()] == ["healthy", "healthy"] and exit_code(list(statuses.values())) == 0
    a = statuses["a"]
    assert (a.queue, a.running, a.kv_bytes, a.backend, a.version) == (1, 2, 3 << 20, "fake/cpu", "0.1.0")
    assert a.kv_held_bytes == 1 << 20
    assert (a.senders["dgx"].accepted, a.senders["dgx"].refuted, a.senders["dgx"].highest) == (7, 1, 0.02)
    assert present(a.memory).total == 128 << 30 and a.device.cpu_percent == 25.0 and present(a.counters).requests == 7
    assert a.why == "" and a.hint == ""


def test_a_host_that_was_never_started_names_the_command(prepared: Farm) -> None:
    a = states(prepared)["a"]
    assert (a.state, a.hint) == ("not running", "disagg start --host a")
    assert a.why == f"nothing listens on 127.0.0.1:{prepared.fleet.hosts['a'].port}"
    assert exit_code([a]) == 3


def test_a_loading_and_a_broken_server_say_why(farm: Farm) -> None:
    farm.behaviour = {"a": "slow", "b": "broken"}
    farm.lifecycle.start(["a"], timeout_s=0)
    LocalServer(
        farm.fleet, farm.fleet.hosts["b"], farm.state, farm.argv
    ).start()  # a failed start would end it, and here it must go on
    wait_until(lambda: states(farm)["a"].why == "the model is still loading")
    wait_until(lambda: states(farm)["b"].state == "failed")
    b = states(farm)["b"]
    assert b.why == "its engine does not work" and b.hint.startswith("read its log: ")
    assert exit_code(list(states(farm).values())) == 3


def test_a_server_killed_from_outside_is_failed_with_its_last_error(farm: Farm) -> None:
    farm.lifecycle.start(["a"])
    pid = present(farm.state.recorded("a")).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: local.identity(pid) is None)
    log = farm.state.log_file("a")
    assert states(farm)["a"].why == f"its process was killed: no reason in {log}"
    log.write_text('{"level": "error", "code": "ModelError", "message": "out of memory"}\n')
    assert states(farm)["a"].why == f"its process has ended: out of memory; see {log}"
    assert states(farm)["a"].hint == "disagg start --host a"


def test_a_server_that_did_not_start_says_why_until_it_is_started_again(farm: Farm) -> None:
    farm.behaviour["a"] = "crash"
    farm.lifecycle.start(["a"])
    a = states(farm)["a"]
    assert (a.state, a.why) == ("failed", "it did not start: no weights in /models/x")
    assert a.hint == "fetch them; then: disagg start --host a"
    farm.behaviour.clear()
    farm.lifecycle.start(["a"])
    farm.lifecycle.stop(["a"])
    assert states(farm)["a"].state == "not running"


def test_after_an_end_on_a_full_disk_the_log_with_the_reason_is_named(farm: Farm) -> None:
    farm.lifecycle.start(["a"])
    pid = present(farm.state.recorded("a")).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: local.identity(pid) is None)
    log = farm.state.log_file("a")
    before = log.with_name("a.log.1")
    before.write_text("plain words\n")
    log.write_text("")
    assert states(farm)["a"].why == f"its process has ended: plain words; see {before}"
    before.write_text('{"level": "error", "code": "FleetError", "message": "No space left on device"}\n')
    assert states(farm)["a"].why == f"its process has ended: No space left on device; see {before}"


def test_a_stalled_server_is_shown_as_such(farm: Farm) -> None:
    farm.behaviour = {"a": "stalled"}
    farm.lifecycle.start(["a"], timeout_s=0)
    wait_until(lambda: states(farm)["a"].state == "stalled")
    a = states(farm)["a"]
    assert "makes no progress" in a.why and a.hint == "disagg restart --host a" and exit_code([a]) == 3


def test_a_process_that_runs_but_does_not_answer_is_silent(farm: Farm) -> None:
    farm.behaviour["a"] = "mute"
    farm.lifecycle.start(["a"], timeout_s=0)
    wait_until(lambda: states(farm, timeout_s=0.3)["a"].state == "silent")
    assert states(farm, timeout_s=0.3)["a"].hint == "disagg restart --host a"


def test_a_machine_that_takes_the_connection_and_says_nothing_is_silent_in_bounded_time(prepared: Farm) -> None:
    prepared.use(replace(prepared.fleet, hosts={"a": replace(prepared.fleet.hosts["a"], connector="ssh")}))
    with socket.create_server(("127.0.0.1", prepared.fleet.hosts["a"].port)):
        a = states(prepared, names=["a"], timeout_s=0.3)["a"]
    assert a.state == "silent" and "did not answer within 0.3 s" in a.why
    assert exit_code([a]) == 3


def test_a_name_that_does_not_resolve_is_unreachable(prepared: Farm) -> None:
    far = replace(prepared.fleet.hosts["a"], address="no-such-host.invalid", connector="ssh")
    prepared.use(replace(prepared.fleet, hosts={"a": far}))
    prepared.state.prepare(prepared.fleet)
    a = states(prepared)["a"]
    assert (a.state, a.hint) == ("unreachable", "ping no-such-host.invalid")


def test_another_program_on_the_port_is_named(prepared: Farm) -> None:
    port = prepared.fleet.hosts["a"].port
    ready = threading.Event()
    stop = threading.Event()

    async def other_program() -> None:
        async def answer(reader: Any, writer: Any) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", port):
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(other_program(),))
    thread.start()
    ready.wait(30)
    a = states(prepared)["a"]
    stop.set()
    thread.join()
    assert a.state == "foreign" and f"(pid {os.getpid()})" in a.why


def test_a_server_of_another_host_on_the_port_is_foreign(farm: Farm) -> None:
    farm.lifecycle.start(["a"])
    swapped = {"b": replace(farm.fleet.hosts["b"], port=farm.fleet.hosts["a"].port)}
    b = poll(replace(farm.fleet, hosts=swapped), farm.state.tokens.current, farm.state)[0]
    assert b.state == "foreign" and "is a serving tiny, not b serving tiny" in b.why


def test_a_server_that_refuses_the_token_is_unauthorised(farm: Farm) -> None:
    farm.lifecycle.start(["a"])
    a = poll(farm.fleet, "another token", farm.state, ["a"])[0]
    assert a.state == "unauthorised" and "put the same token file on both machines" in a.hint


def test_a_loading_server_that_does_not_take_the_token_is_unauthorised_and_not_foreign(farm: Farm) -> None:
    farm.behaviour["a"] = "slow"
    farm.lifecycle.start(["a"], timeout_s=0)
    wait_until(lambda: states(farm)["a"].why == "the model is still loading")
    for token, why, hint in (
        ("another token", "does not prove that it has", "put the same token file"),
        (None, "reports only that it is loading", "disagg start"),
    ):
        a = poll(farm.fleet, token, farm.state, ["a"])[0]
        assert a.state == "unauthorised" and why in a.why and hint in a.hint


def farm_http(farm: Farm) -> httpx.Client:
    return httpx.Client(base_url=farm.fleet.hosts["a"].url, trust_env=False, verify=False)


def keys(body: object) -> object:
    """The names in a JSON object, at every depth, except where names are data."""
    if not isinstance(body, dict):
        return None
    return {
        name: None if name in ("versions", "last_error", "senders") else keys(value) for name, value in body.items()
    }


@pytest.mark.parametrize("path", ["/health", "/status"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_fake_server_answers_with_the_keys_of_a_real_one(
    farm: Farm, tiny_fleet: RunningFleet, path: str, role: str
) -> None:
    farm.lifecycle.start(["a"])
    headers = {"Authorization": f"Bearer {farm.state.tokens.current}"}
    with tiny_fleet.http(f"tiny-{role}") as real, farm_http(farm) as fake:
        assert keys(fake.get(path, headers=headers).json()) == keys(real.get(path).json())
        assert fake.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("changed", "state", "why"),
    [
        ({"field_of_a_later_version": 1}, "healthy", ""),
        ({"uptime_s": "long"}, "foreign", "answers, but not as a disagg server (uptime_s: expected float, got str"),
        ({"uptime_s": "long", "version": "0.0.1"}, "failed", "it runs disagg 0.0.1, whose answers disagg "),
        ({"preflight": [{"component": "rope", "status": "mended"}], "version": "0.0.1"}, "failed", "it runs disagg 0"),
    ],
)
def test_an_answer_of_another_version_is_read_as_far_as_it_fits_the_types(
    prepared: Farm, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], state: str, why: str
) -> None:
    report = {"status": "ok", "host": "a", "model": "tiny", "role": "prefill", **changed}
    monkeypatch.setattr(ask, "get", lambda *_: (200, report))
    a = states(prepared, names=["a"])["a"]
    assert a.state == state and why in a.why


def test_an_older_server_without_the_newer_fields_is_healthy(prepared: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"status": "ok", "host": "a", "model": "tiny", "role": "prefill", "version": "0.0.1"}
    monkeypatch.setattr(ask, "get", lambda *_: (200, report))
    assert states(prepared, names=["a"])["a"].state == "healthy"


def test_two_versions_serving_one_model_are_reported_on_the_second(farm: Farm) -> None:
    farm.behaviour["b"] = "older"
    farm.lifecycle.start()
    statuses = states(farm)
    assert statuses["a"].ok
    assert (statuses["b"].state, statuses["b"].why) == ("failed", "its version of tiny differs from a's")


def test_an_unknown_host_is_a_usage_error(prepared: Farm) -> None:
    with pytest.raises(UsageError, match="no host c"):
        states(prepared, names=["c"])


def test_errno_65_of_macos_names_its_local_network_setting(prepared: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(ask, "get", blocked)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(sysname="Darwin"))
    a = states(prepared)["a"]
    assert a.state == "unreachable" and "No route to host" in a.why and "Local Network" in a.hint


def test_a_server_with_other_code_or_settings_is_healthy_with_a_remark(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    farm.lifecycle.start(["a"])
    real: Callable[..., Any] = vars(ask)["get"]
    host = farm.fleet.hosts["a"]
    stated: dict[str, Any] = {"code": code_hash(), "config": served_digest(farm.fleet, host)}

    def stating(*arguments: Any) -> tuple[Any, ...]:
        code, answer = real(*arguments)
        return code, {**answer, **stated}

    monkeypatch.setattr(ask, "get", stating)
    assert states(farm)["a"].why == ""
    stated["code"] = "another"
    a = states(farm)["a"]
    assert (a.state, a.why) == ("healthy", "running other code than here")
    assert a.hint == "disagg restart --host a" and exit_code([a]) == 0
    stated["config"] = "another"
    a = states(farm)["a"]
    assert (a.state, a.why) == ("healthy", "it runs other settings than hosts.toml here") and exit_code([a]) == 1
    stated["config"] = served_digest(farm.fleet, host)
    stated["pending"] = {"release": "b" * 16, "since": 1_772_373_900.0}
    a = states(farm)["a"]
    assert a.why.startswith("release bbbbbbbb pending since 2026-03-01 ") and a.hint == "disagg restart --host a"


def test_a_damaged_record_is_the_trouble_of_its_own_host(farm: Farm) -> None:
    farm.lifecycle.start(["b"])
    (farm.state.folder / "a.pid").write_text("{")
    seen = states(farm)
    (farm.state.folder / "a.pid").unlink()
    assert (seen["a"].state, seen["b"].state) == ("failed", "healthy")
    assert "a.pid is damaged" in seen["a"].why and "rm " in seen["a"].hint


def test_a_program_that_has_the_port_of_a_host_that_was_not_started_and_says_nothing_is_named(prepared: Farm) -> None:
    port = prepared.fleet.hosts["a"].port
    with socket.create_server(("127.0.0.1", port)):
        a = poll(prepared.fleet, prepared.state.tokens.current, prepared.state, ["a"], timeout_s=0.3)[0]
    assert a.state == "foreign" and f"(pid {os.getpid()})" in a.why
    assert a.hint == "stop that process, or give a another port in hosts.toml"
