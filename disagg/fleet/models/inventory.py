"""Which models a host has, whole or in part, and what identifies them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from disagg.config import Host
from disagg.fleet.facts.python import json_line, run_program
from disagg.fleet.machine.base import Machine

PROGRAM: Final = Path(__file__).with_name("inventory_program.py")
SERVICES_CACHE: Final = "~/.cache/huggingface/hub"
"""Where a service finds downloaded models: it does not see what a login sets."""

Presence = Literal["complete", "partial", "absent"]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on a host. `folder`: of its files. `root`: what is copied or removed. `revision`: of the hub, or "".
    missing_files: some of the files that missing. why: what is wrong with one that is there. config: config.json.
    digests: of tokenizer and chat template, "" where there is none."""

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
        """What keeps it from being complete."""
        return self.why or (f"lacks {', '.join(self.missing_files)}" if self.missing_files else "")

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
    """The hub's cache on a host; "" where its environment says it."""
    return "" if host.local else SERVICES_CACHE


def stored_models(machine: Machine, python: str, host: Host, sources: Sequence[str]) -> dict[str, StoredModel]:
    """What the host has of these sources (hub ids and absolute paths)."""
    argv = ("look", cache_of(host), json.dumps(list(sources)))
    body = json_line(run_program(machine, python, PROGRAM, argv, timeout=120.0), machine)
    return {source: _held(source, body.get(source) or {}) for source in sources}


def _held(source: str, said: Mapping[str, Any]) -> StoredModel:
    state: Presence = next((one for one in get_args(Presence) if one == said.get("state")), "absent")
    return StoredModel(
        source,
        state,
        int(said.get("bytes") or 0),
        str(said.get("folder") or ""),
        str(said.get("root") or ""),
        str(said.get("revision") or ""),
        tuple(map(str, said.get("missing_files") or ())),
        str(said.get("why") or ""),
        said.get("config") or {},
        said.get("digests") or {},
    )
