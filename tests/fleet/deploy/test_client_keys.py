"""The keys of the gateway's clients on the gateways. The machines are this one with another HOME."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import Host
from disagg.errors import HostLocked, HostUnreachable
from disagg.fleet.changes.locks import locked
from disagg.fleet.deploy.client_keys import deliver_keys, fetch_keys, gateways
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine import interruption
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import Machine
from tests.deadlines import LONG_S
from tests.fleet.facts.fixture_facts import fleet, front, spark


def test_the_keys_of_every_deployed_gateway_are_fetched_and_replaced_and_one_s_failure_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lost, bare, here = (front(name=name) for name in ("lost", "bare", "here"))
    hosts = gateways(fleet(spark(), front(), lost, bare, replace(here, connector="local")))
    folder = tmp_path / ".disagg/hosts/front"
    (folder / "releases" / ("a" * 16)).mkdir(parents=True)
    (folder / "current").symlink_to(f"releases/{'a' * 16}")

    def connect(host: Host) -> Machine:
        if host.name == "lost":
            raise HostUnreachable("lost: no route")
        return LocalMachine(host.name)

    none_yet = {outcome.host.name: outcome.value for outcome in fetch_keys(hosts, connect)}
    assert none_yet == {"front": b"", "lost": None, "bare": None}
    outcomes = {
        outcome.host.name: outcome for outcome in deliver_keys(hosts, lambda name, there: there + b"{}", connect)
    }
    assert set(outcomes) == {"front", "lost", "bare"}
    assert outcomes["front"].value is True and outcomes["bare"].value is False
    assert isinstance(outcomes["lost"].error, HostUnreachable)
    assert (folder / "keys.json").read_bytes() == b"{}"
    assert (folder / "keys.json").stat().st_mode & 0o777 == 0o600
    fetched = {outcome.host.name: outcome for outcome in fetch_keys(hosts, connect)}
    assert fetched["front"].value == b"{}" and isinstance(fetched["lost"].error, HostUnreachable)


def test_keys_are_delivered_when_another_command_has_released_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".disagg/hosts/front"
    (folder / "releases" / ("a" * 16)).mkdir(parents=True)
    (folder / "current").symlink_to(f"releases/{'a' * 16}")
    keys = folder / "keys.json"
    with ExitStack() as other:
        other.enter_context(locked(LocalMachine("front"), HostPaths(str(tmp_path), "front"), "keys"))
        (refused,) = deliver_keys([front()], lambda name, there: b"{}", connect_here, wait_s=0.0)
        assert isinstance(refused.error, HostLocked) and not keys.exists()

        def end_of_the_other(seconds: float) -> None:
            keys.write_bytes(b"theirs")
            other.close()

        monkeypatch.setattr(interruption, "sleep", end_of_the_other)
        (delivered,) = deliver_keys([front()], lambda name, there: there + b"+ours", connect_here, wait_s=LONG_S)
    assert delivered.value is True and keys.read_bytes() == b"theirs+ours"


def connect_here(host: Host) -> Machine:
    return LocalMachine(host.name)
