"""The state of a fleet on this machine between two commands: one private folder per hosts.toml.

$XDG_STATE_HOME/disagg/<fleet name>-<hash of the file's path>/     mode 0700
    path          the path of hosts.toml
    <host>.pid    the process that is this host's server (JSON)
    <host>.log    output of that process; <host>.log.1 is the run before, or what was written before the log was full
    <host>.audit  which commands changed the host, when, by whom
    lock          held by the command that starts or stops servers, rolls out or rotates the token
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from disagg.config import Fleet, Host
from disagg.errors import ConfigError, FleetError, HostLocked
from disagg.files import create_file, replace_file
from disagg.fleet.changes.audit import audit_file
from disagg.fleet.changes.lock import LockHolder
from disagg.fleet.lifecycle.loglines import end_of_run
from disagg.fleet.machine import process as local
from disagg.token import (
    TOKEN_FILE_VARIABLE,
    earlier_token_paths,
    made_token_path,
    named_token_path,
    parse_tokens,
    read_tokens,
    state_folder,
    token_digest,
    token_path,
    tokens_text,
)

_LOG_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A server process that disagg started. identity: distinguishes it from a later process with the same pid. config:
    digest of the part of hosts.toml it was started with."""

    host: str
    pid: int
    identity: str
    config: str


