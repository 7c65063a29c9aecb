"""Take models away from hosts. Only what the fleet put there: a folder that hosts.toml names by its path stays."""

from __future__ import annotations

import json

from disagg.errors import FleetError
from disagg.fleet.facts.python import json_line, run_program
from disagg.fleet.machine.base import Machine
from disagg.fleet.models.inventory import PROGRAM, cache_of
from disagg.fleet.models.pull import Stock


def removable(stock: Stock) -> bool:
    """Whether there is anything of the model on the host that may be removed."""
    return stock.wanted.state != "absent" and (stock.need.on_hub or stock.need.carried)


def remove(machine: Machine, stock: Stock) -> int:
    """Remove a host's model; the bytes that came free. FleetError where it is not ours to remove, or is being read."""
    host, source = stock.host, stock.need.source
    if not stock.need.on_hub and not stock.need.carried:
        raise FleetError(
            f"{host.name}: {source} is a folder of your own, named in hosts.toml",
            f"if it is to go: disagg exec --host {host.name} -- rm -r '{stock.wanted.root or source}'",
        )
    if stock.reader:
        raise FleetError(
            f"{host.name}: the server of {stock.reader} runs and reads {source}",
            f"disagg stop --host {stock.reader}; then remove it",
        )
    argv = ("remove", cache_of(host), json.dumps([source]))
    result = run_program(machine, stock.python, PROGRAM, argv, timeout=600.0)
    return int(json_line(result, machine).get(source) or 0)
