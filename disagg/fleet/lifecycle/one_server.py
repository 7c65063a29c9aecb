"""One server: what start, stop and restart do with it, until it is healthy, has failed or has ended.

Starting a running server changes nothing. A server that exits while it starts has *failed*, and is stopped; one that is
still loading at the deadline is *slow*, and is left running. `local` has the servers that this machine spawns from this
installation, `deployed` those under the service manager of a machine that disagg was deployed to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Protocol

from disagg.config import Host
from disagg.errors import DisaggError, FleetError, HostUnreachable, StartFailed
from disagg.fleet.lifecycle.loglines import hint_of_start, last_error, last_plain_line, since_start
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll_host
from disagg.fleet.lifecycle.status.host_status import HealthState, HostStatus
from disagg.fleet.machine import interruption
from disagg.fleet.tokens.there import require_own

OnProgress = Callable[[str, str], None]
"""Called with (host, what it does now), from several threads."""

LAST_LINES = 50
UNDECIDED: Final[tuple[HealthState, ...]] = ("loading", "silent", "stalled", "draining")

ServerOutcome = Literal[
    "started", "restarted", "unchanged", "slow", "failed", "stopped", "killed", "not running", "left", "not managed"
]
"""not managed: a whole-request host, which disagg never starts. left: not touched, because an earlier host of its model
did not come back."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A server's process. pid: None if it does not run. stale: why it is not what should run, "" if it is.
    earlier_release: it runs an earlier release, to which `disagg rollback` can return. token_digests: of its machine's
    tokens, if it has its own."""

    pid: int | None = None
    stale: str = ""
    earlier_release: bool = False
    token_digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The outcome on one host. error: set if the outcome is failed or slow."""

    host: str
    outcome: ServerOutcome
    seconds: float = 0.0
    error: DisaggError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.outcome != "left"

    def to_json(self) -> dict[str, Any]:
        error = self.error.to_json() if self.error else None
        return {"host": self.host, "outcome": self.outcome, "seconds": round(self.seconds, 3), "error": error}


def exit_code(results: Sequence[ServerResult]) -> int:
    """0: all succeeded; 4: a machine does not answer; 1: a host failed; 3: nothing worse than a slow start."""
    if any(isinstance(result.error, HostUnreachable) for result in results):
        return 4
    if any(result.outcome in ("failed", "left") for result in results):
        return 1
    return 3 if any(not result.ok for result in results) else 0


class Server(Protocol):
    """One host's server. Used by one thread at a time. Methods raise FleetError, HostUnreachable."""

    @property
    def host(self) -> Host: ...

    undecided_states: ClassVar[tuple[HealthState, ...]]
    """The states over HTTP from which a server whose process runs may still become healthy."""

    def inspect(self) -> ProcessState:
        """The server's process now. FleetError if nothing is installed that could be started."""
        ...

    def running(self) -> bool | None:
        """Whether its process runs; None if nothing is installed that could run."""
        ...

    def start(self) -> None:
        """Start it. It must not run already. PortInUse if another program uses its port."""
        ...

    def ended(self) -> StartFailed | None:
        """Why the process that `start` started has ended, None while it runs. Cheap enough for a polling loop."""
        ...

    def stop(self) -> bool:
        """Stop it and wait until it has ended. True if it had to be killed. Does nothing if it does not run."""
        ...

    def last_lines(self) -> list[str]:
        """The last LAST_LINES lines of its log."""
        ...


