"""Local fleets of fake servers, started through the real spawn path."""

import sys
from pathlib import Path
from typing import Any

from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State
from tests.ports import free_ports

FAKE = Path(__file__).with_name("fake_server.py")
PLAIN_PATH = "/usr/bin:/bin"
"""For hosts that are this machine: pyenv's shims, one per Python, take five times as long as the rest of a probe."""


def make_fleet(folder: Path, names: tuple[str, ...] = ("a", "b"), **host_fields: object) -> Fleet:
    path = folder / "hosts.toml"
    path.write_text("# a fleet of fakes\n")
    hosts = {}
    for name, port in zip(names, free_ports(len(names)), strict=True):
        fields: dict[str, Any] = {"connector": "local", "service": "process", **host_fields}
        hosts[name] = Host(name, "127.0.0.1", ("prefill",), "tiny", EngineOptions("transformers"), port, **fields)
    models = {"tiny": Model("tiny", {"transformers": "x", "mlx": "x"}, 2048)}
    return Fleet("test", path, models, hosts)


class Farm:
    """A fleet of fakes and the state it lives in; `behaviour` per host, "serve" by default."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.behaviour: dict[str, str] = {}
        self.use(make_fleet(folder))

    def use(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.state = State.of(fleet, self.folder / "state")
        self.lifecycle = FleetServers(fleet, self.state, argv=self.argv, grace_s=3)

    def argv(self, fleet: Fleet, host: Host) -> tuple[list[str], dict[str, str]]:
        behaviour = self.behaviour.get(host.name, "serve")
        return [sys.executable, "-P", str(FAKE), host.name, host.model, host.address, str(host.port), behaviour], {}
