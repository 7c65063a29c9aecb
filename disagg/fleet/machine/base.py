"""A machine as the fleet reaches it: run a command, move files, nothing else.

`ssh.py` reaches one over SSH, `local.py` is this machine; a new way is one new file. Commands are argv lists; the
implementation quotes them, so that no value of hosts.toml is ever read by a shell as anything but itself. A script is
POSIX sh, given on standard input to `sh -s`, with its parameters as argv ($1, $2, ...): never pasted into its text.

Commands begin in the user's home folder. The paths that `put_tree`, `write` and `read` take are absolute, below that
folder, or begin with `~/`; argv is passed as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

MAX_OUTPUT: Final = 1 << 18
"""Bytes kept of each end of what a command writes, per stream."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A finished command. stdout, stderr: decoded as UTF-8 with replacement, at most `MAX_OUTPUT` bytes of each end."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.code == 0


class Machine(Protocol):
    """One machine. Safe to use from one thread at a time; `close` from any."""

    @property
    def name(self) -> str:
        """The host's name in hosts.toml."""
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        script: str | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> CommandResult:
        """Run a command to its end. script: POSIX sh that argv are the parameters of (`sh -s -- argv...`).

        environment: added to the login environment, through the script's standard input, never through argv.
        on_line: told every line of output as it comes, both streams. On timeout or interruption the remote process
        group is killed. Raises HostUnreachable where the link breaks, FleetError on timeout; a non-zero exit is a
        CommandResult.
        """
        ...

    def put_tree(self, files: Mapping[str, bytes | Path], target: str, *, timeout: float = 600.0) -> int:
        """Put files (relative POSIX path -> content) below the folder `target`, in one stream; bytes sent.

        The folder appears whole or not at all: it is filled beside its place and renamed there; one that is there is
        replaced. Modes 0644/0755 by whether a Path is executable; parents are made. Raises CommandFailed with the
        machine's words where it cannot: disk full, read-only, not permitted.
        """
        ...

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write one file atomically; parents are made. The content never appears in an argument list, and the mode
        holds before there is content. Raises CommandFailed."""
        ...

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        """A file's content, at most `limit` bytes of its end; None where there is no such file. CommandFailed where
        it cannot be read."""
        ...

    def close(self) -> None:
        """Close the connection; a command that still runs is killed."""
        ...
