"""Where a host reads its model from: the hub, a path on the host, or a small folder that deploying copies there."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from disagg.config import Fleet, Host
from disagg.config.addresses import PACKAGE
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.paths import HostPaths

LARGEST_CARRIED: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model source as the host's own hosts.toml has it. folder: the local folder to copy to the host, as `name`."""

    text: str
    name: str = ""
    folder: Path | None = None

    @property
    def files(self) -> dict[str, bytes | Path]:
        return {path.relative_to(self.folder).as_posix(): path for path in _files(self.folder)} if self.folder else {}


def source(fleet: Fleet, host: Host, paths: HostPaths) -> ModelSource | Refusal:
    """Where the host reads its model from; a Refusal if the folder to copy is missing or too large. A gateway reads
    none."""
    if host.gateway:
        return ModelSource("")
    model, engine = fleet.models[host.model], host.engine.name
    written = model.written.get(engine, model.sources[engine])
    if written.startswith("~/"):
        return ModelSource(paths.home.rstrip("/") + written[1:])
    if not carried(fleet, host):
        return ModelSource(written)
    folder = Path(model.sources[engine])
    files = _files(folder)
    where = f'give the path that the folder has there, beginning with "/" or "~", or a hub id: [models] {model.name}'
    if not files:
        return Refusal(f"there is no model folder {folder} to copy to the host", where)
    if (size := sum(path.stat().st_size for path in files)) > LARGEST_CARRIED:
        return Refusal(f"the model folder {folder} has {size >> 20} MiB, more than deploying copies", where)
    name = f"{re.sub('[^A-Za-z0-9._-]', '-', folder.name)}-{_digest(folder, files)}"
    return ModelSource(paths.carried(name), name, folder)


def carried(fleet: Fleet, host: Host) -> bool:
    """Whether deploying copies the host's model there. Other models are on the hub or at a path of the host."""
    model, engine = fleet.models[host.model], host.engine.name
    return model.written.get(engine, model.sources[engine]).startswith((".", PACKAGE))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def _digest(folder: Path, files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()[:12]
