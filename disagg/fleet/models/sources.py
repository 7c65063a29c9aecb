"""What each host of a fleet needs: where it reads its model from, as its own hosts.toml has it."""

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
    """A host, its model, and the source as that host has it: a hub id, an absolute path, or one below "~/", which
    is another folder on each host. carried: it comes with `disagg deploy`, so there is nothing to pull."""

    host: Host
    source: str
    carried: bool = False

    @property
    def on_hub(self) -> bool:
        return not is_path(self.source)


def required_model(fleet: Fleet, host: Host, facts: HostFacts) -> RequiredModel:
    """What this host needs. A local host reads the source itself: nothing is carried to it."""
    model, engine = fleet.models[host.model], host.engine.name
    if (written := model.written.get(engine, "")).startswith("~/"):
        return RequiredModel(host, written)
    if host.local:
        return RequiredModel(host, model.sources[engine])
    found = source(fleet, host, facts.layout)
    if isinstance(found, Refusal):
        return RequiredModel(host, model.sources[engine], carried=True)
    return RequiredModel(host, found.text, carried=bool(found.name))


def chosen(fleet: Fleet, models: Sequence[str], hosts: Sequence[Host]) -> list[Host]:
    """Of these hosts, those that serve one of these models (by name or alias); all of them where none is named."""
    names = {fleet.model(model).name for model in models}
    return [host for host in hosts if not names or host.model in names]


def neighbours(fleet: Fleet, hosts: Sequence[Host]) -> list[Host]:
    """These hosts and all others on their machines, which share their files."""
    places = {same_machine(host.address) for host in hosts}
    return [host for host in fleet.hosts.values() if same_machine(host.address) in places]
