"""What `disagg verify` found exact for this fleet: a file in its state folder, which `disagg status` reads.

It is about one model type, the versions of one engine's packages and a dtype: a comparison leaves one for the decode
engine and one for the prefill engine. With other versions the model is not verified any more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from disagg.api.base import Contract, InvalidValue
from disagg.config import Fleet, Host
from disagg.errors import FleetError
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.token import state_folder

_FILE = "verified.json"
_MOST = 64
"""The newest are kept."""


class Verdict(Contract, frozen=True):
    """The hand-off of a model gave what each engine gives alone. versions: of the packages of one of the two."""

    architecture: str
    dtype: str
    versions: Mapping[str, str]

    def covers(self, status: HostStatus, host: Host) -> bool:
        """Whether it is about what this host runs. A verdict in float32, where answers are compared token by token, is
        about the architecture, whatever the dtype."""
        return (
            status.fingerprint is not None
            and status.fingerprint.architecture == self.architecture
            and self.dtype in ("float32", host.engine.dtype)
            and all(self.versions.get(name) == there for name, there in status.versions.items())
        )


class _Verdicts(Contract, frozen=True):
    verdicts: tuple[Verdict, ...] = ()


def kept(folder: Path) -> Sequence[Verdict]:
    """The verdicts in a fleet's state folder; none if there is no file, or none that this version can read."""
    try:
        return _Verdicts.from_bytes((folder / _FILE).read_bytes()).verdicts
    except (OSError, InvalidValue):
        return ()


def keep(fleet: Fleet, verdict: Verdict) -> None:
    """Add a verdict to the fleet's state folder. FleetError if that cannot be written."""
    folder = state_folder(fleet)
    others = [one for one in kept(folder) if one != verdict]
    part = folder / f".{_FILE}.{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.write_bytes(_Verdicts((*others, verdict)[-_MOST:]).to_bytes())
        part.replace(folder / _FILE)
    except OSError as error:
        hint = "check that folder and its owner, or set XDG_STATE_HOME to another folder"
        raise FleetError(f"the verdict is not kept: {folder / _FILE}: {error.strerror or error}", hint) from error
