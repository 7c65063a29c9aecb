"""A command's output: bounded in memory, passed on line by line, quoted in messages."""

from __future__ import annotations

import re
from collections.abc import Callable

from disagg.fleet.machine.base import MAX_OUTPUT
from disagg.fleet.machine.shell import MARK

_MAX_LINE = 1 << 16
_MAX_GREETING = 1 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
