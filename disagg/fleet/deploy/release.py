"""The target state of a host: its release folder and environment, where it reads its model, its token."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final

from disagg.api.names import LOG_BYTES, LOG_FILE_VARIABLE
from disagg.config import Fleet, Host, KeeperSettings, served_digest
from disagg.config.addresses import PACKAGE
from disagg.config.render import render
from disagg.fleet.deploy.environment import Environment, environment
from disagg.fleet.deploy.requirements import PackageRequirements, installed_requirements
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.machine import SCRIPTS
from disagg.fleet.services import definitions, program
from disagg.fleet.services.base import Definition
from disagg.token import keys_path
from disagg.version import DIGESTS, ROOT, hash_of_code, source_files

LARGEST_CARRIED: Final = 256 << 20
LIST: Final = "list/hosts.toml"
"""In the folder of a release, and not part of it."""


@dataclass(frozen=True)
class Installation:
    """What this machine deploys to every host. package: files of disagg, by path below the release folder. keys: the
    file of the gateway's clients; empty if there is none. returns: what is current before may become so again, as in a
    rollout, and is kept, also if it never ran. targets: what was computed last, by host."""

    fleet: Fleet
    package: Mapping[str, bytes] = field(repr=False)
    requirements: PackageRequirements = field(repr=False)
    tokens: tuple[str, ...] = field(repr=False)
    keys: bytes = field(default=b"", repr=False)
    returns: bool = False

    targets: dict[str, tuple[Host, HostFacts, TargetState | Refusal]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def code(self) -> str:
        """The hash of the package's code, as its servers report it."""
        return hash_of_code((name.removeprefix("disagg/"), content) for name, content in self.package.items())

    @staticmethod
    def current(fleet: Fleet, tokens: tuple[str, ...], returns: bool = False) -> Installation:
        """This installation of disagg."""
        keys = keys_path(fleet)
        known = keys.read_bytes() if keys.exists() else b""
        return Installation(fleet, package_files(), installed_requirements(), tokens, known, returns)


@dataclass(frozen=True, slots=True)
class TargetState:
    """What a host should have. files: of the release. hash: over all of them, and the release's name. listed: the
    hosts.toml of a gateway or of a host with several models, which reads it again when it changes; not one of `files`.
    key_files: where it reads the keys of servers that somebody else runs, by the names of hosts: a gateway those of
    whole-request hosts, any other its own. They stay with whoever administers that machine. returns: as of
    Installation.
    """

    host: Host
    environment: Environment
    sources: tuple[ModelSource, ...]
    files: Mapping[str, bytes] = field(repr=False)
    hash: str
    tokens: tuple[str, ...] = field(repr=False)
    definitions: tuple[Definition, ...] = ()
    keys: bytes = field(default=b"", repr=False)
    key_files: Mapping[str, str] = field(default_factory=dict)
    returns: bool = False
    listed: bytes = field(default=b"", repr=False)

    @property
    def settings(self) -> dict[str, bytes]:
        """All files that a deployment puts into the release's folder."""
        return {**self.files, **({LIST: self.listed} if self.listed else {})}


def target_state(installation: Installation, host: Host, facts: HostFacts) -> TargetState | Refusal:
    """Target state computed from facts, or a Refusal. Once for the same facts: a plan and what it is compared with."""
    known = installation.targets.get(host.name)
    if known is None or known[0] is not host or known[1] is not facts:
        known = installation.targets[host.name] = host, facts, _target_state(installation, host, facts)
    return known[2]


def _target_state(installation: Installation, host: Host, facts: HostFacts) -> TargetState | Refusal:
    quantized = next((one for one in installation.fleet.run_by(host) if one.engine.quantization), host)
    built_for = replace(host, engine=quantized.engine)  # one environment serves all models of a host
    made = environment(built_for, installation.fleet.deploy, facts, installation.requirements)
    if isinstance(made, Refusal):
        return made
    sources: dict[str, ModelSource] = {}
    for served in installation.fleet.run_by(host):
        found = source(installation.fleet, served, facts.paths)
        if isinstance(found, Refusal):
            return found
        sources[served.model] = found
    defined = definitions(host, facts)
    files = {**installation.package, **_own_files(installation, host, facts.paths, made, sources)}
    listed = fleet_file(installation.fleet, host, sources).encode() if _reads_again(host) else b""
    files |= {f"service/{one.path.rpartition('/')[2]}": one.content for one in defined}
    keys = installation.keys if host.gateway else b""
    asked = [one for one in installation.fleet.hosts.values() if one.whole] if host.gateway else [host]
    key_files = {one.name: one.engine.key_file for one in asked if one.engine.key_file}
    return TargetState(
        host,
        made,
        tuple(sources.values()),
        files,
        release_hash(files),
        installation.tokens,
        defined,
        keys,
        key_files,
        installation.returns,
        listed,
    )


