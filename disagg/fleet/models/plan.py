"""What to pull to which host, from the hub or from another host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from disagg.config import Host
from disagg.config.addresses import same_machine
from disagg.errors import FleetError
from disagg.fleet.models.inventory import StoredModel
from disagg.fleet.models.sources import RequiredModel


@dataclass(frozen=True, slots=True)
class ModelInventory:
    """A host's required model, and what it has of all required sources. python: runs programs there. hub_python: of
    the deployed environment, with huggingface_hub. Both are "" if there is none. reader: the host whose running server
    uses this source on the same machine, "" if none."""

    required: RequiredModel
    stored: Mapping[str, StoredModel]
    python: str = ""
    hub_python: str = ""
    reader: str = ""

    @property
    def host(self) -> Host:
        return self.required.host

    @property
    def model(self) -> StoredModel:
        return self.stored.get(self.required.source) or StoredModel(self.required.source, "absent")


@dataclass(frozen=True, slots=True)
class PullTask:
    """Pull a source to a host, from the hub or from `source_host`. error: why that is impossible."""

    host: Host
    source: str
    source_host: Host | None = None
    error: FleetError | None = field(default=None, compare=False)


def plan(inventories: Sequence[ModelInventory], wanted: Sequence[Host]) -> list[PullTask]:
    """What to pull where: nothing to hosts that have it, at most one download of each source."""
    tasks: list[PullTask] = []
    coming: dict[str, Host] = {}  # source -> the host that has it or downloads it
    busy: set[tuple[str, str]] = set()  # machine and source: two hosts of one machine share its files
    for inventory in inventories:
        if inventory.model.complete:
            coming.setdefault(inventory.required.source, inventory.host)
    for inventory in sorted(inventories, key=lambda one: -one.model.bytes):  # the largest part first
        host, source = inventory.host, inventory.required.source
        place = (same_machine(host.address), source)
        if host not in wanted or inventory.model.complete or inventory.required.carried or place in busy:
            continue
        busy.add(place)
        source_host = next(
            (one.host for one in inventories if one.stored.get(source, StoredModel(source, "absent")).complete), None
        )
        source_host = source_host or coming.get(source)
        tasks.append(_task(inventory, source_host))
        if source_host is None and tasks[-1].error is None:
            coming[source] = host
    return tasks


def _task(inventory: ModelInventory, source_host: Host | None) -> PullTask:
    host, source = inventory.host, inventory.required.source
    if not inventory.python:
        return PullTask(
            host, source, error=FleetError(f"{host.name}: it has no usable Python", f"disagg doctor --host {host.name}")
        )
    if source_host is not None:
        return PullTask(host, source, source_host)
    if not inventory.required.on_hub:
        put = f"rsync -a FOLDER/ {host.address}:{source}/; then, for the other hosts: disagg models pull"
        return PullTask(host, source, error=FleetError(f"{host.name}: no host of the fleet has {source}", put))
    if not inventory.hub_python:
        deploy = f"disagg deploy --host {host.name}"
        missing = f"{host.name}: downloading needs a deployed environment, and there is none"
        return PullTask(host, source, error=FleetError(missing, deploy))
    return PullTask(host, source)
