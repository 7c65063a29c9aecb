"""What `disagg verify` found exact for this fleet: a file in its state folder, which `disagg status` reads.

It is about one model type, and a pair: the versions of the prefill engine's packages and its dtype, and the decode
engine's. With other versions of one of them, or with another partner, the model is not verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from disagg.api.base import Contract, InvalidValue
from disagg.config import Fleet, Host
from disagg.errors import FleetError
from disagg.files import replace_file
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.token import state_folder

_FILE = "verified.json"
_MAX_VERDICTS = 64
"""The newest are kept."""


class VerifiedEngine(Contract, frozen=True):
    """One end of a hand-off. versions: of its packages."""

    dtype: str
    versions: Mapping[str, str]

    def covers(self, status: HostStatus, host: Host) -> bool:
        """Whether this is what the host runs. In float32 answers are compared token by token: such a verdict is about
        the architecture, whatever the dtype."""
        same = all(self.versions.get(name) == there for name, there in status.versions.items())
        return bool(status.versions) and same and self.dtype in ("float32", host.engine.dtype)


class Verdict(Contract, frozen=True):
    """The hand-off of a model from one engine to the other gave what each of them gives alone."""

    architecture: str
    prefill: VerifiedEngine
    decode: VerifiedEngine

    def covers(self, status: HostStatus, host: Host) -> bool:
        """Whether it is about this host, with whatever partner."""
        engine = self.prefill if "prefill" in status.roles else self.decode
        architecture = status.fingerprint.architecture if status.fingerprint is not None else None
        return architecture == self.architecture and engine.covers(status, host)


class _Verdicts(Contract, frozen=True):
    verdicts: tuple[Verdict, ...] = ()


def known_verdicts(folder: Path) -> Sequence[Verdict]:
    """The verdicts in a fleet's state folder; none if there is no file, or none that this version can read."""
    try:
        return _Verdicts.from_bytes((folder / _FILE).read_bytes()).verdicts
    except (OSError, InvalidValue):
        return ()


def keep(fleet: Fleet, verdict: Verdict) -> None:
    """Add a verdict to the fleet's state folder. FleetError if that cannot be written."""
    folder = state_folder(fleet)
    others = [one for one in known_verdicts(folder) if one != verdict]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(folder / _FILE, _Verdicts((*others, verdict)[-_MAX_VERDICTS:]).to_bytes())
    except OSError as error:
        hint = "check that folder and its owner, or set XDG_STATE_HOME to another folder"
        raise FleetError(f"the verdict is not kept: {folder / _FILE}: {error.strerror or error}", hint) from error
