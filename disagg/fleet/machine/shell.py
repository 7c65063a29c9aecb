"""What a machine's shell reads and prints: programs made from scripts and values, and their bounded output.

A machine runs one constant command, `BOOTSTRAP`, which reads from its standard input the length of a program in bytes,
then the program, then the program's own input; or "all", then a program without input. So the user's login shell (which
may be fish or csh) parses no value, and a process list shows nothing but paths. Nothing here runs anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from disagg.errors import DisaggError, FleetError

MARK = b"@disagg "
"""Starts the line before the program's own output; login shells may print a greeting before it."""

BOOTSTRAP = (
    "exec /bin/sh -c 'echo; echo @disagg $$; { echo; echo @disagg 0; } >&2; "
    'read -r n && if [ "$n" = all ]; then eval "$(cat)"; else eval "$(dd bs=1 count="$n" 2>/dev/null)"; fi\''
)
"""The empty lines end what a login shell printed without a line end, so that MARK starts a line.

dd takes no byte of the input behind the program, and two system calls per byte: a tenth of a probe's CPU time, so a
program without input is read by cat."""

MAX_OUTPUT: Final = 1 << 18
"""Bytes kept of the start and of the end of a command's output, per stream."""
SCRIPTS: Final = Path(__file__).parents[1] / "scripts"
"""The shell that hosts run: POSIX sh, as of dash and macOS. Values come as parameters, never in the text."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FENCED: Final = 76
"""The exit code of a program that a fence has ended."""
_FENCE_MARK: Final = "@fence "
_COMPARE: Final = r"""
_fence() { _line=; { IFS= read -r _line <"$1"; } 2>/dev/null; [ "$_line" = "$2" ]; }
"""
_MAX_LINE = 1 << 16
_MAX_GREETING = 1 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@cache
def script(*names: str) -> str:
    """These scripts, one after the other, without the comment at the beginning of each."""
    return "".join(re.sub(r"\A(#.*\n)+", "", (SCRIPTS / name).read_text(encoding="utf-8")) for name in names)


def script_with(name: str, **values: object) -> str:
    """A script as a program of its own, in which these variables have these values."""
    lines = [f"{key}={shlex.quote(str(value))}\n" for key, value in values.items()]
    return "".join(["#!/bin/sh\n", *lines, (SCRIPTS / name).read_text(encoding="utf-8")])


def program(
    argv: Sequence[str],
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    takes_input: bool = False,
    fences: Sequence[Fence] = (),
) -> bytes:
    """The input of BOOTSTRAP: fences, environment, then the script with argv as $1, $2, ..., or argv as a command."""
    for text in (*argv, *(environment or {}).values()):
        if "\0" in text:
            raise FleetError(
                "an argument or environment value contains a NUL character", "remove it: no command accepts one"
            )
    lines = [_COMPARE, *(fence.check(number) for number, fence in enumerate(fences))] if fences else []
    lines += [f"export {_name(key)}={shlex.quote(value)}" for key, value in sorted((environment or {}).items())]
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


def _name(key: str) -> str:
    if not _VARIABLE.fullmatch(key):
        raise FleetError(f"{key!r} is not a valid name of an environment variable", "use letters, digits and _ only")
    return key


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
        ended = f"{{ printf '%s\\n' '{_FENCE_MARK}{number}' \"$_line\" >&2; exit {FENCED}; }}"
        return f"{gone}{compare} || {again} || {ended}"


def fenced(fences: Sequence[Fence], code: int, stderr: str) -> DisaggError | None:
    """The error if one of these fences has ended a program with this exit code and this output."""
    mark, _, found = stderr.partition("\n")
    if code != FENCED or not mark.startswith(_FENCE_MARK):
        return None
    return fences[int(mark.removeprefix(_FENCE_MARK))].lost(found.strip())


def last_lines(text: str, count: int) -> str:
    """The last non-blank lines, for a message. Control characters, which a terminal would execute, are replaced."""
    lines = [_CONTROL.sub("\N{REPLACEMENT CHARACTER}", line) for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])


class OutputStream:
    """One output stream of a command: drops what a login shell prints before MARK, keeps start and end of the rest.

    pid: the number after MARK, None until it arrives. on_line: called with each line, without its line end; carriage
    returns end a line too, since progress bars use them.
    """

    def __init__(self, on_line: Callable[[str], None] | None = None, keep: int = MAX_OUTPUT) -> None:
        self.pid: int | None = None
        self._on_line = on_line
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
            mark = re.search(rb"(?:^|\n)" + re.escape(MARK) + rb"([0-9]+)\n", self._waiting)
            if mark is None:
                return
            self.pid, data = int(mark[1]), self._waiting[mark.end() :]
            self._waiting = b""
        self._store(data)
        if self._on_line is not None:
            self._emit_lines(data)

    def end(self) -> None:
        """The stream has ended: pass on the last line, which may lack a line end."""
        if self._line and self._on_line is not None:
            self._on_line(self._line.removesuffix(b"\r").decode("utf-8", "replace"))
        self._line = b""

    @property
    def greeting(self) -> str:
        """What was printed, if MARK has not arrived."""
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
            assert self._on_line is not None
            self._on_line(line.decode("utf-8", "replace"))
