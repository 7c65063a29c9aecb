"""A machine over SSH: one connection, reused; at most four channels, one of them for the guard.

sshd gives every command a session and process group of its own, on Linux and macOS, whose id is the process id that
BOOTSTRAP prints. A command without a terminal survives its connection, and sshd notices a cut cable hours later. So
each group is registered with the guard (guard.sh) before its program is sent, and the guard kills the groups of a
client that is gone, and ends the sshd of its connection. A jump host has no guard: there, sshd ends when it notices.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from disagg.config import Host
from disagg.errors import DisaggError, HostUnreachable
from disagg.fleet.machine import interruption
from disagg.fleet.machine.machine import BOOTSTRAP, Invocation, Machine
from disagg.fleet.machine.ssh.guard import Guard
from disagg.fleet.machine.ssh.settings import DEFAULT_TIMEOUTS, SSHTimeouts

if TYPE_CHECKING:
    import fabric
    import paramiko

    from disagg.fleet.machine.ssh.settings import HopSettings

HEARTBEAT_S = 5.0
"""Between two messages to the guard, also while no command runs."""
GUARD_S = 30.0
"""The guard kills the groups of a client that has sent nothing for so long, and ends its connection."""
_DRAIN_S = 1.0
"""How long to wait for output after the command ended: a process that it left behind may keep the channel open."""
_KILL_S = 4.0
"""How long to wait for a killed group: the guard sends SIGKILL after one second."""
_KILLED = 137


class SSHMachine(Machine):
    """A host with connector "ssh". Connects when first used, and again after a broken connection."""

    def __init__(self, host: Host, *, timeouts: SSHTimeouts = DEFAULT_TIMEOUTS, guard_s: float = GUARD_S) -> None:
        self._host = host
        self._timeouts = timeouts
        self._guard_s = guard_s
        self._lock = Lock()
        self._connection: fabric.Connection | None = None
        self._settings: HopSettings | None = None
        self._guard: Guard | None = None

    @property
    def name(self) -> str:
        return self._host.name

    @property
    def settings(self) -> HopSettings:
        """How to connect to this host, from hosts.toml and ssh_config."""
        if self._settings is None:
            from disagg.fleet.machine.ssh.settings import settings_for

            self._settings = settings_for(self._host)
        return self._settings

    def execute(self, invocation: Invocation) -> int:
        import paramiko

        began = time.monotonic()
        try:
            transport = self._transport()
            with self._open(transport) as channel:
                code = _Execution(self, channel, invocation, began).run()
        except (OSError, EOFError, paramiko.SSHException) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._explained(error) from error
        if code < 0:
            if not _stays(transport):
                raise self._lost()
            code = _KILLED
        return code

    def close(self) -> None:
        """The guard's input ends with the connection, so it kills what still runs."""
        from disagg.fleet.machine.ssh.connection import close_connection

        with self._lock:
            connection, self._connection, self._guard = self._connection, None, None
        if connection is not None:
            close_connection(connection)

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
            self._guard = None
        return connection.transport

    def _open(self, transport: paramiko.Transport) -> Any:
        channel = transport.open_session(timeout=self._timeouts.channel)
        channel.settimeout(self._timeouts.channel)
        channel.exec_command(BOOTSTRAP)
        channel.settimeout(None)  # a slow upload may block for long; the invocation's timeout bounds it
        return channel

    @property
    def guard(self) -> Guard:
        """The guard of the open connection. Raises HostUnreachable if there is none."""
        connection = self._connection
        if connection is None or not connection.is_connected:
            raise self._lost()
        if self._guard is None or self._guard.closed:
            groups = self._guard.groups if self._guard is not None else ()
            self._guard = Guard(self._open(connection.transport), self._guard_s, groups)
            Thread(target=_keep_alive, args=(self._guard,), name=f"guard {self.name}", daemon=True).start()
        return self._guard

    def register(self, pid: int) -> None:
        """Register a process group with the guard, and wait until the guard has it."""
        with self._errors():
            guard = self.guard
            guard.add(pid)
            if not guard.wait_until_watching(self._timeouts.channel):
                raise HostUnreachable(
                    f"{self.name}: its shell does not react within {self._timeouts.channel:g} s",
                    f"the machine may be overloaded: ssh {self.settings.address} uptime",
                )

    def unregister(self, pid: int) -> None:
        """Remove a process group that has ended."""
        with suppress(DisaggError), self._errors():  # without a connection the guard has ended, too
            self.guard.remove(pid)

    def kill(self, pid: int) -> None:
        """Kill a process group: SIGTERM, then SIGKILL."""
        with self._errors():
            self.guard.kill(pid)

    def heartbeat(self) -> None:
        """Restart the guard's timer. A guard that has ended, as while this machine slept, is replaced."""
        with self._errors():
            self.guard.heartbeat()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import paramiko

        try:
            yield
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._explained(error) from error

    def _explained(self, error: BaseException) -> DisaggError:
        from disagg.fleet.machine.ssh.errors import explain

        connection = self._connection
        if connection is None or not _stays(connection.transport):
            return self._lost()
        return explain(self.name, self.settings, error)

    def _lost(self) -> HostUnreachable:
        return HostUnreachable(
            f"{self.name}: connection lost to {self.settings.address}",
            f"ping {self.settings.address}; then run the command again",
        )


