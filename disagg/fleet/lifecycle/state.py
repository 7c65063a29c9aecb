"""The state of a fleet on this machine between two commands: one private folder per hosts.toml.

$XDG_STATE_HOME/disagg/<fleet name>-<hash of the file's path>/     mode 0700
    path          the path of hosts.toml
    <host>.pid    the process that is this host's server (JSON)
    <host>.log    output of that process; <host>.log.1 is the run before, or what was written before the log was full
    <host>.audit  which commands changed the host, when, by whom
    <host>/       of a host with several models: the logs of their processes, and what its keeper keeps
    lock          kept by the command that starts or stops servers, rolls out or rotates the token
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from disagg.config import Fleet, Host, slug
from disagg.errors import DisaggError, FleetError
from disagg.fleet.changes.audit import audit_file
from disagg.fleet.changes.state_files import locked_file, reported, write_private
from disagg.fleet.facts.paths import MODEL_LOGS
from disagg.fleet.lifecycle.loglines import end_of_run, failure_of_start
from disagg.fleet.machine import process as local
from disagg.fleet.tokens.here import OwnTokens
from disagg.token import state_folder

_LOG_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A server process that disagg started. identity: distinguishes it from a later process with the same pid. config:
    digest of the part of hosts.toml it was started with."""

    host: str
    pid: int
    identity: str
    config: str

    @property
    def runs(self) -> bool:
        return local.identity(self.pid) == self.identity


@dataclass(frozen=True, slots=True)
class State:
    """A fleet's state folder, and its tokens on this machine."""

    folder: Path
    tokens: OwnTokens

    @staticmethod
    def of(fleet: Fleet, root: Path | None = None) -> State:
        """The state of this fleet. Creates nothing. `root` replaces the user's state folder."""
        folder = state_folder(fleet) if root is None else root / state_folder(fleet).name
        return State(folder, OwnTokens.of(fleet, folder if root is not None else None))

    def prepare(self, fleet: Fleet) -> None:
        """Create the folder, and the token unless hosts.toml names a file for it. ConfigError if it is unusable."""
        self._make()
        with suppress(FleetError):  # on a full disk, a fleet without its path still works
            write_private(self._path_file, f"{fleet.path.resolve()}\n")
        self.tokens.ensure()

    @property
    def shown(self) -> str:
        """The hosts.toml of the fleet that this is the state of, as a path; the folder's name if that is unknown."""
        with suppress(OSError, UnicodeDecodeError):
            return self._path_file.read_text(encoding="utf-8").strip() or self.folder.name
        return self.folder.name

    def exists(self) -> bool:
        """Whether this fleet was ever started from this machine."""
        with reported(self.folder):
            return self.folder.exists()

    def others(self) -> list[State]:
        """The states of this user's other fleets that have a record of a server process."""
        root = self.folder.parent
        with reported(root):
            folders = {path.parent for path in root.glob("*/*.pid")} - {self.folder}
        return [State(folder, OwnTokens(folder / "token")) for folder in sorted(folders)]

    def log_file(self, host: str) -> Path:
        """The log of the host's server."""
        return self.folder / f"{host}.log"

    def model_log(self, host: Host) -> Path:
        """The log of the process of one model of a host with several."""
        return self.folder / host.keeper / MODEL_LOGS / f"{slug(host.model)}.log"

    def audit_file(self, host: str) -> Path:
        """The audit of a local host."""
        return audit_file(self.folder, host)

    def record(self, record: ProcessRecord) -> None:
        """Write the record of a started process."""
        write_private(self._pid_file(record.host), json.dumps(asdict(record)) + "\n")

    def recorded(self, host: str) -> ProcessRecord | None:
        """The process last started for this host, whether or not it still runs. FleetError if it cannot be read."""
        path = self._pid_file(host)
        try:
            with reported(path), suppress(FileNotFoundError):
                return ProcessRecord(**json.loads(path.read_text(encoding="utf-8")))
            return None
        except (ValueError, TypeError) as error:
            raise FleetError(f"{path} is damaged: {error}", f"end {host}'s server yourself, then: rm {path}") from error

    def running_pid(self, host: str) -> int | None:
        """The process last started for this host, if it still runs."""
        record = self.recorded(host)
        return record.pid if record is not None and record.runs else None

    def recorded_hosts(self) -> list[str]:
        """Hosts with a record, also those that hosts.toml no longer has."""
        with reported(self.folder):
            return sorted(path.name.removesuffix(".pid") for path in self.folder.glob("*.pid"))

    def drop_record(self, host: str) -> None:
        """Delete the record of a process that has ended."""
        path = self._pid_file(host)
        with reported(path):
            path.unlink(missing_ok=True)

    def log_tail(self, host: str, lines: int = 50) -> list[str]:
        """The last lines of the host's log."""
        return _tail(self.log_file(host))[-lines:]

    def end_of_run(self, host: str) -> str:
        """Why the host's server has ended, by the log that `log_with_reason` names; empty if it states no reason."""
        return end_of_run(_tail(self.log_with_reason(host)))

    def failed_start(self, host: str) -> DisaggError | None:
        """Why the host's server could not start, by its log; None if it could when it was started last."""
        return failure_of_start(host, _tail(self.log_file(host)))

    def log_with_reason(self, host: str) -> Path:
        """The file that has the last lines of the host's server: its log, or the one before if its log is empty. A log
        is empty if it was begun anew just before, or if the disk was full by then."""
        log = self.log_file(host)
        before = log.with_name(log.name + ".1")
        with reported(log):
            empty = not log.exists() or log.stat().st_size == 0
            return before if empty and before.is_file() else log

    @contextmanager
    def locked(self, why: str) -> Iterator[None]:
        """Hold the fleet's lock, so that two commands do not interleave. HostLocked names the command that holds it.
        why: this command."""
        self._make()
        with locked_file(self.folder / "lock", why):
            yield

    def _make(self) -> None:
        with reported(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def _path_file(self) -> Path:
        return self.folder / "path"

    def _pid_file(self, host: str) -> Path:
        return self.folder / f"{host}.pid"


class StartedElsewhere(NamedTuple):
    """hosts_file: the hosts.toml of the fleet that has started it. host: its name there."""

    hosts_file: str
    host: str

    @property
    def stop_command(self) -> str:
        return f"disagg stop --config {shlex.quote(self.hosts_file)} --host {self.host}"


def started_elsewhere(state: State, host: Host, port: int | None = None) -> StartedElsewhere | None:
    """What listens on a local host's port if another fleet of this user has started it. state: of the host's fleet.
    port: another port of the host."""
    if not host.server_kind.spawned:
        return None
    with suppress(FleetError):  # of a folder that cannot be read
        for other in state.others():
            for name in other.recorded_hosts():
                if _has_started(other, name, port or host.port):
                    return StartedElsewhere(other.shown, name)
    return None


def _has_started(state: State, name: str, port: int) -> bool:
    """Whether the fleet of this state has started what listens on the port, as this host. False if its record is
    damaged."""
    with suppress(FleetError):
        record = state.recorded(name)
        return record is not None and record.runs and local.listens(record.pid, port)
    return False


def _tail(path: Path) -> list[str]:
    """The last lines of a log, empty if there is none."""
    with reported(path), suppress(FileNotFoundError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        return log.read().decode("utf-8", "replace").splitlines()
    return []
