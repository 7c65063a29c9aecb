"""Start, stop and restart one server, and wait until it is healthy. Each has a result: an error is a failed one.

Starting a running server changes nothing. A server that exits while it starts has *failed*, and is stopped; one that is
still loading at the deadline is *slow*, and is left running.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.config import Host
from disagg.errors import DisaggError, FleetError, StartFailed
from disagg.fleet.lifecycle.base import ProcessState, Server, ServerOutcome, ServerResult
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll_host
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.machine import interruption
from disagg.fleet.token.there import require_own

OnProgress = Callable[[str, str], None]
"""Called with (host, what it does now), from several threads."""


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
