"""Why a host does not serve, read from its machine over SSH when HTTP does not show it.

Only hosts that are not serving are read: `disagg status` of a healthy fleet opens no SSH connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, HostUnreachable
from disagg.fleet.facts.server import ServerFacts, read_server_facts
from disagg.fleet.lifecycle.loglines import (
    failed_to_start,
    last_error,
    last_plain_line,
    since_ready,
    since_start,
    stopped,
)
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import each
from disagg.token import token_digest

_NOT_SERVING: Final = ("not running", "unreachable", "silent", "foreign", "unauthorised")
ConnectWithin = Callable[[Host, float], Machine]
"""The machine of a host, with a connection timeout in seconds."""


def diagnose(
    fleet: Fleet,
    statuses: Sequence[HostStatus],
    token: str | None,
    seconds: float,
    connect: ConnectWithin = machine_for,
) -> list[HostStatus]:
    """The statuses, with reasons from the machines of hosts that are not serving, read within `seconds`."""

    def ask(host: Host) -> ServerFacts:
        with closing(connect(host, seconds)) as machine:
            return read_server_facts(machine, host.name, host)

    hosts = [fleet.hosts[status.host] for status in statuses if status.state in _NOT_SERVING]
    answers: dict[str, ServerFacts | DisaggError] = {}
    for outcome in each([host for host in hosts if host.placement.ssh], ask, timeout=seconds):
        late = HostUnreachable(f"SSH did not answer within {seconds:.1f} s either")
        error = late if outcome.timed_out else outcome.error
        answers[outcome.host.name] = error or outcome.value or late
    return [
        explained(status, fleet.hosts[status.host], answers[status.host], token) if status.host in answers else status
        for status in statuses
    ]


def explained(status: HostStatus, host: Host, server: ServerFacts | DisaggError, token: str | None) -> HostStatus:
    """The status from both HTTP and SSH."""
    if isinstance(server, DisaggError):
        reason = server.message.removeprefix(f"{host.name}: ")
        return replace(status, why=f"{status.why}; {reason}", hint=server.hint or status.hint)
    status = replace(status, restarts=server.restarts, release=status.release or server.release or None)
    if not server.current:
        return replace(
            status, state="not running", why="nothing is deployed there", hint=f"disagg deploy --host {host.name}"
        )
    if (port_conflict := server.port_conflict) is not None:
        port, holder = port_conflict
        why = f"port {port} there is in use by {holder}, so its server cannot start"
        hint = f"end that program: disagg ssh {host.name}; or give the host another port in hosts.toml: disagg deploy"
        return replace(status, state="foreign", why=why, hint=f"{hint} && disagg restart --host {host.name}")
    if status.state == "unauthorised":
        return _token(status, host, server, token)
    if server.pid is not None:
        return _alive(replace(status, pid=server.pid), host)
    return _dead(status, host, server)


def _token(status: HostStatus, host: Host, server: ServerFacts, token: str | None) -> HostStatus:
    ours = token_digest(token) if token else None
    restart = f"disagg restart --host {host.name}"
    if ours in server.token_digests:
        return replace(status, why="it was started with an earlier token than the deployed one", hint=restart)
    why = "its token differs from the one here" if ours else "there is no token here"
    adopt = f"disagg deploy --adopt-token --host {host.name} uses its token here"
    return replace(status, why=why, hint=f"{adopt}; or --replace-token, then {restart}")


def _alive(status: HostStatus, host: Host) -> HostStatus:
    if status.state == "not running":
        why = f"process {status.pid} runs there but does not listen yet"
        return replace(status, state="loading", why=why, hint=f"disagg logs -f --host {host.name}")
    if status.state == "silent":
        why = f"process {status.pid} runs there; {status.why}: it is loading or hangs"
        return replace(status, why=why, hint=f"disagg logs -f --host {host.name}")
    if status.state == "unreachable":
        why = f"process {status.pid} runs there, but from here {status.why}"
        hint = (
            status.hint if "Local Network" in status.hint else f"a firewall on {host.name} may close port {host.port}"
        )
        return replace(status, state="silent", why=why, hint=hint)
    return status


def _dead(status: HostStatus, host: Host, server: ServerFacts) -> HostStatus:
    start, logs = f"disagg start --host {host.name}", f"disagg logs --host {host.name}"
    last = since_start(server.log)
    # A server that failed to start may have been retried and stopped during that start: that is no ordinary stop.
    if not server.supervised and (not last or stopped(last)) and not failed_to_start(server.log):
        return replace(status, state="not running", why="SSH is fine; no server process runs there", hint=start)
    lines = since_ready(server.log)  # the last run may have ended before it logged anything
    error = last_error(lines)
    reason = error.message if error is not None else last_plain_line(lines) or "it logged no reason"
    hint = error.hint if error is not None else ""
    if server.supervised:
        times = f"{server.restarts} times" if server.restarts > 1 else "once"
        return replace(
            status, state="failed", why=f"it ended {times} and is being restarted: {reason}", hint=hint or logs
        )
    why = f"its process ended and nothing starts it again: {reason}"
    return replace(status, state="failed", why=why, hint=f"{hint}; then: {start}" if hint else f"{logs}; {start}")