@dataclass(frozen=True, slots=True)
class State:
    """A fleet's state folder. makes_token: whether disagg itself makes the token's file, which no setting names."""

    folder: Path
    token_file: Path
    makes_token: bool = False

    @staticmethod
    def of(fleet: Fleet, root: Path | None = None) -> State:
        """The state of this fleet. Creates nothing. `root` replaces the user's state folder."""
        if root is None:
            return State(state_folder(fleet), token_path(fleet), named_token_path(fleet) is None)
        folder = root / state_folder(fleet).name
        return State(folder, fleet.token_file or made_token_path(fleet, folder), fleet.token_file is None)

    def prepare(self, fleet: Fleet) -> None:
        """Create the folder, and the token unless hosts.toml names a file for it. ConfigError if it is unusable."""
        self._make()
        with suppress(FleetError):  # on a full disk, a fleet without its path still works
            _write_private(self._path_file, f"{fleet.path.resolve()}\n")
        self.ensure_tokens()

    def ensure_tokens(self) -> tuple[str, ...]:
        """The fleet's tokens; one is made first unless there is one or a setting names a file for it. ConfigError if
        other users can read them."""
        if self.makes_token and not self.has_token():
            earlier = earlier_token_paths(self.token_file)
            # Several may be of different fleets that have this name.
            self._keep(read_tokens(earlier[0]) if len(earlier) == 1 else (secrets.token_hex(32),), once=True)
        return self.tokens()

    @property
    def has_earlier_token(self) -> bool:
        """Whether `ensure_tokens` takes the token of an earlier version instead of making one."""
        return self.makes_token and len(earlier_token_paths(self.token_file)) == 1

    def require_own_file(self) -> None:
        """ConfigError if the token's file is not disagg's own, and so must not be overwritten."""
        if not self.makes_token:
            hint = f"put the token there yourself, or leave out token_file and ${TOKEN_FILE_VARIABLE}"
            raise ConfigError(f"{self.token_file} was named for the fleet's token, and is not overwritten", hint)

    def adopt_tokens(self, tokens: Sequence[str]) -> None:
        """Make these the fleet's tokens on this machine. The file of those before stays beside it, as token.DIGEST with
        the first 8 digits of the hash of the first one."""
        self.require_own_file()
        if self.has_token():
            with _reported(self.token_file), suppress(FileExistsError):
                before = parse_tokens(self.token_file.read_text(encoding="utf-8", errors="replace"))
                digest = token_digest(before[0] if before else "")
                os.link(self.token_file, self.token_file.with_name(f"{self.token_file.name}.{digest[:8]}"))
        self.write_tokens(tokens)

    def write_tokens(self, tokens: Sequence[str]) -> None:
        """Replace the tokens on this machine, the current one first."""
        self._keep(tokens, once=False)

    @property
    def _next_token_file(self) -> Path:
        return self.token_file.with_name(f"{self.token_file.name}.next")

    def next_token(self) -> str | None:
        """The token that a rotation is about to make current, if one has begun and has not come so far."""
        return read_tokens(self._next_token_file)[0] if self._next_token_file.exists() else None

    @property
    def rotating(self) -> bool:
        """Whether a rotation has begun on this machine and is not finished."""
        return self.has_token() and (self.next_token() is not None or len(self.tokens()) > 1)

    def ensure_next_token(self) -> str | None:
        """The token that a rotation makes current; a new one if none has begun. None if it is current already, and the
        one before has only to be removed."""
        tokens, new = self.tokens(), self.next_token()
        if new == tokens[0]:
            self.drop_next_token()
            return None
        if new is None and len(tokens) == 1:
            _write_private(self._next_token_file, f"{secrets.token_hex(32)}\n", once=True)
            return self.next_token()
        return new

    def drop_next_token(self) -> None:
        """The next token is current now."""
        with _reported(self._next_token_file):
            self._next_token_file.unlink(missing_ok=True)

    def _keep(self, tokens: Sequence[str], once: bool) -> None:
        with _reported(self.token_file):
            self.token_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_private(self.token_file, tokens_text(tokens), once)

    def token(self) -> str:
        """The fleet's current token; ConfigError if there is none."""
        return self.tokens()[0]

    def tokens(self) -> tuple[str, ...]:
        """The fleet's tokens, the current one first; ConfigError if there is none."""
        if self.makes_token and not self.has_token():
            raise ConfigError(
                f"there is no fleet token in {self.token_file}",
                "disagg start makes one for local hosts, disagg deploy for others; on a second machine copy the file",
            )
        return read_tokens(self.token_file)

    def has_token(self) -> bool:
        """Whether the token's file exists, usable or not."""
        with _reported(self.token_file):
            return self.token_file.exists()

    def missing_token_hint(self, host: Host) -> str:
        """How this machine gets the token that a host has. A server that runs takes over what is put into its file."""
        if host.placement.spawned:
            return "disagg start" if self.makes_token else f"put the fleet's token into {self.token_file}"
        return "disagg deploy --adopt-token" if self.makes_token else f"copy the host's token to {self.token_file}"

    @property
    def shown(self) -> str:
        """The hosts.toml of the fleet that this is the state of, as a path; the folder's name if that is unknown."""
        with suppress(OSError, UnicodeDecodeError):
            return self._path_file.read_text(encoding="utf-8").strip() or self.folder.name
        return self.folder.name

    def exists(self) -> bool:
        """Whether this fleet was ever started from this machine."""
        with _reported(self.folder):
            return self.folder.exists()

    def others(self) -> list[State]:
        """The states of this user's other fleets that have a record of a server process."""
        root = self.folder.parent
        with _reported(root):
            folders = {path.parent for path in root.glob("*/*.pid")} - {self.folder}
        return [State(folder, folder / "token") for folder in sorted(folders)]

    def log_file(self, host: str) -> Path:
        """The log of the host's server."""
        return self.folder / f"{host}.log"

    def audit_file(self, host: str) -> Path:
        """The audit of a local host."""
        return audit_file(self.folder, host)

    def record(self, record: ProcessRecord) -> None:
        """Write the record of a started process."""
        _write_private(self._pid_file(record.host), json.dumps(asdict(record)) + "\n")

    def recorded(self, host: str) -> ProcessRecord | None:
        """The process last started for this host, whether or not it still runs. FleetError if it cannot be read."""
        path = self._pid_file(host)
        try:
            with _reported(path), suppress(FileNotFoundError):
                return ProcessRecord(**json.loads(path.read_text(encoding="utf-8")))
            return None
        except (ValueError, TypeError) as error:
            raise FleetError(f"{path} is damaged: {error}", f"end {host}'s server yourself, then: rm {path}") from error

    def recorded_hosts(self) -> list[str]:
        """Hosts with a record, also those that hosts.toml no longer has."""
        with _reported(self.folder):
            return sorted(path.name.removesuffix(".pid") for path in self.folder.glob("*.pid"))

    def drop_record(self, host: str) -> None:
        """Delete the record of a process that has ended."""
        path = self._pid_file(host)
        with _reported(path):
            path.unlink(missing_ok=True)

    def log_tail(self, host: str, lines: int = 50) -> list[str]:
        """The last lines of the host's log."""
        return _tail(self.log_file(host))[-lines:]

    def end_of_run(self, host: str) -> str:
        """Why the host's server has ended, by the log that `log_with_reason` names; empty if it states no reason."""
        return end_of_run(_tail(self.log_with_reason(host)))

    def log_with_reason(self, host: str) -> Path:
        """The file that has the last lines of the host's server: its log, or the one before if its log is empty. A log
        is empty if it was begun anew just before, or if the disk was full by then."""
        log = self.log_file(host)
        before = log.with_name(log.name + ".1")
        with _reported(log):
            empty = not log.exists() or log.stat().st_size == 0
            return before if empty and before.is_file() else log

    @contextmanager
    def locked(self, why: str) -> Iterator[None]:
        """Hold the fleet's lock, so that two commands do not interleave. HostLocked names the command that holds it.
        why: this command."""
        self._make()
        with _locked(self.folder / "lock", why):
            yield

    @contextmanager
    def tokens_locked(self, why: str) -> Iterator[None]:
        """Hold the lock of the token's file, which all clones of the fleet share. HostLocked as of `locked`."""
        with _locked(self.token_file.with_name(f"{self.token_file.name}.lock"), why):
            yield

    def _make(self) -> None:
        with _reported(self.folder):
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
    if not host.placement.spawned:
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
        return record is not None and local.identity(record.pid) == record.identity and local.listens(record.pid, port)
    return False


def _tail(path: Path) -> list[str]:
    """The last lines of a log, empty if there is none."""
    with _reported(path), suppress(FileNotFoundError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        return log.read().decode("utf-8", "replace").splitlines()
    return []


@contextmanager
def _locked(path: Path, why: str) -> Iterator[None]:
    with _reported(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _acquire(descriptor)
        with suppress(OSError):  # the note is only for error messages: on a full disk, stopping must still work
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(LockHolder.this_process(why)).encode(), 0)
        yield
    finally:
        # Not by closing alone: a child that another thread has just forked has the descriptor, too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _acquire(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 400, 0).decode("utf-8", "replace") or "another disagg command holds it"
        raise HostLocked(
            f"the fleet is locked on this machine: {holder}", "nothing was changed; wait until that command has ended"
        ) from None


def _write_private(path: Path, text: str, once: bool = False) -> None:
    """Write a file that only this user can read. once: keep it if another command has created it meanwhile."""
    with _reported(path):
        (create_file if once else replace_file)(path, text.encode())


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a FleetError about this path."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free space on that disk" if full else "check that folder and its owner"
        message = f"cannot use {path}: {error.strerror or error}"
        raise FleetError(message, f"{hint}, or set XDG_STATE_HOME to another folder") from error
