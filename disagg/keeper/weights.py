"""The files of a host's models: what is there, pull and delete.

The programs that look at, fetch and remove files are those of `disagg models`; they run as processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from disagg import logs
from disagg.api.base import Contract, Count, InvalidValue
from disagg.api.keeper import ModelFacts, PullEvent
from disagg.errors import CommandFailed, FleetError
from disagg.planning.checkpoint import facts
from disagg.version import ROOT

INVENTORY: Final = ROOT / "fleet" / "models" / "inventory_program.py"
HUB: Final = ROOT / "fleet" / "models" / "hub_program.py"
LOOK_S: Final = 60.0
PULL_LOOK_S: Final = 0.5
_MAX_OUTPUT: Final = 1 << 26


class _Found(Contract, frozen=True):
    """What the inventory prints of a source."""

    state: str
    bytes: Count = 0
    folder: str = ""
    missing_files: tuple[str, ...] = ()
    why: str = ""


class _Inventory(Contract, frozen=True):
    sources: Annotated[Mapping[str, _Found], Meta(max_length=4096)]


@dataclass(frozen=True, slots=True)
class Files:
    """Of one model on this machine. reason: why they cannot be loaded, "" if they can."""

    nbytes: int = 0
    folder: Path | None = None
    reason: str = ""
    facts: ModelFacts | None = None

    @property
    def present(self) -> bool:
        """Whether they were all there, and have not been removed since."""
        return self.folder is not None and (self.folder / "config.json").exists()


async def look(sources: Collection[str]) -> dict[str, Files]:
    """What there is of each source. Nothing if the program fails, which is logged."""
    if not sources:
        return {}
    try:
        printed = await _inventory("look", sources)
        found = _Inventory.from_json({"sources": printed}).sources
    except (CommandFailed, InvalidValue, OSError, ValueError) as error:  # also: no process can be started now
        logs.event(logging.WARNING, "files_not_known", reason=str(error))
        return {}
    return {source: _files(source, one) for source, one in found.items()}


async def remove(source: str) -> int:
    """Remove the files of a hub's model; the bytes that were freed. Raises FleetError."""
    freed = (await _inventory("remove", [source])).get(source, 0)
    return freed if isinstance(freed, int) else 0


async def pull(repository: str) -> AsyncGenerator[PullEvent, None]:
    """Fetch a model from the hub, go on with what is there, and check it. Ending the generator ends the program."""
    latest = PullEvent(status="pulling manifest")
    yield latest
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(HUB), repository, ""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        limit=_MAX_OUTPUT,
    )
    said = _Said()
    reading = asyncio.ensure_future(said.read(process))
    shown: dict[str, int] = {}
    try:
        while not reading.done():
            await asyncio.wait((reading,), timeout=PULL_LOOK_S)
            for name, total in said.files:
                done = total if reading.done() and not said.error else min(total, _fetched(said.blobs, name))
                if shown.get(name) != done:
                    shown[name] = done
                    digest = f"{'sha256' if len(name) == 64 else 'sha1'}:{name}"
                    latest = PullEvent(status=f"pulling {name[:12]}", digest=digest, total=total, completed=done)
                    yield latest
            if said.files and all(shown.get(name) == total for name, total in said.files):
                latest = PullEvent(status="verifying sha256 digest")
            yield latest  # also if nothing has changed: callers take silence for the end of this process
        reading.result()
        if said.error or await process.wait():
            raise FleetError(
                f"{repository} cannot be downloaded from the hub: {said.error or said.last}",
                "HF_TOKEN for a model behind a gate, HF_ENDPOINT for a mirror; what arrived is kept",
            )
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
        await asyncio.wait((reading,))


class _Said:
    """What the program that downloads has printed: see there. last: its last line."""

    def __init__(self) -> None:
        self.blobs, self.error, self.last = "", "", ""
        self.files: list[tuple[str, int]] = []

    async def read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").strip().rpartition("\r")[2]
            self.last = text[:500] or self.last
            if text.startswith("{"):
                with suppress(InvalidValue):
                    self._take(_Printed.from_bytes(text.encode()))

    def _take(self, printed: _Printed) -> None:
        self.error = printed.error or self.error
        if printed.blobs:
            self.blobs, self.files = printed.blobs, list(printed.files)


class _Printed(Contract, frozen=True):
    """A line of the program that downloads."""

    blobs: str = ""
    files: Annotated[tuple[tuple[str, Count], ...], Meta(max_length=4096)] = ()
    error: str = ""


def _fetched(blobs: str, name: str) -> int:
    """Bytes of a file that are there."""
    folder = Path(blobs)
    with suppress(OSError):
        return (folder / name).stat().st_size
    with suppress(OSError):
        return max((one.stat().st_size for one in folder.glob(f"{name}*.incomplete")), default=0)
    return 0


def hub_id(source: str) -> str:
    """The id at the hub of what a source names, also if it is a folder of the hub's cache; "" if it is neither."""
    if not source.startswith(("/", "~")):
        return source
    parts = Path(source).parts
    named = next((part for part, below in pairwise(parts) if below == "snapshots"), "")
    return named.removeprefix("models--").replace("--", "/", 1) if named.startswith("models--") else ""


def require_hub_id(host: str, source: str, what: str) -> str:
    """The id at the hub. FleetError for a folder of the user's own, and for an engine without files."""
    if not source:
        raise FleetError(f"{host}: its engine loads no files of models", f"there are none to {what}")
    if not (found := hub_id(source)):
        raise FleetError(f"{host}: {source} is a folder of your own", f"{what} it on that machine")
    return found


def _files(source: str, found: _Found) -> Files:
    if found.state == "complete":
        folder = Path(found.folder)
        return Files(found.bytes, folder, facts=facts(folder))
    missing = found.why or (f"misses {', '.join(found.missing_files)}" if found.missing_files else "not there")
    return Files(found.bytes, None, f"{source}: {missing}")


async def _inventory(verb: str, sources: Collection[str]) -> dict[str, Any]:
    argv = (sys.executable, "-I", str(INVENTORY), verb, "", json.dumps(list(sources)))
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(LOOK_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise CommandFailed(f"the program that looks for models took over {LOOK_S:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode or len(output) > _MAX_OUTPUT:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise CommandFailed(lines[-1] if lines else f"exit code {process.returncode}")
    body: dict[str, Any] = json.loads(output)
    return body
