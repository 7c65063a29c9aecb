"""Where files lie on a host. Everything is below ~/.disagg, except for the definitions of service managers.

~/.disagg/
    envs/<hash>/                  a python environment; several hosts of one machine may share it
    models/                       model weights; models/carried/<name>-<hash>/ are copied by a deployment
    hosts/<host>/
        releases/<hash>/          disagg/ (the package), hosts.toml, run, environment (its hash), service files; of a
                                  gateway or a host with several models list/hosts.toml, which a deployment may replace
        current -> releases/...   the release that was deployed last: `disagg start` and `restart` run it
        running -> releases/...   the release that the service manager runs, also after a crash or a reboot
        previous -> releases/...  the release of `disagg rollback`
        incoming/                 unfinished files; may be deleted
        uploads/                  parts of large files, with which an upload that broke off goes on
        token                     the fleet's secret, 0600
        keys.json                 on a gateway: the hashes of its clients' keys, 0600
        serving                   "pid release" of the server that was started last
        lock/holder               the command that changes this host now
        keeper/                   on a host with several models: its ports, what it measured, logs of the models
        logs/server.log
        logs/audit.log            which command changed this host, when and by whom
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

HASH = re.compile(r"[0-9a-f]{16}")
"""The names of releases and environments."""
MODEL_LOGS: Final = "logs/models"
"""Of the processes of a host with several models, below the folder of its keeper."""


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Paths on one host. home: of its user; or "~" or "$HOME", for a program there that expands it."""

    home: str
    host: str

    @property
    def root(self) -> str:
        return f"{self.home.rstrip('/')}/.disagg"

    @property
    def hosts(self) -> str:
        """A folder per host: several hosts may be one machine."""
        return f"{self.root}/hosts"

    @property
    def folder(self) -> str:
        """Everything of this host except environments and models."""
        return f"{self.hosts}/{self.host}"

    @property
    def current(self) -> str:
        return f"{self.folder}/current"

    @property
    def running(self) -> str:
        return f"{self.folder}/running"

    @property
    def incoming(self) -> str:
        return f"{self.folder}/incoming"

    @property
    def uploads(self) -> str:
        """Parts of large files whose upload broke off."""
        return f"{self.folder}/uploads"

    @property
    def token(self) -> str:
        return f"{self.folder}/token"

    @property
    def keys(self) -> str:
        return f"{self.folder}/keys.json"

    @property
    def logs(self) -> str:
        return f"{self.folder}/logs"

    @property
    def server_log(self) -> str:
        return f"{self.logs}/server.log"

    @property
    def audit(self) -> str:
        """Which command changed this host, when and by whom."""
        return f"{self.logs}/audit.log"

    @property
    def keeper(self) -> str:
        """What the keeper of a host with several models keeps: the logs of their processes, their ports."""
        return f"{self.folder}/keeper"

    def model_log(self, slug: str) -> str:
        """The log of the process of one model of a host with several."""
        return f"{self.keeper}/{MODEL_LOGS}/{slug}.log"

    @property
    def lock(self) -> str:
        return f"{self.folder}/lock"

    def release(self, hash: str) -> str:
        return f"{self.folder}/releases/{hash}"

    def environment(self, hash: str) -> str:
        return f"{self.root}/envs/{hash}"

    def carried(self, name: str) -> str:
        """A model folder that a deployment copied here."""
        return f"{self.root}/models/carried/{name}"

    @property
    def systemd_unit(self) -> str:
        return f"{self.home.rstrip('/')}/.config/systemd/user/disagg-{self.host}.service"
