"""The models that hosts require, those that they have, and what identifies them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from disagg.api.base import Contract
from disagg.config import Fleet, Host
from disagg.config.addresses import is_path, same_machine
from disagg.errors import FleetError
from disagg.fleet.deploy.release import source
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.python import last_json, run_program
from disagg.fleet.machine.machine import Machine
from disagg.planning.verdicts import Verdict, verdict

PROGRAM: Final = Path(__file__).with_name("inventory_program.py")
SERVICES_CACHE: Final = "~/.cache/huggingface/hub"
"""The hub's cache for servers: a service has no environment variables of a login shell."""


@dataclass(frozen=True, slots=True)
class RequiredModel:
    """The source of a host's model: a hub id or a path. A path is absolute, or below "~/", which is another folder on
    each host. carried: `disagg deploy` copies it there, so there is nothing to pull. context: tokens with which it is
    served; 0: as many as it reads."""

    host: Host
    source: str
    carried: bool = False
    context: int = 0

    def verdict(self, config: Mapping[str, Any]) -> Verdict:
        """Whether it can be handed over with the host's engine, if this is its config.json."""
        return verdict(config, self.host.engine, self.context)

    @property
    def on_hub(self) -> bool:
        return not is_path(self.source)


def required_model(fleet: Fleet, host: Host, facts: HostFacts) -> RequiredModel:
    """The model this host requires. A host that is not deployed to reads the source in place."""
    model, engine = fleet.models[host.model], host.engine.name
    if (written := model.written.get(engine, "")).startswith("~/"):
        return RequiredModel(host, written, context=model.context)
    if not host.server_kind.deployed:
        return RequiredModel(host, model.sources[engine], context=model.context)
    found = source(fleet, host, facts.paths)
    if isinstance(found, Refusal):
        return RequiredModel(host, model.sources[engine], True, model.context)
    return RequiredModel(host, found.text, bool(found.name), model.context)


def chosen(fleet: Fleet, models: Sequence[str], hosts: Sequence[Host]) -> list[Host]:
    """The hosts of these that serve one of these models (by name or alias); all if no model is named. Gateways and
    simulated hosts have no model."""
    names = {fleet.model(model).name for model in models}
    return [host for host in hosts if (not names or host.model in names) and not (host.gateway or host.simulated)]


def neighbours(fleet: Fleet, hosts: Sequence[Host]) -> list[Host]:
    """These hosts and all others on the same machines, which share files."""
    places = {same_machine(host.address) for host in hosts}
    return [host for host in fleet.engine_hosts if same_machine(host.address) in places]


Presence = Literal["complete", "partial", "absent"]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on a host, as the program prints it. folder: of its files. root: the folder that is copied or removed.
    revision: of the hub, or "". missing_files: up to 8 of them. why: what is wrong with a file that exists. config:
    config.json. digests: of tokenizer and chat template, "" if there is none."""

    source: str
    state: Presence
    bytes: int = 0
    folder: str = ""
    root: str = ""
    revision: str = ""
    missing_files: tuple[str, ...] = ()
    why: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.state == "complete"

    @property
    def missing(self) -> str:
        """Why it is not complete, "" if it is."""
        return self.why or (f"misses {', '.join(self.missing_files)}" if self.missing_files else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "state": self.state,
            "bytes": self.bytes,
            "folder": self.folder,
            "revision": self.revision,
            "missing": self.missing,
        }


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
    def verdict(self) -> str:
        """Whether the model can be handed over with the host's engine, by its config.json; "" without one."""
        return str(self.required.verdict(self.model.config)) if self.model.config else ""

    @property
    def model(self) -> StoredModel:
        return self.stored.get(self.required.source) or StoredModel(self.required.source, "absent")


def cache_of(host: Host) -> str:
    """The hub's cache on a host; "" for the default of this environment."""
    return SERVICES_CACHE if host.server_kind.deployed else ""


def stored_models(machine: Machine, python: str, host: Host, sources: Sequence[str]) -> dict[str, StoredModel]:
    """The host's models for these sources (hub ids and absolute paths), by source."""
    argv = ("look", cache_of(host), json.dumps(list(sources)))
    result = run_program(machine, python, PROGRAM, argv, timeout=120.0)
    found = last_json(result, machine, dict[str, StoredModel])
    return {source: found.get(source) or StoredModel(source, "absent") for source in sources}


def removable(inventory: ModelInventory) -> bool:
    """Whether the host has files of the model that may be removed."""
    return inventory.model.state != "absent" and (inventory.required.on_hub or inventory.required.carried)


def remove(machine: Machine, inventory: ModelInventory) -> int:
    """Remove a host's model; returns the freed bytes. FleetError if it is the user's own or in use."""
    host, source = inventory.host, inventory.required.source
    if not inventory.required.on_hub and not inventory.required.carried:
        raise FleetError(
            f"{host.name}: {source} is a folder of your own, named in hosts.toml",
            f"to remove it: disagg exec --host {host.name} -- rm -r '{inventory.model.root or source}'",
        )
    if inventory.reader:
        raise FleetError(
            f"{host.name}: the running server of {inventory.reader} uses {source}",
            f"disagg stop --host {inventory.reader}; then remove it",
        )
    argv = ("remove", cache_of(host), json.dumps([source]))
    result = run_program(machine, inventory.python, PROGRAM, argv, timeout=600.0)
    return last_json(result, machine, dict[str, int]).get(source, 0)


class ProgramFailure(Contract, frozen=True):
    """The last line of a program of this package that failed."""

    error: str
