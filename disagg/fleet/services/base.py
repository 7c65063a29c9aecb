"""What every service manager has in common: verbs, the files that define a service, and the scripts that run there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Verb = Literal["start", "stop", "restart", "remove"]
"""`remove` stops the service and deletes its definition. Every verb may be repeated."""
VERB_S: Final = 90.0
"""Limit of one command of a service manager: stopping waits for requests in progress."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A file of a service manager. key: its name in HostFacts.installed."""

    key: str
    path: str
    content: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class RunScript:
    """Run a POSIX-sh script with parameters, on a host's machine."""

    script: str = field(repr=False)
    argv: tuple[str, ...]
    timeout: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
