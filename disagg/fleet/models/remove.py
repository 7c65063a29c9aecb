"""Remove models from hosts: only those that disagg put there, never a folder that hosts.toml names by its path."""

from __future__ import annotations

import json

from disagg.errors import FleetError
from disagg.fleet.facts.python import last_json, run_program
from disagg.fleet.machine.base import Machine
from disagg.fleet.models.inventory import PROGRAM, cache_of
from disagg.fleet.models.plan import ModelInventory


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
