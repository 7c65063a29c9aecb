"""The model that each host requires, with its source as the host's own hosts.toml has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.config import Fleet, Host
from disagg.config.addresses import is_path, same_machine
from disagg.fleet.deploy.models import source
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.host import HostFacts


@dataclass(frozen=True, slots=True)
class RequiredModel:
    """The source of a host's model: a hub id or a path. A path is absolute, or below "~/", which is another folder on
    each host. carried: `disagg deploy` copies it there, so there is nothing to pull."""

    host: Host
    source: str
    carried: bool = False

    @property
    def on_hub(self) -> bool:
        return not is_path(self.source)


def required_model(fleet: Fleet, host: Host, facts: HostFacts) -> RequiredModel:
    """The model this host requires. A host that is not deployed to reads the source in place."""
    model, engine = fleet.models[host.model], host.engine.name
    if (written := model.written.get(engine, "")).startswith("~/"):
        return RequiredModel(host, written)
    if not host.placement.deployed:
        return RequiredModel(host, model.sources[engine])
    found = source(fleet, host, facts.paths)
    if isinstance(found, Refusal):
        return RequiredModel(host, model.sources[engine], carried=True)
    return RequiredModel(host, found.text, carried=bool(found.name))


def chosen(fleet: Fleet, models: Sequence[str], hosts: Sequence[Host]) -> list[Host]:
    """Those of these hosts that serve one of these models (by name or alias); all if no model is named. Gateways and
    simulated hosts have no model."""
    names = {fleet.model(model).name for model in models}
    return [host for host in hosts if (not names or host.model in names) and not (host.gateway or host.simulated)]


def neighbours(fleet: Fleet, hosts: Sequence[Host]) -> list[Host]:
    """These hosts and all others on the same machines, which share files."""
    places = {same_machine(host.address) for host in hosts}
    return [host for host in fleet.engine_hosts if same_machine(host.address) in places]
