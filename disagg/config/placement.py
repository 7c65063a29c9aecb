"""What follows from where a host's server runs: the only code that compares the connectors of hosts.toml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Connector = Literal["ssh", "local"]


@dataclass(frozen=True, slots=True)
class ServerPlacement:
    """How disagg reaches a host, installs it and runs its server.

    ssh: reached over SSH, so it has an account, a host key and a clock of its own. deployed: `disagg deploy` installs a
    release, an environment, the token and models there; otherwise its server uses this installation and its files.
    spawned: `disagg start` spawns its server as a process of this machine, with a record and a log in the fleet's state
    folder.
    """

    ssh: bool
    deployed: bool
    spawned: bool


PLACEMENTS: Final[dict[Connector, ServerPlacement]] = {
    "local": ServerPlacement(ssh=False, deployed=False, spawned=True),
    "ssh": ServerPlacement(ssh=True, deployed=True, spawned=False),
}
NOT_MANAGED: Final = ServerPlacement(ssh=False, deployed=False, spawned=False)
"""Of a whole-request host: disagg sends it requests and does nothing else with it."""
