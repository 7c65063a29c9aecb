"""The guard of a connection: a shell on the host that kills process groups whose client is gone (`shell.GUARD`)."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from disagg.fleet.machine import interruption, shell

if TYPE_CHECKING:
    import paramiko

_MAX_REPLY = 1 << 12


class Guard:
    """Drives the guard over its channel. Methods raise OSError or SSHException if the connection is broken."""

    def __init__(self, channel: paramiko.Channel, timeout: float, groups: Collection[int] = ()) -> None:
        """timeout: seconds without a message after which the guard kills the groups."""
        self.groups = set(groups)
        self._channel = channel
        self._reply = b""
        channel.sendall(shell.program([f"{timeout:g}"], shell.GUARD, takes_input=True))

    @property
    def closed(self) -> bool:
        return bool(self._channel.closed)

    def add(self, group: int) -> None:
        """Send the groups with a new one; the guard replies, see `wait_until_watching`."""
        self.groups.add(group)
        self._reply = b""
        self._send(self._members("watch"))

    def wait_until_watching(self, timeout: float) -> bool:
        """Wait for the reply to `add`; False if none arrives in time. Raises EOFError if the guard has ended."""
        deadline = time.monotonic() + timeout
        while not self._reply.endswith(shell.WATCHING):
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
        self.groups.discard(group)
        self.heartbeat()

    def kill(self, group: int) -> None:
        """SIGTERM, then SIGKILL after one second."""
        self._send(f"end {group}")

    def heartbeat(self) -> None:
        """Restart the guard's timer."""
        self._send(self._members("live"))

    def _members(self, word: str) -> str:
        return " ".join([word, *map(str, sorted(self.groups))])

    def _send(self, line: str) -> None:
        self._channel.sendall(line.encode("ascii") + b"\n")
