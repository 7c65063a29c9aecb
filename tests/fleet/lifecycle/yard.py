"""Deployed hosts that are this machine with another HOME, with the real supervisor and fake servers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from disagg.config import Fleet
from disagg.fleet.deploy.release import run_script
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.server import read_server_facts
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.services import supervise
from tests.fleet.farm import FAKE, make_fleet
from tests.programs import need


class Yard:
    """A fleet of deployed fakes, all on this machine; `deploy` makes a release that behaves as its parameter says."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        need("ps")
        self.home = folder / "home"
        self.home.mkdir()
        self.fleet = make_fleet(folder, names, connector="ssh")
        self.state = State.of(self.fleet, folder / "state")
        self.state.tokens.ensure()[0]
        self.progress: list[tuple[str, str]] = []

    def note(self, host: str, doing: str) -> None:
        self.progress.append((host, doing))

    def lifecycle(self, fleet: Fleet | None = None) -> FleetServers:
        return FleetServers(
            fleet or self.fleet, self.state, report=self.note, connect=lambda host: LocalMachine(host.name)
        )

    def own(self, name: str) -> Path:
        return self.home / ".disagg/hosts" / name

    def deploy(self, name: str, behaviour: str = "serve", release: str = "a" * 16) -> None:
        host, own = self.fleet.hosts[name], self.own(name)
        paths = HostPaths(str(self.home), name)
        folder = own / "releases" / release
        folder.mkdir(parents=True)
        (own / "logs").mkdir(exist_ok=True)
        (own / "token").write_text(self.state.tokens.current + "\n")
        script = run_script(paths, host, sys.executable)
        fake = [sys.executable, "-P", str(FAKE), name, host.model, host.address, str(host.port), behaviour]
        fake += ["--config", f"{folder}/hosts.toml", "--host", name]  # as a real server's command line ends
        (folder / "run").write_text(script[: script.rindex("exec ")] + f"unset PYTHONPATH\nexec {shlex.join(fake)}\n")
        start = f'exec {shlex.join([sys.executable, "-P", "-S", supervise.__file__])} "$1" {shlex.quote(str(own))}\n'
        (folder / "supervise").write_text(start)
        link = own / "current"
        link.unlink(missing_ok=True)
        link.symlink_to(f"releases/{release}")

    def pid(self, name: str) -> int | None:
        return read_server_facts(LocalMachine(name), name, None).pid

    def states(self) -> dict[str, str]:
        return {status.host: status.state for status in poll(self.fleet, self.state.tokens.current, self.state)}
