"""The Machine interface: run a command, move files, nothing else.

Implemented by `local.LocalMachine` and `ssh.machine.SSHMachine`. Commands are argv lists; the implementation quotes
them, so that no shell interprets a value of hosts.toml. A script is POSIX sh, sent on standard input to `sh -s`, with
its parameters as argv ($1, $2, ...): never pasted into its text.

Commands start in the user's home folder. The paths that `put_tree`, `write` and `read` take are absolute, relative to
that folder, or start with `~/`; argv is passed unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from disagg.fleet.machine.shell import Fence
from disagg.fleet.machine.upload import OnMoved


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A finished command. stdout, stderr: UTF-8 with replacement, at most MAX_OUTPUT bytes of start and of end."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.code == 0


class Machine(Protocol):
    """One machine. Safe to use from one thread at a time; `close` from any. fences: what everything that runs, writes
    or reads there compares first; the error of one that does not hold is raised."""

    fences: tuple[Fence, ...]

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
        """Run a command to its end. script: POSIX sh with argv as its parameters (`sh -s -- argv...`).

        environment: added to the login environment, through standard input, never through argv. on_line: called with
        every line of output, of both streams, as it arrives. On timeout or interruption the process group is killed.
        Raises HostUnreachable if the connection breaks, FleetError on timeout; a non-zero exit code is no error.
        """
        ...

    def put_tree(
        self,
        files: Mapping[str, bytes | Path],
        target: str,
        *,
        parts: str = "",
        timeout: float = 600.0,
        on_moved: OnMoved = lambda moved, total, sent: None,
    ) -> int:
        """Write files (relative POSIX path -> content) into the folder `target`. Returns the bytes sent.

        parts: a folder beside it, in which large files are gathered: an upload that broke off goes on where it stopped.
        Whoever names it removes it. timeout: seconds from the last bytes that the machine has taken.

        Atomic: the folder is filled under another name and renamed, replacing an existing one. Modes are 0644, or 0755
        for an executable Path; parents are created. Raises CommandFailed with the machine's error: disk full,
        read-only, not permitted.
        """
        ...

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write one file atomically; parents are created. The content appears in no argument list, and the mode is set
        before the content is written. Raises CommandFailed."""
        ...

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        """A file's content, at most `limit` bytes of its end; None if it does not exist. Raises CommandFailed if it
        cannot be read."""
        ...

    def close(self) -> None:
        """Close the connection; a running command is killed. The next call connects again."""
        ...
