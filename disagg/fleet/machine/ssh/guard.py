"""The guard of a connection: a shell on the host that kills process groups whose client is gone (guard.sh)."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

from disagg.fleet.machine import interruption
from disagg.fleet.machine.machine import program, script

if TYPE_CHECKING:
    import paramiko

_MAX_REPLY = 1 << 12
_WATCHING = b"@watching\n"


class Guard:
    """Drives the guard over its channel, from any thread. Methods raise OSError or SSHException if the connection is
    broken."""

    def __init__(self, channel: paramiko.Channel, timeout: float, groups: Collection[int] = ()) -> None:
        """timeout: seconds without a message after which the guard kills the groups, and ends the connection."""
        self.groups = set(groups)
        self._channel = channel
        self._reply = b""
        self._lock = Lock()  # a line must not be sent behind one that knows more groups
        channel.sendall(program([f"{timeout:g}"], script("guard.sh"), takes_input=True))

    @property
    def closed(self) -> bool:
        return bool(self._channel.closed)

    def wait_closed(self, seconds: float) -> bool:
        """Whether the guard, or the connection, ends within this time."""
        return bool(self._channel.status_event.wait(seconds))

    def add(self, group: int) -> None:
        """Send the groups with a new one; `wait_until_watching` waits for the guard's reply."""
        self._reply = b""
        with self._lock:
            self.groups.add(group)
            self._send_groups("watch")

    def wait_until_watching(self, timeout: float) -> bool:
        """Wait for the reply to `add`; False if none arrives in time. Raises EOFError if the guard has ended."""
        deadline = time.monotonic() + timeout
        while not self._reply.endswith(_WATCHING):
            interruption.check()
            if time.monotonic() > deadline:
                return False
            self._channel.settimeout(interruption.POLL_S)
            with suppress(TimeoutError):
                if not (data := self._channel.recv(_MAX_REPLY)):
                    raise EOFError("the guard has ended")
                self._reply = (self._reply + data)[-_MAX_REPLY:]
        self._channel.settimeout(None)
        return True

    def remove(self, group: int) -> None:
        with self._lock:
            self.groups.discard(group)
            self._send_groups("live")

    def kill(self, group: int) -> None:
        """SIGTERM, then SIGKILL after one second."""
        with self._lock:
            self._send(f"end {group}")

    def heartbeat(self) -> None:
        """Restart the guard's timer."""
        with self._lock:
            self._send_groups("live")

    def _send_groups(self, word: str) -> None:
        self._send(" ".join([word, *map(str, sorted(self.groups))]))

    def _send(self, line: str) -> None:
        self._channel.sendall(line.encode("ascii") + b"\n")
