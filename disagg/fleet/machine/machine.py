"""A machine: run a command, read and write a file. All of it goes through one POSIX shell there.

`local.LocalMachine` and `ssh.machine.SSHMachine` carry it out. Commands are argv lists, which are quoted here, so that
no shell interprets a value of hosts.toml. A script is POSIX sh with its parameters as argv ($1, $2, ...): never pasted
into its text. All of it is sent on standard input, so a process list shows nothing but paths.

Commands start in the user's home folder. The paths that `write`, `read` and `upload.put_tree` take are absolute,
relative to that folder, or start with `~/`; argv is passed unchanged.
"""

from __future__ import annotations

import io
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Final

from disagg.errors import CommandFailed, DisaggError, FleetError, HostUnreachable

MAX_OUTPUT: Final = 1 << 18
"""Bytes kept of the start and of the end of a command's output, per stream."""
_SMALL_S = 30.0
"""How long reading or writing one file may take."""
_QUOTED_LINES = 5
"""Lines of a command's output that an error message quotes."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A finished command. stdout, stderr: UTF-8 with replacement, at most MAX_OUTPUT bytes of start and of end."""

    code: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    def reason(self, lines: int) -> str:
        """Why it failed, for a message: its last lines, or else its exit code."""
        return last_lines(self.stderr.strip() or self.stdout, lines) or f"exit code {self.code}"


class Machine(ABC):
    """One machine. Safe to use from one thread at a time; `close` from any. fences: what everything that runs, writes
    or reads there compares first; the error of one that does not hold is raised."""

    fences: tuple[Fence, ...] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The host's name in hosts.toml."""

    @abstractmethod
    def execute(self, invocation: Invocation) -> int:
        """Run an invocation to its end. Returns the exit code (128 + n for signal n).

        Raises TimeoutError after `invocation.timeout` and Cancelled if this thread is interrupted, both after killing
        the process group, and HostUnreachable if the connection breaks.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection; a running command is killed. The next call connects again."""

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
        if script is None and not argv:
            raise FleetError("there is no command to run")
        invocation = Invocation(program(argv, script, environment, fences=self.fences), timeout)
        invocation.stdout.on_line = invocation.stderr.on_line = on_line
        return self._run(argv, invocation)

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write one file atomically; parents are created. The content appears in no argument list, and the mode is set
        before the content is written. Raises CommandFailed."""
        argv, scripts = (path, f"{mode:o}", str(len(content))), ("path.sh", "beside.sh", "write.sh")
        payload = Payload(io.BytesIO(content))
        self.send(("write", path), argv, scripts, payload, timeout=_SMALL_S, what=f"cannot write {path}")

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        """A file's content, at most `limit` bytes of its end; None if it does not exist. Raises CommandFailed if it
        cannot be read."""
        reading = program((path, str(limit)), script("path.sh", "read.sh"), fences=self.fences)
        invocation = Invocation(reading, _SMALL_S, stdout=OutputStream(keep=max(limit, MAX_OUTPUT)))
        result = self._run(("read", path), invocation)
        if not result.ok and result.stderr.rstrip().endswith(("No such file", "No such file or directory")):
            return None
        self.require(result, f"cannot read {path}")
        return invocation.stdout.content

    def send(
        self,
        shown: tuple[str, ...],
        argv: Sequence[str],
        scripts: Sequence[str],
        payload: Payload,
        *,
        timeout: float,
        what: str,
    ) -> None:
        """Run a script that takes input. shown: the command in messages. what: the beginning of its error."""
        taking = program(argv, script(*scripts), takes_input=True, fences=self.fences)
        self.require(self._run(shown, Invocation(taking, timeout, payload)), what)

    def require(self, result: CommandResult, what: str) -> None:
        """Raise CommandFailed, beginning with `what`, if it failed."""
        if not result.ok:
            reason = last_lines(result.stderr, _QUOTED_LINES) or f"exit code {result.code}"
            raise CommandFailed(
                f"{self.name}: {what}: {reason}",
                _hint(reason, self.name),
                exit_status=result.code,
                stdout=result.stdout,
            )

    def _run(self, argv: Sequence[str], invocation: Invocation) -> CommandResult:
        try:
            code = self.execute(invocation)
        except TimeoutError:
            output = last_lines(invocation.stderr.text or invocation.stdout.text, _QUOTED_LINES)
            raise FleetError(
                f"{self.name}: {_shown(argv)} did not end within {invocation.timeout:g} s and was killed"
                + (f"; its last output:\n{output}" if output else ""),
                f"look why it takes so long: disagg ssh {self.name}",
            ) from None
        if (lost := _fenced(self.fences, code, invocation.stderr.text)) is not None:
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
        return CommandResult(code, invocation.stdout.text, invocation.stderr.text)


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


def _shown(argv: Sequence[str]) -> str:
    text = " ".join(argv[:8]) if argv else "a script"
    return text if len(text) <= 60 else f"{text[:59]}…"


# What is sent

_MARK = b"@disagg "
"""Starts the line before the program's own output; login shells may print a greeting before it."""