def _own_files(
    here: Installation, host: Host, paths: HostPaths, environment: Environment, sources: Mapping[str, ModelSource]
) -> dict[str, bytes]:
    """The files of a release beside the package: those of one host."""
    python = f"{paths.environment(environment.hash)}/bin/python"
    texts = {
        **({} if _reads_again(host) else {"hosts.toml": fleet_file(here.fleet, host, sources)}),
        DIGESTS: f"{here.code} {served_digest(here.fleet, host)}\n",
        "run": run_script(paths, host, python),
        # For every service manager: a supervisor from before hosts.toml named another one must still be stopped.
        "supervise": _script_with("supervise.sh", python=python, folder=paths.folder),
        "environment": f"{environment.hash}\n",
    }
    if host.service == "launchd":
        texts["service/install"] = _script_with("install_plists.sh")
    return {name: text.encode() for name, text in texts.items()}


def run_script(paths: HostPaths, host: Host, python: str) -> str:
    """The script that serves a host. It runs the release it is part of, whichever link it is called by."""
    log = {"log_limit": LOG_BYTES, "log_variable": LOG_FILE_VARIABLE}
    files = {"config": config_file(host), "state": paths.keeper if host.keeps else ""}
    values = {"folder": paths.folder, "python": python, "program": program(host), "host": host.name, **files, **log}
    return _script_with("run.sh", **values)


def config_file(host: Host) -> str:
    """The host's hosts.toml, below the folder of its release."""
    return LIST if _reads_again(host) else "hosts.toml"


def _reads_again(host: Host) -> bool:
    """Whether the host's server reads hosts.toml again when it changes."""
    return host.keeps or host.gateway


def _script_with(name: str, **values: object) -> str:
    """A script as a program of its own, in which these variables have these values."""
    lines = [f"{key}={shlex.quote(str(value))}\n" for key, value in values.items()]
    return "".join(["#!/bin/sh\n", *lines, (SCRIPTS / name).read_text(encoding="utf-8")])


def fleet_file(fleet: Fleet, host: Host, own: Mapping[str, ModelSource]) -> str:
    """The host's own hosts.toml: the host itself, and those that its server connects to. For a prefill host the decode
    hosts that it delivers KV to; for a gateway, all hosts. own: where it reads its models."""
    known = {one.table: fleet.hosts[one.table] for one in fleet.answering_hosts if host.gateway}
    known[host.name] = host
    if "prefill" in host.roles:
        others = {name: one for name, one in fleet.hosts.items() if "decode" in one.roles}
        known |= {name: decoding for name, one in others.items() if (decoding := _decoding(one, host)) is not None}
    copy = replace(fleet, hosts={name: known[name] for name in fleet.hosts if name in known})
    sources: dict[str, dict[str, str]] = {}
    for one in copy.engine_hosts:
        model, engine = copy.models[one.model], one.engine.name
        sources.setdefault(model.name, {})[engine] = model.written.get(engine, model.sources[engine])
    for name, source in own.items():
        sources[name][host.engine.name] = source.text
    return render(copy, list(known), sources)


def _decoding(one: Host, prefill: Host) -> Host | None:
    """A decode host as the file of a prefill host has it; None if that delivers nothing to it. Of a host with several
    models a prefill host with one knows that one, so that no other change of the list concerns it. One with several
    knows all: what it runs then goes on when a model comes to both."""
    if prefill.keeps:
        shared = bool({one.model, *one.models} & set(prefill.models))
        return one if one.keeps or shared else None
    if one.model == prefill.model:
        return one
    if one.keeping is None or prefill.model not in one.models:
        return None
    return replace(one, models=(prefill.model,), keeping=KeeperSettings(one.keeping.ports))


def package_files(root: Path = ROOT) -> dict[str, bytes]:
    """The files of the disagg package: `disagg/...` -> content."""
    return {f"disagg/{path.relative_to(root).as_posix()}": path.read_bytes() for path in source_files(root)}


def release_hash(files: Mapping[str, bytes]) -> str:
    """The name of a release of these files: the first 16 digits of the SHA-256 over the sorted lines that `sha256sum`
    prints for them. So the host probe can verify a release with sha256sum alone (scripts/host.sh)."""
    lines = sorted(f"{digest(content)}  ./{name}\n" for name, content in files.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


@lru_cache(maxsize=4096)
def digest(content: bytes) -> str:
    """The SHA-256 of a file of a release; most are in the releases of all hosts."""
    return hashlib.sha256(content).hexdigest()


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
    """Where the host reads its one model from; a Refusal if the folder to copy is missing or too large."""
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
        there = path.stat()
        content = _content_digest(path, there.st_size, there.st_mtime_ns)
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()[:12]


@lru_cache(maxsize=1024)
def _content_digest(path: Path, size: int, mtime_ns: int) -> str:
    """The SHA-256 of a file, read again if its size or time has changed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
