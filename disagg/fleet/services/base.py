"""A service definition, and a command on the host's machine."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

Verb = Literal["start", "stop", "restart", "remove"]
"""`remove` stops the service and takes its definition away. Every verb may be repeated."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A file of a service manager. `key`: its name among HostFacts.installed; `as_root`: only root may put it there."""

    key: str
    path: str
    content: bytes
    as_root: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class Command:
    """A POSIX-sh script and its parameters, as Machine.run takes them."""

    script: str
    argv: tuple[str, ...] = ()


def is_plain(text: str) -> bool:
    """Whether a path may stand in a service definition: no control characters, which no quoting carries safely."""
    return re.search(r"[\x00-\x1f\x7f]", text) is None