BOOTSTRAP = (
    "exec /bin/sh -c 'echo; echo @disagg $$; { echo; echo @disagg 0; } >&2; "
    'read -r n && if [ "$n" = all ]; then eval "$(cat)"; else eval "$(dd bs=1 count="$n" 2>/dev/null)"; fi\''
)
"""The empty lines end what a login shell printed without a line end, so that _MARK starts a line.

dd takes no byte of the input behind the program, and two system calls per byte: a tenth of a probe's CPU time, so a
program without input is read by cat."""

SCRIPTS: Final = Path(__file__).parents[1] / "scripts"
"""The shell that hosts run: POSIX sh, as of dash and macOS. Values come as parameters, never in the text."""
_FENCED: Final = 76
"""The exit code of a program that a fence has ended."""
_FENCE_MARK: Final = "@fence "
_COMPARE: Final = r"""
_fence() { _line=; { IFS= read -r _line <"$1"; } 2>/dev/null; [ "$_line" = "$2" ]; }
"""


class Payload:
    """A command's input that notes when it was read last: the machine has taken what was read before.

    error: why it could not be read to its end. The thread that sends it must go on to end the command's input."""

    def __init__(self, stream: IO[bytes], on_read: Callable[[int], None] = lambda count: None) -> None:
        """on_read: called with the number of bytes of each piece, on the thread that sends it."""
        self.at = time.monotonic()
        self.error: Exception | None = None
        self._stream = stream
        self._on_read = on_read

    def read(self, count: int) -> bytes:
        """The next piece, empty at the end and after an error."""
        self.at = time.monotonic()
        try:
            piece = self._stream.read(count)
            self._on_read(len(piece))
        except Exception as error:  # noqa: BLE001 - raised on the thread that waits for the command
            self.error = error
            return b""
        return piece


@cache
def script(*names: str) -> str:
    """These scripts, one after the other, without the comment at the beginning of each."""
    return "".join(re.sub(r"\A(#.*\n)+", "", (SCRIPTS / name).read_text(encoding="utf-8")) for name in names)


def program(
    argv: Sequence[str],
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    takes_input: bool = False,
    fences: Sequence[Fence] = (),
) -> bytes:
    """The input of BOOTSTRAP: fences, environment, then the script with argv as $1, $2, ..., or argv as a command."""
    variables = sorted((environment or {}).items())
    if any("\0" in text for text in (*argv, *(value for _, value in variables))):
        raise FleetError(
            "an argument or environment value contains a NUL character", "remove it: no command accepts one"
        )
    for key, _ in variables:
        if not (key.isascii() and key.isidentifier()):
            message = f"{key!r} is not a valid name of an environment variable"
            raise FleetError(message, "use letters, digits and _ only")
    lines = [_COMPARE, *(fence.check(number) for number, fence in enumerate(fences))] if fences else []
    lines += [f"export {key}={shlex.quote(value)}" for key, value in variables]
    lines.append("cd 2>/dev/null")  # home: a forced command or a container may start elsewhere
    words = " ".join(map(shlex.quote, argv))
    if not takes_input:
        lines.append("exec </dev/null")
    if script is None:
        # Not exec: the waiting shell turns "killed by signal 9" into exit code 137; SSH has no exit code for it.
        lines.append(f"{words}; exit $?")
    else:
        lines += [f"set -- {words}", script]
    body = "\n".join(lines).encode("utf-8", "surrogateescape") + b"\n"
    return b"%s\n%s" % (b"%d" % len(body) if takes_input else b"all", body)


