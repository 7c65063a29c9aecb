"""The links of a fleet, measured and judged, with the prefill rate that each can hide for its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, FleetError, HostUnreachable, UsageError
from disagg.fleet.facts.findings import Finding, fault, note
from disagg.fleet.facts.host import read_host_facts
from disagg.fleet.facts.python import HostPython, python_on
from disagg.fleet.link.judge import hidden_tokens_per_s, judge
from disagg.fleet.link.measure import MeasuredLink, MeasurementBounds, measure_all
from disagg.fleet.machine.connect import Connect, Machines, machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.machine import Machine
from disagg.fleet.models.inventory import required_model, stored_models
from disagg.planning.checkpoint import kv_bytes_per_token
from disagg.planning.sizing import read_size, size_source

Pair = tuple[Host, Host]
"""Sender and receiver."""


@dataclass(frozen=True, slots=True)
class LinkSurvey:
    """One link. link: None if it could not be measured; error: why. kv_bytes_per_token: of the sender's model, None if
    its size is unknown."""

    sender: Host
    receiver: Host
    findings: tuple[Finding, ...]
    link: MeasuredLink | None = None
    kv_bytes_per_token: float | None = None
    error: DisaggError | None = None

    @property
    def carries_kv(self) -> bool:
        """Whether KV takes this link: from a prefill host to a decode host of its model."""
        return _carries_kv(self.sender, self.receiver)

    @property
    def hidden_tokens_per_s(self) -> float | None:
        """The fastest prefill whose KV this link carries as fast as it is computed."""
        rate = self.link.bits_per_s if self.link else None
        return hidden_tokens_per_s(rate, self.kv_bytes_per_token) if rate and self.kv_bytes_per_token else None

    def to_json(self) -> dict[str, Any]:
        error = self.error or (self.link.error if self.link else None)
        return {
            "from": self.sender.name,
            "to": self.receiver.name,
            "model": ", ".join(_shared(self.sender, self.receiver)) if self.carries_kv else None,
            **(self.link.to_json() if self.link else {}),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "hidden_tokens_per_s": self.hidden_tokens_per_s,
            "findings": [finding.to_json() for finding in self.findings],
            "error": error.to_json() if error else None,
        }


def exit_code(surveyed: Sequence[LinkSurvey]) -> int:
    """0 without faults, 4 if a host cannot be reached, else 1. Warnings do not count."""
    if any(isinstance(one.error, HostUnreachable) for one in surveyed):
        return 4
    return 1 if any(finding.level == "fault" for one in surveyed for finding in one.findings) else 0


def kv_pairs(fleet: Fleet) -> list[Pair]:
    """Every prefill host with every decode host of the same model, once, in file order."""
    pairs = {
        (prefill.table, decode.table): (fleet.hosts[prefill.table], fleet.hosts[decode.table])
        for model in fleet.models
        for prefill in fleet.serving(model, "prefill")
        for decode in fleet.serving(model, "decode")
    }
    return list(pairs.values())


def pairs_between(fleet: Fleet, sender: Host | None, receiver: Host | None) -> list[Pair]:
    """The KV links from `sender` or to `receiver`; with both, the link between them whatever they serve. UsageError if
    there is none."""
    if sender is not None and receiver is not None:
        if sender.name == receiver.name:
            raise UsageError(f"{sender.name} has no link to itself", "name two hosts")
        return [(sender, receiver)]
    pairs = [pair for pair in kv_pairs(fleet) if sender in (None, pair[0]) and receiver in (None, pair[1])]
    if not pairs:
        one = sender or receiver
        verb = "leaves" if sender else "reaches"
        raise UsageError(
            f"no KV {verb} {one.name}" if one else f"{fleet.path.name} has no prefill and decode host of one model",
            "KV goes from a prefill host to a decode host of its model; name both --from and --to for any two hosts",
        )
    return pairs


def survey(
    fleet: Fleet,
    pairs: Sequence[Pair],
    *,
    on_step: Callable[[str], None] = lambda what: None,
    connect: Connect = machine_for,
    bounds: MeasurementBounds = MeasurementBounds(),  # noqa: B008  # frozen
) -> list[LinkSurvey]:
    """Measure and judge these links; results in the pairs' order. A failure is part of its own link's result."""
    hosts = list({host.name: host for pair in pairs for host in pair}.values())
    senders = {sender.name for sender, _ in pairs}
    with Machines(connect) as machines:
        on_step(f"{len(hosts)} hosts")
        outcomes = each(hosts, lambda host: _prepare(fleet, host, machines[host], host.name in senders))
        ready = {outcome.host.name: outcome.value for outcome in outcomes if outcome.value is not None}
        errors = {outcome.host.name: outcome.error for outcome in outcomes if outcome.error is not None}
        ends = {name: one.end for name, one in ready.items()}
        links = measure_all(pairs, ends, bounds, lambda one, other: on_step(f"{one.name} → {other.name}"))
    return [_judged(pair, ready, errors, link) for pair, link in zip(pairs, links, strict=True)]


@dataclass(frozen=True, slots=True)
class _Ready:
    end: HostPython
    per_token: float | None = None


def _prepare(fleet: Fleet, host: Host, machine: Machine, sends: bool) -> _Ready:
    """The facts of a host that a measurement needs. Raises HostUnreachable, and FleetError if it has no Python."""
    facts = read_host_facts(machine, host)
    python = python_on(host, facts)
    if python is None:
        raise FleetError(f"{host.name}: it has no Python to measure with", f"disagg doctor --host {host.name}")
    per_token = None
    if sends:
        served = fleet.run_by(host)
        sources = {one.model: required_model(fleet, one, facts).source for one in served}
        stored = stored_models(machine, python, host, list(dict.fromkeys(sources.values())))
        sizes = [_per_token(fleet, one, stored[sources[one.model]].config) for one in served]
        per_token = max((one for one in sizes if one is not None), default=None)  # of the model that needs most
    return _Ready(HostPython(host, machine, python), per_token)


def _per_token(fleet: Fleet, host: Host, config: Mapping[str, Any]) -> float | None:
    """KV bytes per token of a host's one model, of which it has this config.json; without one from the model's name, or
    its files on this machine."""
    model = fleet.models[host.model]
    if config:
        return kv_bytes_per_token(config, host.engine.dtype, model.context)
    try:
        size = read_size(size_source(model.name, model.sources.values()))
        return size.layout(host.engine.dtype).nbytes(model.context) / model.context
    except DisaggError:  # the size is unknown; the rate is useful without it
        return None


def _judged(
    pair: Pair,
    ready: dict[str, _Ready],
    errors: dict[str, DisaggError],
    link: MeasuredLink | DisaggError | None,
) -> LinkSurvey:
    sender, receiver = pair
    failed = [errors[host.name] for host in pair if host.name in errors]
    if isinstance(link, DisaggError):
        failed.append(link)
    if failed or not isinstance(link, MeasuredLink):
        faults = tuple(fault(_check(error), error.message, error.hint) for error in failed)
        return LinkSurvey(sender, receiver, faults, error=failed[0])
    findings = judge(link, sender, receiver)
    if not _carries_kv(sender, receiver):
        findings.append(note("direction", "no KV takes this direction: " + ", ".join(map(_serves, pair))))
        return LinkSurvey(sender, receiver, tuple(findings), link)
    return LinkSurvey(sender, receiver, tuple(findings), link, ready[sender.name].per_token)


def _check(error: DisaggError) -> str:
    return "ssh" if isinstance(error, HostUnreachable) else "link"


def _carries_kv(sender: Host, receiver: Host) -> bool:
    return "prefill" in sender.roles and "decode" in receiver.roles and bool(_shared(sender, receiver))


def _shared(sender: Host, receiver: Host) -> list[str]:
    """The models that both have."""
    return [name for name in sender.all_models if name in receiver.all_models]


def _serves(host: Host) -> str:
    return f"{host.name} is {' and '.join(host.roles)} of {', '.join(host.all_models)}"
