"""The audit of a host: which command changed it and when, who called it, from which machine and code, how it ended.

One JSON line when a command begins to change the host, one when it has ended, in the form of the server's log. They are
kept on the host until `disagg uninstall`, those of a local host in the fleet's state folder; a command whose second
line is missing was cut off.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from disagg.errors import DisaggError
from disagg.files import replace_file
from disagg.fleet.machine import process as local
from disagg.version import ROOT, VERSION, code_hash

AUDIT_BYTES: Final = 1 << 20
"""A longer file is cut to its newest AUDIT_LINES lines."""
AUDIT_LINES: Final = 1000
AUDIT_BOUNDS: Final = {"AUDIT_BYTES": str(AUDIT_BYTES), "AUDIT_LINES": str(AUDIT_LINES)}
"""The environment of scripts that append to an audit."""
_GIT_S: Final = 5.0
_MESSAGE_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Caller:
    """Who runs a command of disagg that changes hosts. identity: distinguishes the process from a later one with the
    same pid. since: seconds since 1970. why: the command."""

    who: str
    machine: str
    pid: int
    identity: str
    since: float
    why: str

    @staticmethod
    def this_process(why: str) -> Caller:
        pid = os.getpid()
        return Caller(user_name(), socket.gethostname(), pid, local.identity(pid) or "", time.time(), why)

    @staticmethod
    def parse(text: str) -> Caller | None:
        """The caller from its JSON; None if it is malformed."""
        try:
            fields = json.loads(text)
            words = [str(fields[key]) for key in ("who", "machine", "identity", "why")]
            pid, since = int(fields["pid"]), float(fields["since"])
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        if not (0 < pid < 1 << 31 and 0 <= since < 1 << 40 and all(word.isprintable() for word in words)):
            return None
        who, machine, identity, why = words
        return Caller(who, machine, pid, identity, since, why)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.who}@{self.machine} holds it for `disagg {self.why}` since {since} (pid {self.pid})"

    @property
    def has_ended(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        return self.machine == socket.gethostname() and local.identity(self.pid) != self.identity

    def began(self) -> str:
        """The audit's line of the command's beginning."""
        return self._line(self.since, disagg=origin())

    def ended(self, error: BaseException | None, release: str = "") -> str:
        """The audit's line of its end. release: what is current afterwards, if the command states it."""
        now = time.time()
        seconds = round(now - self.since, 1)
        if error is None:
            return self._line(now, ended="done", seconds=seconds, release=release)
        words = error.message if isinstance(error, DisaggError) else ""
        why = {"error": type(error).__name__, "message": words[:_MESSAGE_CHARS]}
        return self._line(now, level="error", ended="failed", seconds=seconds, **why)

    def _line(self, at: float, *, level: str = "info", **more: Any) -> str:
        stamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
        by = f"{self.who}@{self.machine}"
        return json.dumps({"time": stamp, "level": level, "event": self.why, "by": by, "pid": self.pid, **more})


def audit_file(folder: Path, host: str) -> Path:
    """The audit of a local host. folder: the fleet's state folder."""
    return folder / f"{host}.audit"


@contextmanager
def audited_here(path: Path, why: str) -> Iterator[None]:
    """Write to the audit of a local host when the block begins and how it ends. why: the command."""
    caller = Caller.this_process(why)
    append_here(path, caller.began())
    try:
        yield
    except BaseException as error:
        append_here(path, caller.ended(error))
        raise
    append_here(path, caller.ended(None))


def append_here(path: Path, *lines: str) -> None:
    """Append lines to the audit of a local host, unless the fleet has no state folder. A full disk stops no command."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        if path.stat().st_size > AUDIT_BYTES:
            replace_file(path, b"".join(path.read_bytes().splitlines(keepends=True)[-AUDIT_LINES:]))


def user_name() -> str:
    """Who runs this program; of a user without a name, as in some containers, the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


@lru_cache(maxsize=1)
def origin() -> str:
    """The code that this command is: the commit of a checkout, with `-dirty` if files differ from it; else the version
    and the hash of the code."""
    if (ROOT.parent / ".git").exists():
        argv = ["git", "-C", str(ROOT.parent), "describe", "--always", "--dirty", "--exclude=*"]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_GIT_S, check=True)
            return done.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return f"{VERSION} {code_hash()}"
