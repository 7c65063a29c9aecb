"""Where a host finds its model: on the hub, at a path of its own, or in a small folder that is carried to it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from disagg.config import Fleet, Host
from disagg.config.addresses import PACKAGE
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.layout import Layout

LARGEST_CARRIED: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A model source as the host's own hosts.toml has it. `folder`: what is to be carried there, as `name`."""

    text: str
    name: str = ""
    folder: Path | None = None

    @property
    def files(self) -> dict[str, bytes | Path]:
        return {path.relative_to(self.folder).as_posix(): path for path in _files(self.folder)} if self.folder else {}


def source(fleet: Fleet, host: Host, layout: Layout) -> Source | Refusal:
    """Where the host reads its model from."""
    model, engine = fleet.models[host.model], host.engine.name
    written = model.written.get(engine, model.sources[engine])
    if written.startswith("~/"):
        return Source(layout.home.rstrip("/") + written[1:])
    if not carried(fleet, host):
        return Source(written)
    folder = Path(model.sources[engine])
    files = _files(folder)
    where = f'give the path that the folder has there, beginning with "/" or "~", or a hub id: [models] {model.name}'
    if not files:
        return Refusal(f"there is no model folder {folder} to carry there", where)
    if (size := sum(path.stat().st_size for path in files)) > LARGEST_CARRIED:
        return Refusal(f"the model folder {folder} has {size >> 20} MiB, too much to be carried along", where)
    name = f"{re.sub('[^A-Za-z0-9._-]', '-', folder.name)}-{_digest(folder, files)}"
    return Source(layout.carried(name), name, folder)


def carried(fleet: Fleet, host: Host) -> bool:
    """Whether the host's model comes with deploying. Others lie at a path of its own or come from the hub."""
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