def _keep_alive(guard: Guard) -> None:
    """Show the guard that this client still runs, until the connection ends."""
    import paramiko

    with suppress(OSError, EOFError, paramiko.SSHException):
        while not guard.wait_closed(HEARTBEAT_S):
            with suppress(TimeoutError):  # of another thread that reads with one: the next message counts as well
                guard.heartbeat()


def _stays(transport: paramiko.Transport) -> bool:
    """Whether the connection outlives an error. A broken one states why it ends, closes its channels, and ends shortly
    afterwards; a socket that fails under a call ends it within a tick of its thread."""
    if transport.saved_exception is None:
        transport.join(0.3)
    return transport.saved_exception is None and bool(transport.is_active())


class _Execution:
    """One invocation on one channel."""

    def __init__(self, machine: SSHMachine, channel: paramiko.Channel, invocation: Invocation, began: float) -> None:
        self._machine, self._channel, self._invocation, self._began = machine, channel, invocation, began
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        self._last_data = time.monotonic()

    def run(self) -> int:
        """Returns the exit code, -1 if sshd reports none. On any exception the process group is killed first."""
        pid: int | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            try:
                while self._invocation.stdout.pid is None and not self._ended():
                    self._step(selector)
                pid = self._invocation.stdout.pid
                if pid is not None:
                    self._machine.register(pid)
                    Thread(target=self._feed, name=f"feed {self._machine.name}", daemon=True).start()
                while not self._ended():
                    self._step(selector)
            except BaseException:  # also an interruption: leave nothing running on the host
                if pid is not None:
                    self._end(selector, pid)
                raise
        self._drain()
        self._invocation.stdout.end()
        self._invocation.stderr.end()
        if pid is not None:
            self._machine.unregister(pid)
        return self._channel.recv_exit_status() if self._channel.exit_status_ready() else -1

    def _step(self, selector: selectors.BaseSelector) -> None:
        """Wait a little, pass output on, check the deadline and the interruption."""
        self._wait(selector)
        self._drain()
        interruption.check()
        now = time.monotonic()
        if now > self._invocation.due(self._began):
            raise TimeoutError
        if now > self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            self._machine.heartbeat()

    def _wait(self, selector: selectors.BaseSelector) -> None:
        channel = self._channel
        if not channel.eof_received:
            selector.select(interruption.POLL_S)
        elif not channel.status_event.is_set():  # after the end of output the selector would return at once
            channel.status_event.wait(interruption.POLL_S)
        elif not channel.closed:
            time.sleep(0.005)

    def _drain(self) -> None:
        channel = self._channel
        while channel.recv_ready():
            self._invocation.stdout.feed(channel.recv(1 << 16))
            self._last_data = time.monotonic()
        while channel.recv_stderr_ready():
            self._invocation.stderr.feed(channel.recv_stderr(1 << 16))
            self._last_data = time.monotonic()

    def _ended(self) -> bool:
        channel = self._channel
        if channel.recv_ready() or channel.recv_stderr_ready():
            return False
        if channel.closed:
            return True
        return channel.exit_status_ready() and time.monotonic() - self._last_data > _DRAIN_S

    def _feed(self) -> None:
        """Send the program and its input. Errors are ignored: a command that ends early prints the reason itself."""
        with suppress(OSError, EOFError, ValueError):  # ValueError: the payload is closed once the command has ended
            self._channel.sendall(self._invocation.program)
            while self._invocation.payload is not None and (data := self._invocation.payload.read(1 << 16)):
                self._channel.sendall(data)
            self._channel.shutdown_write()

    def _end(self, selector: selectors.BaseSelector, pid: int) -> None:
        deadline = time.monotonic() + _KILL_S
        with suppress(DisaggError):  # if the connection is broken, the guard kills it
            self._machine.kill(pid)
            while not self._channel.closed and time.monotonic() < deadline:
                self._wait(selector)
                self._drain()
            self._machine.unregister(pid)