@dataclass(slots=True)
class OneServer:
    """What is done to one server at a time, by several threads. begun, down: the hosts, by name, that an interruption
    would leave with a server that was started just now, or without one that was stopped."""

    state: State
    report: OnProgress
    begun: dict[str, Host] = field(default_factory=dict)
    down: dict[str, Host] = field(default_factory=dict)

    def start(self, server: Server, timeout_s: float) -> ServerResult:
        """Start it unless it runs."""
        host, process = server.host, self._inspected(server)
        if process.stale:
            raise FleetError(f"{host.name} {process.stale}", f"disagg restart --host {host.name}")
        if process.pid is not None:
            return self._until_healthy(server, "unchanged", timeout_s)
        self.begun[host.name] = host
        return self._launch(server, "started", timeout_s)

    def stop(self, server: Server) -> ServerResult:
        """Stop it if it runs."""
        running = server.running()
        if running is None:
            return ServerResult(server.host.name, "not running")
        if running:
            self.report(server.host.name, "stopping")
        return stopped(server.host.name, running, server.stop)

    def restart(self, server: Server, timeout_s: float) -> ServerResult:
        """Stop and start it; start it if it does not run."""
        process = self._inspected(server)
        if process.pid is None:
            return self._launch(server, "started", timeout_s)
        self.down[server.host.name] = server.host
        self.report(server.host.name, "stopping")
        server.stop()
        result = attempt(server.host.name, lambda: self._launch(server, "restarted", timeout_s))
        if process.earlier_release and result.outcome == "failed" and isinstance(result.error, StartFailed):
            name = server.host.name
            back = f"or go back: disagg rollback --host {name} && disagg start --host {name}"
            result.error.hint = f"{result.error.hint}; {back}"
        return result

    def bring_back(self, server: Server) -> ServerResult:
        """Start a server again that an interrupted restart has stopped."""
        self.report(server.host.name, "starting again")
        server.stop()  # the interruption may have come while it was stopping
        server.start()
        return ServerResult(server.host.name, "restarted")

    def _inspected(self, server: Server) -> ProcessState:
        """The server's process. FleetError before anything is stopped or started if its token is not this machine's."""
        process = server.inspect()
        require_own(self.state.tokens.all, process.token_digests, server.host.name)
        return process

    def _launch(self, server: Server, outcome: ServerOutcome, timeout_s: float) -> ServerResult:
        self.report(server.host.name, "starting")
        try:
            server.start()
            self.down.pop(server.host.name, None)
            result = self._until_healthy(server, outcome, timeout_s)
        except StartFailed:
            self.down.pop(server.host.name, None)
            server.stop()  # its service manager would restart it forever
            raise
        if result.outcome == "failed":
            server.stop()
        return result

    def _until_healthy(self, server: Server, outcome: ServerOutcome, timeout_s: float) -> ServerResult:
        began = time.monotonic()
        status = self._await_health(server, began + timeout_s)
        host, seconds = server.host, time.monotonic() - began
        if status.state == "healthy":
            return ServerResult(host.name, outcome, seconds)
        if status.state in server.undecided_states:
            return ServerResult(host.name, "slow", seconds, _slow(host, status, seconds))
        error = StartFailed(f"{host.name}: {status.why}", status.hint)
        error.log = tuple(server.last_lines())
        return ServerResult(host.name, "failed", seconds, error)

    def _await_health(self, server: Server, deadline: float) -> HostStatus:
        """Poll until the server is healthy or has failed; at the deadline, its last status."""
        token, pause, host = self.state.tokens.current, 0.05, server.host
        while True:
            status = poll_host(host, token, self.state)
            if (error := server.ended()) is not None:
                raise error
            # A server that is importing a framework may not answer or listen for seconds: it is loading.
            undecided = status.state in server.undecided_states
            self.report(host.name, "loading" if undecided else status.state)
            if not undecided or time.monotonic() > deadline:
                return status
            interruption.sleep(pause)
            pause = min(0.5, pause * 1.5)


def attempt(name: str, action: Callable[[], ServerResult]) -> ServerResult:
    """The action's result; a failed one if it raises DisaggError. name: of the server in it."""
    began = time.monotonic()
    try:
        return action()
    except DisaggError as error:
        return ServerResult(name, "failed", time.monotonic() - began, error)


def stopped(name: str, running: bool, stop: Callable[[], bool]) -> ServerResult:
    """Stop a server. running: whether its process was seen. stop: whether it had to be killed."""
    began = time.monotonic()
    outcome: ServerOutcome = "killed" if stop() else "stopped" if running else "not running"
    return ServerResult(name, outcome, time.monotonic() - began if running else 0.0)


def _slow(host: Host, status: HostStatus, seconds: float) -> FleetError:
    hint = f"disagg status --watch, or disagg logs -f --host {host.name}"
    if status.state == "unreachable":
        message = f"{host.name} runs, but cannot be reached from here: {status.why}; it was left running"
        return FleetError(message, status.hint)
    return FleetError(f"{host.name} is still loading after {seconds:.0f} s; it was left running", hint)


def start_failed(name: str, lines: Sequence[str]) -> StartFailed:
    """Why a server exited: the last error it logged, else the last line it printed."""
    own = since_start(lines)
    if last_error(own) is None and not last_plain_line(own):  # just restarted: read the run before
        own = since_start(lines[: len(lines) - len(own)]) or own
    logged = last_error(own)
    if logged is not None:
        hint = logged.hint or hint_of_start(name, "")
        return StartFailed(f"{name} did not start: {logged.message}", hint, log=own[-LAST_LINES:])
    words = last_plain_line(own) or "it printed nothing"
    return StartFailed(f"{name} exited while starting: {words}", hint_of_start(name, words), log=own[-LAST_LINES:])
