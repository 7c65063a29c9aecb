"""Fleets of fake servers on this machine: a Farm of local ones, and a Yard of hosts that were deployed to."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.fleet.deploy.release import release_hash, run_script
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.server import read_server_facts
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.services import supervise
from tests.ports import free_ports
from tests.programs import need

AnyYard = TypeVar("AnyYard", bound="Yard")
ENVIRONMENT = "e" * 16
PLAIN_PATH = "/usr/bin:/bin"
"""For hosts that are this machine: pyenv's shims, one per Python, take five times as long as the rest of a probe."""


def fake_server(host: Host, behaviour: str = "serve") -> list[str]:
    """The command of a server that stands in for the host's, see fake_server.py."""
    program = Path(__file__).with_name("fake_server.py")
    return [sys.executable, "-P", str(program), host.name, host.model, host.address, str(host.port), behaviour]


def connect(host: Host) -> LocalMachine:
    """Every host is this machine, with the HOME that a test has set."""
    return LocalMachine(host.name)


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
        return fake_server(host, self.behaviour.get(host.name, "serve")), {}


class Yard:
    """A fleet of hosts that were deployed to, all on this machine with another HOME, with the real supervisor and fake
    servers. progress: what the lifecycle has reported."""

    def __init__(self, folder: Path, names: tuple[str, ...] = ("a", "b")) -> None:
        need("ps")
        self.home = folder / "home"
        environment = self.home / ".disagg/envs" / ENVIRONMENT
        (environment / "bin").mkdir(parents=True)
        (environment / ".complete").touch()
        (environment / "bin/python").symlink_to(sys.executable)
        self.fleet = make_fleet(folder, names, connector="ssh")
        self.state = State.of(self.fleet, folder / "state")
        self.state.tokens.ensure()
        self.progress: list[tuple[str, str]] = []

    def note(self, host: str, doing: str) -> None:
        self.progress.append((host, doing))

    def lifecycle(self, fleet: Fleet | None = None) -> FleetServers:
        return FleetServers(fleet or self.fleet, self.state, report=self.note, connect=connect)

    def own(self, name: str) -> Path:
        return self.home / ".disagg/hosts" / name

    def release(self, name: str, behaviour: str = "serve", mark: str = "", called: str = "") -> str:
        """Put a release there whose server behaves like this; its name, by default by its content as in `disagg
        deploy`. mark: makes it another one."""
        host, own = self.fleet.hosts[name], self.own(name)
        script = run_script(HostPaths(str(self.home), name), host, sys.executable)
        command = f'{shlex.join(fake_server(host, behaviour))} --config "$release/hosts.toml" --host {name}'
        start = f'exec {shlex.join([sys.executable, "-P", "-S", supervise.__file__])} "$1" {shlex.quote(str(own))}\n'
        files = {
            "run": f"{script[: script.rindex('exec ')]}unset PYTHONPATH\nexec {command} # {mark}\n",
            "supervise": start,
            "environment": f"{ENVIRONMENT}\n",
        }
        release = called or release_hash({path: text.encode() for path, text in files.items()})
        folder = own / "releases" / release
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            (folder / path).write_text(text)
        (own / "logs").mkdir(exist_ok=True)
        (own / "token").write_text(self.state.tokens.current + "\n")
        (own / "token").chmod(0o600)
        return release

    def point(self, release: str, name: str) -> None:
        """Make a release of a host current."""
        link = self.own(name) / "current"
        link.unlink(missing_ok=True)
        link.symlink_to(f"releases/{release}")

    def deploy(self, name: str, behaviour: str = "serve", release: str = "a" * 16) -> None:
        """Put a release of this name there, and make it current."""
        self.point(self.release(name, behaviour, called=release), name)

    def pid(self, name: str) -> int | None:
        return read_server_facts(LocalMachine(name), name, None).pid

    def states(self) -> dict[str, str]:
        return {status.host: status.state for status in poll(self.fleet, self.state.tokens.current, self.state)}


@contextmanager
def deployed_hosts(yard: AnyYard, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnyYard]:
    """The yard while this process has its HOME; what runs on its hosts is stopped at the end."""
    monkeypatch.setenv("HOME", str(yard.home))
    monkeypatch.setenv("PATH", PLAIN_PATH)
    yield yard
    for folder in (yard.home / ".disagg/hosts").glob("*"):
        supervise.stop(folder)