@dataclass(frozen=True, slots=True)
class Fence:
    """A file that a program compares before anything else, in the same shell: it runs only while the first line is
    this one. lost: the error otherwise, from the line that is there; "" without any. unless_gone: a folder without
    which there is nothing to compare."""

    path: str
    line: str
    lost: Callable[[str], DisaggError]
    unless_gone: str = ""

    def check(self, number: int) -> str:
        """The shell commands. A file that is not there may be on its way back: they look again."""
        compare = f"_fence {shlex.quote(self.path)} {shlex.quote(self.line)}"
        gone = f"[ ! -e {shlex.quote(self.unless_gone)} ] || " if self.unless_gone else ""
        again = f'{{ [ -z "$_line" ] && sleep 1 && {compare}; }}'
        ended = f"{{ printf '%s\\n' '{_FENCE_MARK}{number}' \"$_line\" >&2; exit {_FENCED}; }}"
        return f"{gone}{compare} || {again} || {ended}"


def _fenced(fences: Sequence[Fence], code: int, stderr: str) -> DisaggError | None:
    """The error if one of these fences has ended a program with this exit code and this output."""
    mark, _, found = stderr.partition("\n")
    if code != _FENCED or not mark.startswith(_FENCE_MARK):
        return None
    return fences[int(mark.removeprefix(_FENCE_MARK))].lost(found.strip())


# What comes back

_MAX_LINE = 1 << 16
_MAX_GREETING = 1 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class OutputStream:
    """One output stream of a command: drops what a login shell prints before _MARK, keeps start and end of the rest.

    pid: the number after _MARK, None until it arrives. on_line: called with each line, without its line end; carriage
    returns end a line too, since progress bars use them.
    """

    def __init__(self, on_line: Callable[[str], None] | None = None, keep: int = MAX_OUTPUT) -> None:
        self.pid: int | None = None
        self.on_line = on_line
        self._keep = keep
        self._waiting = b""
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0
        self._line = b""

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self.pid is None:
            self._waiting = (self._waiting + data)[-_MAX_GREETING:]
            mark = re.search(rb"(?:^|\n)" + re.escape(_MARK) + rb"([0-9]+)\n", self._waiting)
            if mark is None:
                return
            self.pid, data = int(mark[1]), self._waiting[mark.end() :]
            self._waiting = b""
        self._store(data)
        if self.on_line is not None:
            self._emit_lines(data)

    def end(self) -> None:
        """The stream has ended: pass on the last line, which may lack a line end."""
        if self._line and self.on_line is not None:
            self.on_line(self._line.removesuffix(b"\r").decode("utf-8", "replace"))
        self._line = b""

    @property
    def greeting(self) -> str:
        """What was printed, if _MARK has not arrived."""
        return self._waiting.decode("utf-8", "replace").strip()

    @property
    def content(self) -> bytes:
        """Everything, or start and end with a line between them that states how many bytes are left out."""
        self._cut()
        if not self._dropped:
            return bytes(self._head + self._tail)
        return b"%s\n[... %d bytes left out ...]\n%s" % (self._head, self._dropped, self._tail)

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def _store(self, data: bytes) -> None:
        room = self._keep - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._keep:  # seldom: each cut moves what remains
            self._cut()

    def _cut(self) -> None:
        extra = max(0, len(self._tail) - self._keep)
        del self._tail[:extra]
        self._dropped += extra

    def _emit_lines(self, data: bytes) -> None:
        *lines, self._line = re.split(rb"\r\n|\n|\r(?!$)", self._line + data)
        if len(self._line) > _MAX_LINE:
            lines.append(self._line)
            self._line = b""
        for line in lines:
            assert self.on_line is not None
            self.on_line(line.decode("utf-8", "replace"))


def last_lines(text: str, count: int) -> str:
    """The last non-blank lines, for a message. Control characters, which a terminal would execute, are replaced."""
    lines = [_CONTROL.sub("\N{REPLACEMENT CHARACTER}", line) for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])


@dataclass(frozen=True, slots=True)
class Invocation:
    """One run of BOOTSTRAP. program: its input, made by `program`. payload: the program's input. timeout: seconds; they
    begin anew whenever the machine takes more of the payload."""

    program: bytes
    timeout: float
    payload: Payload | None = None
    stdout: OutputStream = field(default_factory=OutputStream)
    stderr: OutputStream = field(default_factory=OutputStream)

    def due(self, began: float) -> float:
        """When it is too late, by time.monotonic(). began: when it began."""
        return (max(began, self.payload.at) if self.payload is not None else began) + self.timeout
