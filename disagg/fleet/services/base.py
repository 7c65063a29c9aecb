"""A service definition, and a command on the host's machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Verb = Literal["start", "stop", "restart", "remove"]
"""`remove` stops the service and deletes its definition. Every verb may be repeated."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A file of a service manager. key: its name in HostFacts.installed. as_root: only root may write it."""

    key: str
    path: str
    content: bytes
    as_root: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """A POSIX sh script and its parameters, for Machine.run."""

    script: str
    argv: tuple[str, ...] = ()
