"""Which models a host has, complete or partial, and what identifies them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from disagg.api.base import Contract
from disagg.config import Host
from disagg.fleet.facts.python import last_json, run_program
from disagg.fleet.machine.base import Machine

PROGRAM: Final = Path(__file__).with_name("inventory_program.py")
SERVICES_CACHE: Final = "~/.cache/huggingface/hub"
"""The hub's cache for servers: a service has no environment variables of a login shell."""

Presence = Literal["complete", "partial", "absent"]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on a host. folder: of its files. root: the folder that is copied or removed. revision: of the hub, or "".
    missing_files: up to 8 of them. why: what is wrong with a file that exists. config: config.json. digests: of
    tokenizer and chat template, "" if there is none."""

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


def cache_of(host: Host) -> str:
    """The hub's cache on a host; "" for the default of this environment."""
    return SERVICES_CACHE if host.placement.deployed else ""


def stored_models(machine: Machine, python: str, host: Host, sources: Sequence[str]) -> dict[str, StoredModel]:
    """The host's models for these sources (hub ids and absolute paths), by source."""
    argv = ("look", cache_of(host), json.dumps(list(sources)))
    result = run_program(machine, python, PROGRAM, argv, timeout=120.0)
    printed = last_json(result, machine, dict[str, _Printed])
    return {
        source: _stored_model(source, printed[source]) if source in printed else StoredModel(source, "absent")
        for source in sources
    }


class ProgramFailure(Contract, frozen=True):
    """The last line of a program of this package that failed."""

    error: str


class _Printed(Contract, frozen=True):
    """What the program prints about a source; see StoredModel. config and digests: only if there is a folder."""

    state: Presence
    bytes: int
    folder: str
    root: str
    revision: str
    missing: tuple[str, ...]
    why: str
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    digests: dict[str, str] = msgspec.field(default_factory=dict)


def _stored_model(source: str, printed: _Printed) -> StoredModel:
    return StoredModel(
        source,
        printed.state,
        printed.bytes,
        printed.folder,
        printed.root,
        printed.revision,
        printed.missing,
        printed.why,
        printed.config,
        printed.digests,
    )
