"""A host reached over SSH: one connection, reused; at most four channels, one of them its guard.

sshd gives every command a session and process group of its own, on Linux and macOS, whose id is the process id that
BOOTSTRAP tells. A command without a terminal survives its connection, and sshd learns of a cut cable hours later; so
each group is named to the guard (`shell.GUARD`) before its program is sent, and the guard ends what its client no
longer vouches for.
"""

from __future__ import annotations

import selectors
import time
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from disagg.config import Host
from disagg.errors import DisaggError, HostUnreachable
from disagg.fleet.machine import interruption, shell
from disagg.fleet.machine.posix import Invocation, ShellMachine
from disagg.fleet.machine.ssh.settings import DEFAULT_TIMEOUTS, Timeouts

if TYPE_CHECKING:
    import fabric
    import paramiko

    from disagg.fleet.machine.ssh.settings import Settings

BEAT_S = 5.0
"""Between two signs of life to the guard."""
GUARD_S = 30.0
"""The guard ends the groups of a client that is silent for so long."""
_DRAIN_S = 1.0
"""How long output may stay silent after the command ended: a process it left behind may hold it open for ever."""
_KILL_S = 4.0
"""How long to wait for a killed group: the guard sends SIGKILL after one second."""
_KILLED = 137


class SSHMachine(ShellMachine):
    """A host with connector "ssh". Connects when first used, and again when a broken connection is used again."""

    def __init__(self, host: Host, *, timeouts: Timeouts = DEFAULT_TIMEOUTS, guard_s: float = GUARD_S) -> None:
        self._host = host
        self._timeouts = timeouts
        self._guard_s = guard_s
        self._lock = Lock()
        self._connection: fabric.Connection | None = None
        self._settings: Settings | None = None
        self._guard: paramiko.Channel | None = None
        self._live: set[int] = set()

    @property
    def name(self) -> str:
        return self._host.name

    @property
    def settings(self) -> Settings:
        """How this host is reached, from hosts.toml and ssh_config."""
        if self._settings is None:
            from disagg.fleet.machine.ssh.settings import settings_for

            self._settings = settings_for(self._host)
        return self._settings

    def execute(self, invocation: Invocation) -> tuple[int, float]:
        """See ShellMachine."""
        import paramiko

        began = time.monotonic()
        try:
            transport = self._transport()
            with self._open(transport) as channel:
                code = _Execution(self, channel, invocation, began + invocation.timeout).run()
        except (OSError, EOFError, paramiko.SSHException) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._explained(error) from error
        if code < 0:
            transport.join(0.3)  # a broken link ends the transport's thread a moment after its channels
            if not transport.is_active():
                raise self._lost()
            code = _KILLED
        return code, time.monotonic() - began

    def close(self) -> None:
        """See Machine. The guard's input ends with the connection, so it ends what still runs."""
        from disagg.fleet.machine.ssh.connection import close_connection

        with self._lock:
            connection, self._connection, self._guard = self._connection, None, None
        if connection is not None:
            close_connection(connection)

    # For _Execution

    def vouch(self, pid: int) -> None:
        """Name a process group to the guard, and see that it has heard it."""
        self._live.add(pid)
        self._tell(self._members("watch"))
        self._await_guard()

    def dismiss(self, pid: int) -> None:
        """A group has ended by itself."""
        self._live.discard(pid)
        with suppress(DisaggError):  # the guard ends with the connection, too
            self._tell(self._members("live"))

    def end(self, pid: int) -> None:
        """End a group: SIGTERM, then SIGKILL."""
        self._tell(f"end {pid}")

    def beat(self) -> None:
        """Tell the guard that this client lives. One that ended, as after a long sleep of this machine, is replaced."""
        self._tell(self._members("live"))

    def _members(self, word: str) -> str:
        return " ".join([word, *map(str, sorted(self._live))])

    # The connection

    def _transport(self) -> paramiko.Transport:
        from disagg.fleet.machine.ssh import connection as ssh_open

        with self._lock:
            if self._connection is not None and self._connection.is_connected:
                return self._connection.transport
        self.close()
        interruption.check()
        connection = ssh_open.open_connection(self.name, self.settings, self._timeouts)
        with self._lock:
            self._connection = connection
            self._live.clear()
        return connection.transport

    def _open(self, transport: paramiko.Transport) -> Any:
        channel = transport.open_session(timeout=self._timeouts.channel)
        channel.settimeout(self._timeouts.channel)
        channel.exec_command(shell.BOOTSTRAP)
        channel.settimeout(None)  # a slow upload may wait for long; what bounds it is the invocation's timeout
        return channel

    def _tell(self, line: str) -> None:
        import paramiko

        connection = self._connection
        if connection is None or not connection.is_connected:
            raise self._lost()
        try:
            if self._guard is None or self._guard.closed:
                self._guard = self._open(connection.transport)
                guard = shell.program([f"{self._guard_s:g}"], shell.GUARD, takes_input=True)
                self._guard.sendall(guard)
            self._guard.sendall(line.encode("ascii") + b"\n")
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._explained(error) from error

    def _await_guard(self) -> None:
        guard, said = self._guard, b""
        assert guard is not None
        deadline = time.monotonic() + self._timeouts.channel
        while not said.endswith(shell.WATCHING):
            interruption.check()
            guard.settimeout(interruption.POLL_S)
            with suppress(TimeoutError):
                if not (data := guard.recv(1 << 12)):
                    raise self._lost()
                said = (said + data)[-(1 << 12) :]
            if time.monotonic() > deadline:
                raise HostUnreachable(
                    f"{self.name}: its shell does nothing within {self._timeouts.channel:g} s",
                    f"the machine may be overloaded: ssh {self.settings.address} uptime",
                )
        guard.settimeout(None)

    def _explained(self, error: BaseException) -> DisaggError:
        from disagg.fleet.machine.ssh.errors import explain

        connection = self._connection
        if connection is None or not connection.is_connected:
            return self._lost()
        return explain(self.name, self.settings, error)

    def _lost(self) -> HostUnreachable:
        return HostUnreachable(
            f"{self.name}: connection lost to {self.settings.address}",
            f"ping {self.settings.address}; then run the command again",
        )


