"""The keys of the gateway's clients on the gateways. The machines are this one with another HOME."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import Host
from disagg.errors import HostUnreachable
from disagg.fleet.deploy.client_keys import deliver_keys, fetch_keys, gateways
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.local import LocalMachine
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
    outcomes = {outcome.host.name: outcome for outcome in deliver_keys(hosts, b"{}", connect)}
    assert set(outcomes) == {"front", "lost", "bare"}
    assert outcomes["front"].value is True and outcomes["bare"].value is False
    assert isinstance(outcomes["lost"].error, HostUnreachable)
    assert (folder / "keys.json").read_bytes() == b"{}"
    assert (folder / "keys.json").stat().st_mode & 0o777 == 0o600
    fetched = {outcome.host.name: outcome for outcome in fetch_keys(hosts, connect)}
    assert fetched["front"].value == b"{}" and isinstance(fetched["lost"].error, HostUnreachable)
