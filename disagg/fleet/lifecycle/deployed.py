"""A server on a machine that disagg was deployed to: the machine's service manager starts, stops and restarts it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from disagg.config import Host, ServiceManager
from disagg.errors import CommandFailed, FleetError, PortInUse, StartFailed
from disagg.fleet import services
from disagg.fleet.changes.links import move_links
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.server import ServerFacts, read_server_facts
from disagg.fleet.lifecycle.one_server import LAST_LINES, UNDECIDED, ProcessState, start_failed
from disagg.fleet.lifecycle.status.host_status import HealthState
from disagg.fleet.machine import interruption
from disagg.fleet.machine.machine import Machine, last_lines, script

_APPEAR_S: Final = 15.0
"""How long after the manager's reply the process must be visible at the latest."""
_BRIEF_S: Final = 1.5
"""A process that has written to its log and is not visible for this long has ended."""
_INSPECT_EVERY_S: Final = 1.0
_NEEDS_ROOT: Final = 77


@dataclass(slots=True)
class DeployedServer:
    """Server for hosts that are reached by SSH. Under the host's lock, what was seen holds until this changes it."""

    host: Host
    machine: Machine
    undecided_states: ClassVar[tuple[HealthState, ...]] = (*UNDECIDED, "not running", "unreachable")
    """Until it listens, nothing but the machine shows that its process runs."""
    _pid: int | None = None
    _inspected: float = 0.0
    _seen: ServerFacts | None = None

    def inspect(self) -> ProcessState:
        facts = self._seen = self._facts()
        self._inspected = time.monotonic()
        if not facts.current:
            raise FleetError(f"{self.host.name}: nothing is deployed there", f"disagg deploy --host {self.host.name}")
        if self.host.service != "process" and self.host.service not in facts.managers:
            raise FleetError(
                f"{self.host.name}: hosts.toml names {self.host.service}, which has no service of it there",
                f"disagg deploy --host {self.host.name}",
            )
        if facts.model not in ("", self.host.model):
            raise FleetError(
                f"{self.host.name}: hosts.toml names the model {self.host.model}, and {facts.model} is deployed there",
                f"deploy first: disagg deploy --host {self.host.name}",
            )
        self._pid = facts.pid
        if facts.pid is None:
            return ProcessState(token_digests=facts.token_digests)
        if facts.release != facts.current:
            stale = f"still runs release {facts.release[:8]}, and {facts.current[:8]} is deployed"
            return ProcessState(facts.pid, stale, earlier_release=True, token_digests=facts.token_digests)
        alone = "" if facts.supervised else "runs without its supervisor, so nothing would restart it"
        return ProcessState(facts.pid, alone, token_digests=facts.token_digests)

    def running(self) -> bool | None:
        facts = self._seen = self._facts()
        return facts.pid is not None if facts.current or facts.pid is not None else None

    def start(self) -> None:
        before = self._taken()
        if before.port_conflict is not None:
            port, holder = before.port_conflict
            raise PortInUse(
                f"{self.host.name}: port {port} there is in use by {holder}",
                f"stop it: disagg ssh {self.host.name}; or give {self.host.name} another port, then: disagg deploy",
            )
        if before.current not in ("", before.service):
            move_links(self.machine, HostPaths(before.home, self.host.name), [("running", before.current)])
        # "restart" also ends a manager's pause before its next try, so that a repaired host starts at once.
        _manage(
            self.machine, self.host.name, before.home, self.host.service, "restart" if before.supervised else "start"
        )
        self._pid = self._appeared(before)
        self._inspected = time.monotonic()

    def _appeared(self, before: ServerFacts) -> int | None:
        """The process's pid; None if it has already ended."""
        asked = time.monotonic()
        while True:
            facts, waited = self._facts(), time.monotonic() - asked
            if facts.pid is not None:
                return facts.pid
            if waited > _BRIEF_S and facts.log != before.log:
                return None
            if waited > _APPEAR_S:
                name = self.host.name
                message = f"{name}: {self.host.service} accepted the start, and no process appeared"
                error = StartFailed(message, f"disagg logs --host {name}")
                error.log = facts.log[-LAST_LINES:]
                raise error
            interruption.sleep(0.1)

    def ended(self) -> StartFailed | None:
        """The manager restarts a process that ended, so another pid means that the first one ended."""
        if self._pid is not None and time.monotonic() - self._inspected < _INSPECT_EVERY_S:
            return None
        facts = self._facts()
        self._inspected = time.monotonic()
        if facts.pid is not None and facts.pid == self._pid:
            return None
        return start_failed(self.host.name, before_restart(facts.log, facts.pid))

    def stop(self) -> bool:
        self._seen = stop_there(self.machine, self.host, self._taken())
        return False

    def last_lines(self) -> list[str]:
        return list(self._facts().log)

    def _taken(self) -> ServerFacts:
        """What was seen last, which no longer holds after the change that follows."""
        seen, self._seen = self._seen, None
        return seen or self._facts()

    def _facts(self) -> ServerFacts:
        return read_server_facts(self.machine, self.host.name, self.host)


def stop_there(machine: Machine, host: Host | str, before: ServerFacts) -> ServerFacts | None:
    """Stop a host's server under every service manager that has it. Returns what is seen then, None if that changed.

    host: only its name if hosts.toml no longer has it. before: what was seen before."""
    name, known = (host, None) if isinstance(host, str) else (host.name, host)
    for manager in before.managers:
        _manage(machine, name, before.home, manager, "stop")
    after = read_server_facts(machine, name, known)
    if after.pid is None:
        return after
    result = machine.run([str(after.pid)], script=script("end_group.sh"), timeout=services.VERB_S)
    if not result.ok:
        raise FleetError(f"{name}: {last_lines(result.stderr, 3)}", f"disagg ssh {name}")
    return None


def hosts_there(machine: Machine) -> list[str]:
    """The host names for which something is deployed on this machine."""
    result = machine.run([], script=script("list_hosts.sh"))
    return result.stdout.splitlines() if result.ok else []


def before_restart(log: Sequence[str], pid: int | None) -> list[str]:
    """The log without the lines of a process that was started after the failed one."""
    lines = list(log)
    if pid is None:
        return lines
    for index in range(len(lines) - 1, -1, -1):
        if '"event": "starting"' in lines[index] and lines[index].rstrip().endswith(f'"pid": {pid}}}'):
            return lines[:index]
    return lines


def _manage(machine: Machine, name: str, home: str, manager: ServiceManager, verb: services.Verb) -> None:
    command = services.command(manager, HostPaths(home, name), verb)
    result = machine.run(command.argv, script=command.script, timeout=command.timeout)
    if result.ok:
        return
    words = last_lines(result.stderr.strip() or result.stdout, 12) or "no output"
    hint = f"disagg ssh {name}"
    if result.code == _NEEDS_ROOT:
        hint = f"give its account sudo without a password, or there: sudo launchctl kickstart -k system/disagg.{name}"
    raise CommandFailed(
        f"{name}: {manager} cannot {verb} its server: {words}", hint, exit_status=result.code, stdout=result.stdout
    )
