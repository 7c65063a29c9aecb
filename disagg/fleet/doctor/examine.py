"""Examine a fleet: every host at the same time, then the links that KV takes between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, HostKeyRefused, HostUnreachable, LoginRefused
from disagg.fleet.doctor import host as about_host
from disagg.fleet.doctor import pair as about_pair
from disagg.fleet.doctor.gather import HostReadings, examine_host
from disagg.fleet.facts.findings import Finding, fault, ok
from disagg.fleet.facts.python import HostPython
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.link.judge import judge
from disagg.fleet.link.measure import MeasuredLink, MeasurementBounds, measure_all
from disagg.fleet.link.survey import kv_pairs
from disagg.fleet.machine.connect import Connect, Machines, machine_for
from disagg.fleet.machine.fan_out import HostOutcome, each

OnStep = Callable[[str], None]
"""Called with what is examined next."""


@dataclass(frozen=True, slots=True)
class HostFindings:
    """One host's findings. error: set if it could not be examined at all."""

    host: Host
    findings: tuple[Finding, ...]
    error: DisaggError | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host.name,
            "findings": [finding.to_json() for finding in self.findings],
            "error": self.error.to_json() if self.error else None,
        }


@dataclass(frozen=True, slots=True)
class PairFindings:
    """One KV link's findings. link: None if it was not measured."""

    prefill: Host
    decode: Host
    findings: tuple[Finding, ...]
    link: MeasuredLink | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "prefill": self.prefill.name,
            "decode": self.decode.name,
            "findings": [finding.to_json() for finding in self.findings],
            "link": self.link.to_json() if self.link else None,
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings. fleet: those about several hosts."""

    hosts: tuple[HostFindings, ...]
    pairs: tuple[PairFindings, ...]
    fleet: tuple[Finding, ...]

    @property
    def findings(self) -> list[Finding]:
        parts = [*(host.findings for host in self.hosts), *(pair.findings for pair in self.pairs), self.fleet]
        return [finding for part in parts for finding in part]

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 without faults, 4 if a host cannot be reached, else 1. Warnings do not count."""
        if any(isinstance(report.error, HostUnreachable) for report in self.hosts):
            return 4
        return 1 if self.count("fault") else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.exit_code == 0,
            "hosts": [report.to_json() for report in self.hosts],
            "pairs": [report.to_json() for report in self.pairs],
            "fleet": [finding.to_json() for finding in self.fleet],
        }


def examine(
    fleet: Fleet,
    state: State,
    names: Sequence[str] = (),
    *,
    on_step: OnStep = lambda what: None,
    connect: Connect = machine_for,
    bounds: MeasurementBounds = MeasurementBounds(),  # noqa: B008  # frozen
) -> Diagnosis:
    """Examine the named hosts (all without names), and the links between any of them and its peers."""
    chosen = fleet.select(names)
    pairs = [(one, other) for one, other in kv_pairs(fleet) if one in chosen or other in chosen]
    everyone = [host for host in fleet.hosts.values() if host in chosen or any(host in pair for pair in pairs)]
    involved = [host for host in everyone if not host.whole]
    with ExitStack() as stack:
        machines = stack.enter_context(Machines(connect))
        statuses = stack.enter_context(ThreadPoolExecutor(1)).submit(_statuses, fleet, state, everyone)
        on_step(f"{len(everyone)} hosts")
        outcomes = each(involved, lambda host: examine_host(fleet, host, machines[host], _peers(fleet, host)))
        readings = {outcome.host.name: outcome.value for outcome in outcomes if outcome.value is not None}
        ends = {
            name: HostPython(one.host, machines[one.host], one.python)
            for name, one in readings.items()
            if one.python is not None
        }
        links = measure_all(pairs, ends, bounds, lambda one, other: on_step(f"the link {one.name} → {other.name}"))
        server_statuses = statuses.result(timeout=60)
    token = state.tokens.known
    examined = {outcome.host.name: _host(fleet, outcome, server_statuses, token) for outcome in outcomes}
    examined |= {host.name: _whole(host, server_statuses[host.name]) for host in everyone if host.whole}
    hosts = tuple(examined[host.name] for host in chosen)
    read = [*readings.values()]
    everywhere = (
        *about_pair.versions(read, server_statuses),
        *about_pair.settings(fleet, read, server_statuses),
        *about_pair.tokens(read, token is not None and state.tokens.rotating),
        *about_pair.clocks(read),
    )
    about_pairs = [_pair(fleet, pair, link, readings, server_statuses) for pair, link in zip(pairs, links, strict=True)]
    return Diagnosis(hosts, tuple(about_pairs), everywhere)


def _peers(fleet: Fleet, host: Host) -> list[Host]:
    """The hosts that servers on this host connect to: a prefill host delivers KV to its decode hosts."""
    return [decode for prefill, decode in kv_pairs(fleet) if prefill is host]


def _statuses(fleet: Fleet, state: State, hosts: Sequence[Host]) -> dict[str, HostStatus]:
    token = state.tokens.known
    return {status.host: status for status in poll(fleet, token, state, [host.name for host in hosts])}


def _host(
    fleet: Fleet, outcome: HostOutcome[HostReadings], statuses: dict[str, HostStatus], token: str | None
) -> HostFindings:
    host = outcome.host
    if outcome.value is None:
        error = outcome.error
        assert error is not None, "an outcome has one of both"
        kinds: tuple[tuple[type[DisaggError], str], ...]
        kinds = ((HostKeyRefused, "host key"), (LoginRefused, "login"), (HostUnreachable, "ssh"))
        check = next((name for kind, name in kinds if isinstance(error, kind)), "facts")
        return HostFindings(host, (fault(check, error.message.removeprefix(f"{host.name}: "), error.hint),), error)
    return HostFindings(host, tuple(about_host.findings(fleet, outcome.value, statuses.get(host.name), token)))


def _whole(host: Host, status: HostStatus) -> HostFindings:
    """A whole-request host is not examined beyond its answer: its machine is not disagg's."""
    if status.ok:
        return HostFindings(host, (ok("server", status.url),))
    error = HostUnreachable(status.why, status.hint) if status.state == "unreachable" else None
    return HostFindings(host, (fault("server", status.why, status.hint),), error)


def _pair(
    fleet: Fleet,
    pair: tuple[Host, Host],
    link: MeasuredLink | DisaggError | None,
    readings: dict[str, HostReadings],
    statuses: dict[str, HostStatus],
) -> PairFindings:
    prefill, decode = pair
    findings: list[Finding] = []
    if isinstance(link, DisaggError):
        findings.append(fault("link", link.message, link.hint))
    elif link is not None:
        findings += judge(link, prefill, decode)
    if prefill.name in readings and decode.name in readings:
        ends = readings[prefill.name], readings[decode.name]
        for model in (name for name in prefill.all_models if name in decode.all_models):
            if isinstance(link, MeasuredLink):
                findings += about_pair.hides(link, fleet.models[model], *ends)
            findings += about_pair.same_model(model, *ends, statuses)
    return PairFindings(prefill, decode, tuple(findings), link if isinstance(link, MeasuredLink) else None)
