"""What each host of a fleet needs: where it reads its model from, as its own hosts.toml has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.config import Fleet, Host
from disagg.config.addresses import is_path
from disagg.fleet.deploy.facts import Facts
from disagg.fleet.deploy.models import source
from disagg.fleet.deploy.steps import Refusal


@dataclass(frozen=True, slots=True)
class Need:
    """A host, its model, and the source as that host has it: a hub id or an absolute path. carried: it comes with
    `disagg deploy`, so there is nothing to pull."""

    host: Host
    source: str
    carried: bool = False

    @property
    def on_hub(self) -> bool:
        return not is_path(self.source)


def need(fleet: Fleet, host: Host, facts: Facts) -> Need:
    """What this host needs. A local host reads the source itself: nothing is carried to it."""
    if host.connector == "local":
        return Need(host, fleet.models[host.model].sources[host.engine.name])
    found = source(fleet, host, facts.layout)
    if isinstance(found, Refusal):
        return Need(host, fleet.models[host.model].sources[host.engine.name], carried=True)
    return Need(host, found.text, carried=bool(found.name))


def chosen(fleet: Fleet, models: Sequence[str], hosts: Sequence[Host]) -> list[Host]:
    """Of these hosts, those that serve one of these models (by name or alias); all of them where none is named."""
    names = {fleet.model(model).name for model in models}
    return [host for host in hosts if not names or host.model in names]