class _Execution:
    """One invocation on one channel."""

    def __init__(self, machine: SSHMachine, channel: paramiko.Channel, invocation: Invocation, deadline: float) -> None:
        self._machine, self._channel, self._job, self._deadline = machine, channel, invocation, deadline
        self._next_beat = time.monotonic() + BEAT_S
        self._last_data = time.monotonic()

    def run(self) -> int:
        """The exit code, -1 where there is none. On any exception the process group is ended first."""
        pid: int | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            try:
                while self._job.stdout.pid is None and not self._ended():
                    self._step(selector)
                pid = self._job.stdout.pid
                if pid is not None:
                    self._machine.vouch(pid)
                    Thread(target=self._feed, name=f"feed {self._machine.name}", daemon=True).start()
                while not self._ended():
                    self._step(selector)
            except BaseException:  # also an interruption: nothing goes on running on the host
                if pid is not None:
                    self._end(selector, pid)
                raise
        self._drain()
        self._job.stdout.end()
        self._job.stderr.end()
        if pid is not None:
            self._machine.dismiss(pid)
        return self._channel.recv_exit_status() if self._channel.exit_status_ready() else -1

    def _step(self, selector: selectors.BaseSelector) -> None:
        """Wait a little, pass on what came, look at clock and interruption."""
        self._wait(selector)
        self._drain()
        interruption.check()
        now = time.monotonic()
        if now > self._deadline:
            raise TimeoutError
        if now > self._next_beat:
            self._next_beat = now + BEAT_S
            self._machine.beat()

    def _wait(self, selector: selectors.BaseSelector) -> None:
        channel = self._channel
        if not channel.eof_received:
            selector.select(interruption.POLL_S)
        elif not channel.status_event.is_set():  # after the end of output the selector is always ready
            channel.status_event.wait(interruption.POLL_S)
        elif not channel.closed:
            time.sleep(0.005)

    def _drain(self) -> None:
        channel = self._channel
        while channel.recv_ready():
            self._job.stdout.feed(channel.recv(1 << 16))
            self._last_data = time.monotonic()
        while channel.recv_stderr_ready():
            self._job.stderr.feed(channel.recv_stderr(1 << 16))
            self._last_data = time.monotonic()

    def _ended(self) -> bool:
        channel = self._channel
        if channel.recv_ready() or channel.recv_stderr_ready():
            return False
        if channel.closed:
            return True
        return channel.exit_status_ready() and time.monotonic() - self._last_data > _DRAIN_S

    def _feed(self) -> None:
        """Send the program and what it reads. Where the command ends early, it says itself why."""
        with suppress(OSError, EOFError, ValueError):  # ValueError: the payload was closed, since the command has ended
            self._channel.sendall(self._job.program)
            while self._job.payload is not None and (data := self._job.payload.read(1 << 16)):
                self._channel.sendall(data)
            self._channel.shutdown_write()

    def _end(self, selector: selectors.BaseSelector, pid: int) -> None:
        deadline = time.monotonic() + _KILL_S
        with suppress(DisaggError):  # where the link is broken, the guard does it by itself
            self._machine.end(pid)
            while not self._channel.closed and time.monotonic() < deadline:
                self._wait(selector)
                self._drain()
            self._machine.dismiss(pid)
