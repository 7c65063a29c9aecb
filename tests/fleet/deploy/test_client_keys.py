"""The keys of the gateway's clients on their way to the gateways. The machines are this one with another HOME."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import Host
from disagg.errors import HostUnreachable
from disagg.fleet.deploy.client_keys import deliver_keys
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.local import LocalMachine
from disagg.token import keys_path
from tests.fleet.facts.fixture_facts import fleet, front, spark


def test_every_deployed_gateway_gets_the_keys_and_one_s_failure_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    lost, bare, here = (front(name=name) for name in ("lost", "bare", "here"))
    of = fleet(spark(), front(), lost, bare, replace(here, connector="local"))
    keys_path(of).parent.mkdir(parents=True)
    keys_path(of).write_bytes(b"{}")
    folder = tmp_path / ".disagg/hosts/front"
    (folder / "releases" / ("a" * 16)).mkdir(parents=True)
    (folder / "current").symlink_to(f"releases/{'a' * 16}")

    def connect(host: Host) -> Machine:
        if host.name == "lost":
            raise HostUnreachable("lost: no route")
        return LocalMachine(host.name)

    outcomes = {outcome.host.name: outcome for outcome in deliver_keys(of, connect)}
    assert set(outcomes) == {"front", "lost", "bare"}
    assert outcomes["front"].value is True and outcomes["bare"].value is False
    assert isinstance(outcomes["lost"].error, HostUnreachable)
    assert (folder / "keys.json").read_bytes() == b"{}"
    assert (folder / "keys.json").stat().st_mode & 0o777 == 0o600
