"""Where things lie on a host. Everything is below ~/.disagg, except for what a service manager keeps.

~/.disagg/
    envs/<hash>/                  a python environment; several hosts of one machine may share it
    models/                       model weights; models/carried/<name>-<hash>/ came with a deployment
    hosts/<host>/
        releases/<hash>/          disagg/ (the package), hosts.toml, run, environment (its hash), service files
        current -> releases/...   what runs after the next start
        previous -> releases/...  what `disagg rollback` goes back to
        incoming/                 half-made things; whatever is in it may go
        token                     the fleet's secret, 0600
        serving                   "pid release" of the server that was started last
        lock/holder               who deploys now
        logs/server.log
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HASH = re.compile(r"[0-9a-f]{16}")
"""The form of the names of releases and environments."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Absolute paths on one host, from its user's home folder."""

    home: str
    host: str

    @property
    def root(self) -> str:
        return f"{self.home.rstrip('/')}/.disagg"

    @property
    def folder(self) -> str:
        """All of this host but environments and models."""
        return f"{self.root}/hosts/{self.host}"

    @property
    def current(self) -> str:
        return f"{self.folder}/current"

    @property
    def incoming(self) -> str:
        return f"{self.folder}/incoming"

    @property
    def token(self) -> str:
        return f"{self.folder}/token"

    @property
    def logs(self) -> str:
        return f"{self.folder}/logs"

    @property
    def lock(self) -> str:
        return f"{self.folder}/lock"

    def release(self, hash: str) -> str:
        return f"{self.folder}/releases/{hash}"

    def environment(self, hash: str) -> str:
        return f"{self.root}/envs/{hash}"

    def carried(self, name: str) -> str:
        """A model folder that came with a deployment."""
        return f"{self.root}/models/carried/{name}"

    @property
    def systemd_unit(self) -> str:
        return f"{self.home.rstrip('/')}/.config/systemd/user/disagg-{self.host}.service"
