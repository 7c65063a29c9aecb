"""One deployment at a time per host: a folder on the host that says who, when and why.

A lock whose process has ended on this very machine is taken over. Any other is explained, and left to `--break-lock`.
"""

from __future__ import annotations

import getpass
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
from disagg.fleet.facts.layout import Layout
from disagg.fleet.machine import process as local
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.interruption import interrupted_by
from disagg.fleet.machine.output import last_lines

_HELD: Final = 75
_ACQUIRE: Final = """\
# $1: the lock. $2: what this process writes into it. $3: a holder whose lock may be taken over; "*": anyone's.
umask 077
mkdir -p "${1%/*}" || exit 1
if [ -n "$3" ] && test -d "$1"; then
    mv "$1" "$1.stale.$$" 2>/dev/null
    if [ "$3" != '*' ] && [ "$(cat "$1.stale.$$/holder" 2>/dev/null)" != "$3" ]; then mv "$1.stale.$$" "$1"; fi
    rm -rf "$1.stale.$$"
fi
if mkdir "$1" 2>/dev/null; then
    printf '%s\\n' "$2" >"$1/holder" && exit 0
    rm -rf "$1"
    exit 1
fi
test -d "$1" || { echo "cannot make $1" >&2; exit 1; }
cat "$1/holder" 2>/dev/null
exit 75
"""
_RELEASE: Final = """\
# $1: the lock. $2: what its holder wrote.
if [ "$(cat "$1/holder" 2>/dev/null)" = "$2" ]; then exec rm -rf "$1"; fi
"""
_SMALL_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock. `identity`: of the process, which tells it from a later one with the same pid."""

    who: str
    machine: str
    pid: int
    identity: str
    since: float
    why: str

    @staticmethod
    def this_process(why: str) -> Holder:
        pid = os.getpid()
        return Holder(getpass.getuser(), socket.gethostname(), pid, local.identity(pid) or "", time.time(), why)

    @staticmethod
    def parse(text: str) -> Holder | None:
        """The holder that wrote this; None where it cannot be read."""
        try:
            said = json.loads(text)
            words = [str(said[key]) for key in ("who", "machine", "identity", "why")]
            pid, since = int(said["pid"]), float(said["since"])
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        if not (0 < pid < 1 << 31 and 0 <= since < 1 << 40 and all(word.isprintable() for word in words)):
            return None
        who, machine, identity, why = words
        return Holder(who, machine, pid, identity, since, why)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.who}@{self.machine} holds it for `disagg {self.why}` since {since} (pid {self.pid})"

    @property
    def ended(self) -> bool:
        """Whether it was a process of this machine that is no more."""
        return self.machine == socket.gethostname() and local.identity(self.pid) != self.identity


@contextmanager
def locked(machine: Machine, layout: Layout, why: str, break_lock: bool = False) -> Iterator[None]:
    """Hold the host's lock. HostLocked says who has it; `break_lock` takes it from anyone."""
    own = json.dumps(asdict(Holder.this_process(why)))
    _acquire(machine, layout, own, "*" if break_lock else "")
    try:
        yield
    except BaseException as error:
        try:
            _release(machine, layout, own)
        except DisaggError as other:  # what went wrong first is what matters; the next run takes the lock over
            error.add_note(f"the lock stays: {other.message}")
        raise
    _release(machine, layout, own)


def _acquire(machine: Machine, layout: Layout, own: str, take_over: str) -> None:
    result = machine.run([layout.lock, own, take_over], script=_ACQUIRE, timeout=_SMALL_S)
    if result.ok:
        return
    if result.code != _HELD:
        words = last_lines(result.stderr, 3) or f"exit code {result.code}"
        raise CommandFailed(
            f"{machine.name}: cannot lock it: {words}",
            f"is {layout.folder} writable there?",
            exit_status=result.code,
            stdout=result.stdout,
        )
    text = result.stdout.strip()
    holder = Holder.parse(text)
    if holder is not None and holder.ended and not take_over:
        _acquire(machine, layout, own, text)
        return
    told = str(holder) if holder is not None else "nobody knows who holds it"
    raise HostLocked(
        f"{machine.name} is locked: {told}",
        "wait until that has ended; if nobody is at work: disagg deploy --break-lock",
    )


def _release(machine: Machine, layout: Layout, own: str) -> None:
    with interrupted_by(Event()):  # also when this thread is to give up
        result = machine.run([layout.lock, own], script=_RELEASE, timeout=_SMALL_S)
    if not result.ok:
        raise HostUnreachable(f"{machine.name}: the lock could not be released: {last_lines(result.stderr, 3)}")
