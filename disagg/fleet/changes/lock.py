"""One command at a time per host: a lock folder on the host, with who holds it, since when and for which command.

A lock is taken over if its process ran on this machine and has ended. Any other lock is reported; `--break-lock`
takes it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Event
from typing import Final

from disagg.errors import CommandFailed, DisaggError, HostLocked, HostUnreachable
from disagg.fleet.changes.audit import APPEND_AUDIT, AuditEntry, user_name
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine import process as local
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.interruption import interrupted_by
from disagg.fleet.machine.output import last_lines

_HELD: Final = 75
_FULL: Final = 28
_ACQUIRE: Final = (
    APPEND_AUDIT
    + """\
# $1: the lock. $2: this holder, as JSON. $3: the holder whose lock may be taken over, or "*" for any. $4: the audit's
# file. $5: the line for it.
umask 077
LC_ALL=C # the words of an error are compared below
export LC_ALL
mkdir -p "${1%/*}" || exit 1
if [ -n "$3" ] && test -d "$1"; then
    mv "$1" "$1.stale.$$" 2>/dev/null
    if [ "$3" != '*' ] && [ "$(cat "$1.stale.$$/holder" 2>/dev/null)" != "$3" ]; then mv "$1.stale.$$" "$1"; fi
    rm -rf "$1.stale.$$"
fi
if said=$(mkdir "$1" 2>&1); then
    if printf '%s\\n' "$2" >"$1/holder"; then
        mkdir -p "${4%/*}" 2>/dev/null
        audit "$4" "$5"
        exit 0
    fi
    rm -rf "$1"
    exit 28
fi
if ! test -d "$1"; then
    printf '%s\\n' "$said" >&2
    case $said in *'No space left'* | *[Qq]uota*) exit 28 ;; esac
    exit 1
fi
cat "$1/holder" 2>/dev/null
exit 75
"""
)
_RELEASE: Final = (
    APPEND_AUDIT
    + """\
# $1: the lock. $2: the holder, as JSON. $3: the audit's file, which an uninstall has removed. $4: the line for it.
if [ "$(cat "$1/holder" 2>/dev/null)" = "$2" ]; then
    if test -d "${3%/*}"; then audit "$3" "$4"; fi
    exec rm -rf "$1"
fi
"""
)
_SMALL_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who holds a lock. identity: distinguishes the process from a later one with the same pid."""

    who: str
    machine: str
    pid: int
    identity: str
    since: float
    why: str

    @staticmethod
    def this_process(why: str) -> LockHolder:
        pid = os.getpid()
        return LockHolder(user_name(), socket.gethostname(), pid, local.identity(pid) or "", time.time(), why)

    @staticmethod
    def parse(text: str) -> LockHolder | None:
        """The holder from its JSON; None if it is malformed."""
        try:
            fields = json.loads(text)
            words = [str(fields[key]) for key in ("who", "machine", "identity", "why")]
            pid, since = int(fields["pid"]), float(fields["since"])
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        if not (0 < pid < 1 << 31 and 0 <= since < 1 << 40 and all(word.isprintable() for word in words)):
            return None
        who, machine, identity, why = words
        return LockHolder(who, machine, pid, identity, since, why)

    @property
    def audit_entry(self) -> AuditEntry:
        return AuditEntry(f"{self.who}@{self.machine}", self.pid, self.why, self.since)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.who}@{self.machine} holds it for `disagg {self.why}` since {since} (pid {self.pid})"

    @property
    def ended(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        return self.machine == socket.gethostname() and local.identity(self.pid) != self.identity


@contextmanager
def locked(
    machine: Machine, paths: HostPaths, why: str, break_lock: bool = False, if_full: bool = False
) -> Iterator[AuditEntry]:
    """Hold the host's lock, and write both to its audit. Raises HostLocked, which names the holder; `break_lock` takes
    it from any holder.

    if_full: go on without a lock if its disk has no room for one, so that a command that makes room can run."""
    holder = LockHolder.this_process(why)
    own, entry = json.dumps(asdict(holder)), holder.audit_entry
    if not _acquire(machine, paths, (own, entry.began()), "*" if break_lock else "", if_full):
        yield entry
        return
    try:
        yield entry
    except BaseException as error:  # also an interruption, which the audit names
        try:
            _release(machine, paths, own, entry.ended(error))
        except DisaggError as other:  # the first error matters; the next run takes the lock over
            error.add_note(f"the lock was not released: {other.message}")
        raise
    _release(machine, paths, own, entry.ended(None))


def _acquire(machine: Machine, paths: HostPaths, lines: tuple[str, str], take_over: str, if_full: bool) -> bool:
    """False if there is no room for a lock and `if_full` allows to go on without one. lines: the holder's, and the
    audit's."""
    own, audited = lines
    result = machine.run([paths.lock, own, take_over, paths.audit, audited], script=_ACQUIRE, timeout=_SMALL_S)
    if result.ok:
        return True
    if result.code == _FULL and if_full:
        return False
    if result.code != _HELD:
        words = last_lines(result.stderr, 3) or f"exit code {result.code}"
        raise CommandFailed(
            f"{machine.name}: cannot lock it: {words}",
            "its disk is full: make room there, or disagg uninstall"
            if result.code == _FULL
            else f"is {paths.folder} writable there?",
            exit_status=result.code,
            stdout=result.stdout,
        )
    text = result.stdout.strip()
    holder = LockHolder.parse(text)
    if holder is not None and holder.ended and not take_over:
        return _acquire(machine, paths, lines, text, if_full)
    described = str(holder) if holder is not None else "its holder file is unreadable"
    raise HostLocked(
        f"{machine.name} is locked: {described}",
        "wait until that command has ended; if it no longer runs, repeat this one with --break-lock",
    )


def _release(machine: Machine, paths: HostPaths, own: str, line: str) -> None:
    with interrupted_by(Event()):  # release it even if this thread is interrupted
        result = machine.run([paths.lock, own, paths.audit, line], script=_RELEASE, timeout=_SMALL_S)
    if not result.ok:
        raise HostUnreachable(f"{machine.name}: the lock could not be released: {last_lines(result.stderr, 3)}")
