"""Why a host that is reached by SSH does not serve, where HTTP does not tell: its machine is asked.

Only hosts in trouble are asked: looking at a healthy fleet opens no SSH connection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, HostUnreachable
from disagg.fleet.facts.server import ServerFacts, read_server_facts
from disagg.fleet.lifecycle.health import HostStatus
from disagg.fleet.lifecycle.loglines import last_error, last_words, never_started, since_ready, since_start, stopped
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import each

_TROUBLED: Final = ("not running", "unreachable", "silent", "foreign", "unauthorised")
Connect = Callable[[Host, float], Machine]
"""The machine of a host, which gives up connecting after so many seconds."""


def diagnose(
    fleet: Fleet, statuses: Sequence[HostStatus], token: str | None, seconds: float, connect: Connect = machine_for
) -> list[HostStatus]:
    """The statuses; those in trouble are explained from what their machines answer within `seconds`."""

    def ask(host: Host) -> ServerFacts:
        with closing(connect(host, seconds)) as machine:
            return read_server_facts(machine, host.name, host)

    hosts = [fleet.hosts[status.host] for status in statuses if status.state in _TROUBLED]
    answers: dict[str, ServerFacts | DisaggError] = {}
    for outcome in each([host for host in hosts if not host.local], ask, timeout=seconds):
        late = HostUnreachable(f"SSH did not answer within {seconds:.1f} s either")
        error = late if outcome.timed_out else outcome.error
        answers[outcome.host.name] = error or outcome.value or late
    return [
        explained(status, fleet.hosts[status.host], answers[status.host], token) if status.host in answers else status
        for status in statuses
    ]


def explained(status: HostStatus, host: Host, seen: ServerFacts | DisaggError, token: str | None) -> HostStatus:
    """What HTTP and SSH tell together."""
    if isinstance(seen, DisaggError):
        words = seen.message.removeprefix(f"{host.name}: ")
        return replace(status, why=f"{status.why}; {words}", hint=seen.hint or status.hint)
    status = replace(status, restarts=seen.restarts, release=status.release or seen.release or None)
    if not seen.current:
        return replace(
            status, state="not running", why="nothing is deployed there", hint=f"disagg deploy --host {host.name}"
        )
    if status.state == "unauthorised":
        return _token(status, host, seen, token)
    if (port_conflict := seen.port_conflict) is not None:
        port, holder = port_conflict
        why = f"port {port} there is taken by {holder}, so that its server cannot start"
        hint = f"end that program: disagg ssh {host.name}; or give the host another port in hosts.toml: disagg deploy"
        return replace(status, state="foreign", why=why, hint=f"{hint} && disagg restart --host {host.name}")
    if seen.pid is not None:
        return _alive(replace(status, pid=seen.pid), host)
    return _dead(status, host, seen)


def _token(status: HostStatus, host: Host, seen: ServerFacts, token: str | None) -> HostStatus:
    ours = hashlib.sha256(f"{token}\n".encode()).hexdigest() if token else None
    restart = f"disagg restart --host {host.name}"
    if ours == seen.token_digest:
        return replace(status, why="it was started with an earlier token than the one that is deployed", hint=restart)
    why = "its token is not the one that is here" if ours else "there is no token here"
    return replace(status, why=why, hint=f"disagg deploy --host {host.name} && {restart}")


def _alive(status: HostStatus, host: Host) -> HostStatus:
    if status.state == "not running":
        why = f"process {status.pid} runs there but does not listen yet"
        return replace(status, state="loading", why=why, hint=f"disagg logs -f --host {host.name}")
    if status.state == "silent":
        why = f"process {status.pid} runs there; {status.why}: it loads, or hangs"
        return replace(status, why=why, hint=f"disagg logs -f --host {host.name}")
    if status.state == "unreachable":
        why = f"process {status.pid} runs there, but from here {status.why}"
        hint = (
            status.hint if "Local Network" in status.hint else f"a firewall on {host.name} may close port {host.port}"
        )
        return replace(status, state="silent", why=why, hint=hint)
    return status


def _dead(status: HostStatus, host: Host, seen: ServerFacts) -> HostStatus:
    start, logs = f"disagg start --host {host.name}", f"disagg logs --host {host.name}"
    last = since_start(seen.log)
    # A server that failed to start may have been tried again, and stopped in mid-start: that is no ordinary stop.
    if not seen.supervised and (not last or stopped(last)) and not never_started(seen.log):
        return replace(status, state="not running", why="SSH is fine; no server process runs there", hint=start)
    lines = since_ready(seen.log)  # the last run may have been cut short before it said anything
    error = last_error(lines)
    words = error.message if error is not None else last_words(lines) or "it logged no reason"
    hint = error.hint if error is not None else ""
    if seen.supervised:
        times = f"{seen.restarts} times" if seen.restarts > 1 else "once"
        return replace(status, state="failed", why=f"it ended {times} and is tried again: {words}", hint=hint or logs)
    why = f"its process ended and nothing starts it again: {words}"
    return replace(status, state="failed", why=why, hint=f"{hint}; then: {start}" if hint else f"{logs}; {start}")
