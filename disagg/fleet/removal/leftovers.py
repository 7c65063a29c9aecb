"""What of a machine's contents belongs to no host of hosts.toml. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from disagg.config import Fleet
from disagg.config.addresses import is_name, is_path
from disagg.fleet.deploy.release import carried
from disagg.fleet.facts.paths import HASH, HostPaths
from disagg.fleet.facts.server import FoundHost, MachineContents
from disagg.units import counted

OrphanKind = Literal["host", "environment", "model"]
_FOLDER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENVIRONMENT: Final = re.compile(HASH.pattern + r"(\.removed)?")
"""The second is what an interrupted removal left: see remove_shared.sh."""
_CACHE: Final = ".cache/huggingface/hub"


@dataclass(frozen=True, slots=True)
class Scope:
    """What hosts.toml names on one machine, and what may be removed there.

    names: the fleet's hosts that are on this machine, or may be. sources: of their models. token_digests: of this
    machine's tokens. others: also hosts of other fleets and with another token. cached: also models of the hub's cache.
    locked: hosts whose locks this command holds.
    """

    fleet: str
    names: frozenset[str]
    sources: frozenset[str]
    token_digests: frozenset[str] = frozenset()
    others: bool = False
    cached: bool = False
    locked: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Orphan:
    """Something left over. nbytes: None if unknown. about: what it is."""

    kind: OrphanKind
    name: str
    path: str
    about: str
    nbytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "path": self.path, "about": self.about, "bytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is left over on a machine. notes: what stays there, and why. hosts: those of the orphans, as found."""

    orphans: tuple[Orphan, ...] = ()
    notes: tuple[str, ...] = ()
    hosts: dict[str, FoundHost] = field(default_factory=dict)


def scope_of(
    fleet: Fleet,
    elsewhere: frozenset[str],
    tokens: frozenset[str] = frozenset(),
    others: bool = False,
    cached: bool = False,
) -> Scope:
    """The scope on a machine. elsewhere: hosts of the fleet that are known to be on other machines. tokens, others,
    cached: see Scope."""
    hosts = [host for host in fleet.deployed_hosts if host.name not in elsewhere]
    read = [(fleet.models[one.model], one) for host in hosts for one in fleet.run_by(host)]
    sources = [
        model.written.get(host.engine.name, model.sources[host.engine.name])
        for model, host in read
        if not host.simulated and not carried(fleet, host)
    ]
    return Scope(fleet.name, frozenset(host.name for host in hosts), frozenset(sources), tokens, others, cached)


def leftovers(scope: Scope, there: MachineContents) -> Leftovers:
    """What is left over on a machine, hosts first: what only they need is left over with them."""
    notes: list[str] = []
    gone = {one.name: one for one in there.hosts if is_name(one.name) and _is_orphan(one, scope, notes)}
    stay = [one for one in there.hosts if one.name not in gone]
    orphans = [*_hosts(gone, there), *_files(scope, there, stay, notes)]
    return Leftovers(tuple(orphans), tuple(notes), gone)


def _is_orphan(found: FoundHost, scope: Scope, notes: list[str]) -> bool:
    if found.name in scope.names:
        return False
    if scope.others:
        return True
    if found.fleets and scope.fleet not in found.fleets:
        notes.append(f"{found.name} stays: it is of the fleet {', '.join(sorted(found.fleets))}")
        return False
    if found.token_digests and scope.token_digests.isdisjoint(found.token_digests):
        known = found.token_digests[0][:8]
        notes.append(
            f"{found.name} stays: its token {known} is not this machine's; disagg uninstall --unused --all removes it"
        )
        return False
    return True


def _hosts(gone: dict[str, FoundHost], there: MachineContents) -> Iterator[Orphan]:
    for one in gone.values():
        yield Orphan("host", one.name, HostPaths(there.home, one.name).folder, _about(one))


def _about(found: FoundHost) -> str:
    """`2 releases, token 3f2a11bc, process runs (pid 4711)`."""
    parts = [counted(found.releases, "release")] if found.releases else []
    parts += [f"token {digest[:8]}" for digest in found.token_digests]
    parts += [f"a service of {manager}" for manager in found.managers if manager != "process"]
    parts += [f"its server runs (pid {found.pid})"] if found.pid is not None else []
    return ", ".join(parts) or "an empty folder"


def _files(scope: Scope, there: MachineContents, stay: list[FoundHost], notes: list[str]) -> Iterator[Orphan]:
    """Environments and models that no host needs that stays."""
    paths = HostPaths(there.home, "")
    used = {environment for one in stay for environment in one.environments}
    sources = {source for one in stay for source in one.sources} | scope.sources
    environments = [name for name in there.environments if _ENVIRONMENT.fullmatch(name) and name not in used]
    copied = [name for name in there.carried if _FOLDER_NAME.fullmatch(name) and not _reads(sources, name)]
    needed = {f"models--{source.replace('/', '--')}" for source in sources if not is_path(source)}
    cached = [name for name in there.cached if _FOLDER_NAME.fullmatch(name) and name not in needed]
    if cached and not scope.cached:
        count = counted(len(cached), "model")
        notes.append(
            f"{count} of the hub's cache that no host here names: disagg uninstall --unused --models offers them"
        )
    if locked := [one.name for one in stay if one.locked and one.name not in scope.locked]:
        notes.append(f"environments and models stay: a command changes {', '.join(locked)} and may need them")
        return
    yield from (Orphan("environment", name, paths.environment(name), "no release needs it") for name in environments)
    yield from (Orphan("model", name, paths.carried(name), "no release reads it") for name in copied)
    if scope.cached:
        for name in cached:
            source = name.removeprefix("models--").replace("--", "/")
            yield Orphan("model", source, f"{there.home}/{_CACHE}/{name}", "in the hub's cache; no host here names it")


def _reads(sources: set[str], name: str) -> bool:
    """Whether one of these sources is this folder of a copied model, however the home is spelled there."""
    return any(source.endswith(f"/models/carried/{name}") for source in sources)
