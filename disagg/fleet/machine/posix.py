"""The Machine interface on any machine with a POSIX shell; subclasses only execute invocations."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg.errors import CommandFailed, FleetError, HostUnreachable
from disagg.fleet.machine import shell
from disagg.fleet.machine.base import CommandResult
from disagg.fleet.machine.shell import MAX_OUTPUT, OutputStream, last_lines
from disagg.fleet.machine.upload import LargeFile, MovedBytes, OnMoved, Payload, arrived, packed, split

_SMALL_S = 30.0
"""For reading and writing one file."""
_STALLED_S = 60.0
"""For the next piece of a large file."""
_QUOTED_LINES = 5
"""Lines of a command's output that an error message quotes."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One run of `shell.BOOTSTRAP`. program: from `shell.program`. payload: the program's input. timeout: seconds; they
    begin anew whenever the machine takes more of the payload."""

    program: bytes
    stdout: OutputStream
    stderr: OutputStream
    timeout: float
    payload: Payload | None = None

    def due(self, began: float) -> float:
        """When it is too late, by time.monotonic(). began: when it began."""
        return (max(began, self.payload.at) if self.payload is not None else began) + self.timeout


class ShellMachine(ABC):
    """Machine, implemented on one abstract method, `execute`."""

    fences: tuple[shell.Fence, ...] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The host's name in hosts.toml."""

    @abstractmethod
    def execute(self, invocation: Invocation) -> tuple[int, float]:
        """Run an invocation to its end. Returns the exit code (128 + n for signal n) and seconds.

        Raises TimeoutError after `invocation.timeout` and Cancelled if this thread is interrupted, both after killing
        the process group, and HostUnreachable if the connection breaks.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection; a running command is killed."""

    def run(
        self,
        argv: Sequence[str],
        *,
        script: str | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> CommandResult:
        if script is None and not argv:
            raise FleetError("there is no command to run")
        program = shell.program(argv, script, environment, fences=self.fences)
        return self._run(tuple(argv), Invocation(program, OutputStream(on_line), OutputStream(on_line), timeout))

    def put_tree(
        self,
        files: Mapping[str, bytes | Path],
        target: str,
        *,
        parts: str = "",
        timeout: float = 600.0,
        on_moved: OnMoved = lambda moved, total, sent: None,
    ) -> int:
        small, large = split(files) if parts else (dict(files), [])
        with packed(small) as archive:
            moved = MovedBytes(archive.size + sum(file.size for file in large), on_moved)
            sent = self._send_parts(parts, large, moved) if large else 0
            words = [word for file in large for word in (file.part, file.digest(), file.mode, file.name)]
            argv = (target, parts, *words) if large else (target,)
            scripts, payload = ("path.sh", "beside.sh", "put_tree.sh"), Payload(archive.stream, moved.add)
            what = f"cannot put {len(files)} files into {target}"
            self._send(("put_tree", target), argv, scripts, payload, timeout=timeout, what=what)
            return archive.size + sent

    def _send_parts(self, parts: str, large: Sequence[LargeFile], moved: MovedBytes) -> int:
        """Send what the machine does not have of these files; returns the bytes sent."""
        argv, look = [parts, *(file.part for file in large)], shell.script("path.sh", "parts.sh")
        found = self.run(argv, script=look, timeout=_SMALL_S)
        self._require(found, f"cannot use {parts}")
        there, sent = arrived(found.stdout, large), 0
        for file in large:
            offset = there[file.part]
            moved.found(offset)
            if offset == file.size:
                continue
            with file.after(offset) as rest:
                argv, payload = [f"{parts}/{file.part}", str(offset)], Payload(rest, moved.add)
                what = f"cannot send {file.name}"
                self._send(
                    ("put_tree", file.name), argv, ("path.sh", "append.sh"), payload, timeout=_STALLED_S, what=what
                )
            sent += file.size - offset
        return sent

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        argv, scripts = (path, f"{mode:o}", str(len(content))), ("path.sh", "beside.sh", "write.sh")
        self._send(
            ("write", path), argv, scripts, Payload(io.BytesIO(content)), timeout=_SMALL_S, what=f"cannot write {path}"
        )

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        program = shell.program((path, str(limit)), shell.script("path.sh", "read.sh"), fences=self.fences)
        invocation = Invocation(program, OutputStream(keep=max(limit, MAX_OUTPUT)), OutputStream(), _SMALL_S)
        result = self._run(("read", path), invocation)
        if not result.ok and result.stderr.rstrip().endswith(("No such file", "No such file or directory")):
            return None
        self._require(result, f"cannot read {path}")
        return invocation.stdout.content

    def _send(
        self,
        shown: tuple[str, ...],
        argv: Sequence[str],
        scripts: Sequence[str],
        payload: Payload,
        *,
        timeout: float,
        what: str,
    ) -> None:
        """Run a script that takes input. what: the beginning of its error."""
        program = shell.program(argv, shell.script(*scripts), takes_input=True, fences=self.fences)
        self._require(self._run(shown, Invocation(program, OutputStream(), OutputStream(), timeout, payload)), what)

    def _run(self, argv: tuple[str, ...], invocation: Invocation) -> CommandResult:
        try:
            code, seconds = self.execute(invocation)
        except TimeoutError:
            output = last_lines(invocation.stderr.text or invocation.stdout.text, _QUOTED_LINES)
            raise FleetError(
                f"{self.name}: {_shown(argv)} did not end within {invocation.timeout:g} s and was killed"
                + (f"; its last output:\n{output}" if output else ""),
                f"look why it takes so long: disagg ssh {self.name}",
            ) from None
        if (lost := shell.fenced(self.fences, code, invocation.stderr.text)) is not None:
            raise lost
        if invocation.payload is not None and invocation.payload.error is not None:
            raise invocation.payload.error
        if invocation.stdout.pid is None or invocation.stderr.pid is None:
            greeting = f"{invocation.stdout.greeting}\n{invocation.stderr.greeting}"
            output = last_lines(greeting, _QUOTED_LINES) or "(nothing)"
            raise HostUnreachable(
                f"{self.name}: the login shell exited with code {code} before it ran anything; it printed: {output}",
                "the account needs a shell that can run /bin/sh",
            )
        return CommandResult(argv, code, invocation.stdout.text, invocation.stderr.text, seconds)

    def _require(self, result: CommandResult, what: str) -> None:
        if not result.ok:
            reason = last_lines(result.stderr, _QUOTED_LINES) or f"exit code {result.code}"
            raise CommandFailed(
                f"{self.name}: {what}: {reason}",
                _hint(reason, self.name),
                exit_status=result.code,
                stdout=result.stdout,
            )


def _hint(reason: str, host: str) -> str:
    """The command that helps with an error message of a system tool, "" for an unknown message."""
    for message, hint in (
        ("No space left", f"make room: disagg exec --host {host} -- df -h"),
        ("Disk quota exceeded", "make room within the account's quota: quota -s"),
        ("Read-only file system", f"its disk is mounted read-only: disagg exec --host {host} -- mount"),
        ("Permission denied", f"the account may not write there: disagg exec --host {host} -- ls -la"),
        ("Operation not permitted", f"the account may not write there: disagg exec --host {host} -- ls -la"),
    ):
        if message in reason:
            return hint
    return ""


def _shown(argv: tuple[str, ...]) -> str:
    text = " ".join(argv[:8]) if argv else "a script"
    return text if len(text) <= 60 else f"{text[:59]}…"
