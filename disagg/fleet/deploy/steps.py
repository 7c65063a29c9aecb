"""The types of a deployment plan: three kinds of actions on a machine, in steps with a description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ServiceAction = Literal["", "start", "restart"]


@dataclass(frozen=True, slots=True)
class PutTree:
    """Write a folder of files atomically. parts: where large ones are gathered, see Machine.put_tree."""

    target: str
    files: Mapping[str, bytes | Path] = field(repr=False)
    parts: str = ""


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write one file atomically."""

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class RunScript:
    """Run a POSIX-sh script with parameters."""

    script: str = field(repr=False)
    argv: tuple[str, ...]
    timeout: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)


Action = PutTree | WriteFile | RunScript


@dataclass(frozen=True, slots=True)
class Step:
    """One step. what: its description. changes: the path it changes. done: the fact that shows it was done.
    hint: what to do if it fails."""

    name: str
    what: str
    changes: str
    done: str
    action: Action
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "what": self.what, "changes": self.changes, "done": self.done}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a host cannot be deployed, and what to do about it."""

    cause: str
    hint: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps on one host; nothing to do if there are neither steps nor refusals.

    release: the hash of the release that is current afterwards. needs: the command its server needs to run it.
    packages: name -> version of what its environment has, empty without a lock for its platform. package_bytes: of
    their wheels. down: why its server does not run, if no `disagg stop` is the reason. at_once: it runs a release from
    before TLS and this one is later: hosts of the two kinds hand nothing over to each other. rotating: it accepts more
    than one token.
    """

    host: str
    release: str
    steps: tuple[Step, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    needs: ServiceAction = ""
    notes: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    package_bytes: int = 0
    down: str = ""
    at_once: bool = False
    rotating: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "release": self.release,
            "steps": [step.to_json() for step in self.steps],
            "refusals": [{"cause": refusal.cause, "hint": refusal.hint} for refusal in self.refusals],
            "needs": self.needs,
            "notes": list(self.notes),
            "packages": dict(self.packages),
            "package_bytes": self.package_bytes,
            "down": self.down,
            "at_once": self.at_once,
            "rotating": self.rotating,
        }
