"""What a host should have: a release folder, the environment it runs in, its model's source, its token."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from disagg.config import Fleet, Host
from disagg.config.render import render
from disagg.fleet.deploy.environment import Environment, environment
from disagg.fleet.deploy.models import Source, source
from disagg.fleet.deploy.package import digest, package_files
from disagg.fleet.deploy.requirements import PackageRequirements, installed_requirements
from disagg.fleet.deploy.steps import Refusal
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.layout import Layout
from disagg.fleet.services import definitions, launchd
from disagg.fleet.services.base import Definition

LOG_LIMIT: Final = 64 << 20
"""A log longer than this is put aside as server.log.1 when its server starts."""

_RUN: Final = """\
#!/bin/sh
# Serves one host until SIGTERM. Written by `disagg deploy`; each release has its own.
release=$(cd "$(dirname "$0")" && pwd -P) || exit 1
hash=${{release##*/}}
folder={folder}
log=$folder/logs/server.log
umask 077
cd "$folder" || exit 1
if test -f "$log" && [ "$(wc -c <"$log")" -gt {log_limit} ]; then mv -f "$log" "$log.1"; fi
exec >>"$log" 2>&1
printf '{{"time": "%s", "level": "info", "event": "starting", "release": "%s", "pid": %s}}\\n' \\
    "$(date -u +%Y-%m-%dT%H:%M:%S.000Z)" "$hash" "$$"
printf '%s %s\\n' "$$" "$hash" >.serving.$$ && mv -f .serving.$$ serving
DISAGG_TOKEN_FILE=$folder/token
DISAGG_RELEASE=$hash
PYTHONPATH=$release
export DISAGG_TOKEN_FILE DISAGG_RELEASE PYTHONPATH
exec {python} -P -u -m disagg.servers --config "$release/hosts.toml" --host {host}
"""
_SUPERVISE: Final = """\
#!/bin/sh
# start | stop | restart | status of this host's supervisor.
release=$(cd "$(dirname "$0")" && pwd -P) || exit 1
exec {python} -P "$release/disagg/fleet/services/supervise.py" "$1" {folder}
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """What all hosts of a fleet get from this machine. `package`: files of disagg, by path below the release folder."""

    fleet: Fleet
    package: Mapping[str, bytes] = field(repr=False)
    requirements: PackageRequirements = field(repr=False)
    token: str = field(repr=False)

    @staticmethod
    def current(fleet: Fleet, token: str) -> Installation:
        """This installation of disagg."""
        return Installation(fleet, package_files(), installed_requirements(), token)


@dataclass(frozen=True, slots=True)
class TargetState:
    """All that a host should have. `files`: of the release, whose name `hash` is over them all."""

    host: Host
    environment: Environment
    source: Source
    files: Mapping[str, bytes] = field(repr=False)
    hash: str
    token: bytes = field(repr=False)
    definitions: tuple[Definition, ...] = ()


def target_state(installation: Installation, host: Host, facts: HostFacts) -> TargetState | Refusal:
    """What this host should have, being as it is; or why it cannot be told."""
    made = environment(host, installation.fleet.deploy, facts, installation.requirements)
    found = source(installation.fleet, host, facts.layout)
    if isinstance(made, Refusal):
        return made
    if isinstance(found, Refusal):
        return found
    defined = definitions(host, facts)
    files = {**installation.package, **_own_files(installation.fleet, host, facts.layout, made, found)}
    files |= {f"service/{one.path.rpartition('/')[2]}": one.content for one in defined}
    return TargetState(host, made, found, files, digest(files), f"{installation.token}\n".encode(), defined)


def _own_files(fleet: Fleet, host: Host, layout: Layout, environment: Environment, source: Source) -> dict[str, bytes]:
    python = f"{layout.environment(environment.hash)}/bin/python"
    texts = {
        "hosts.toml": fleet_file(fleet, host, source),
        "run": run_script(layout, host.name, python),
        # For every manager: what a supervisor kept before hosts.toml named another one must still be stopped.
        "supervise": _SUPERVISE.format(python=shlex.quote(python), folder=shlex.quote(layout.folder)),
        "environment": f"{environment.hash}\n",
    }
    if host.service == "launchd":
        texts["service/install"] = launchd.INSTALL
    return {name: text.encode() for name, text in texts.items()}


def run_script(layout: Layout, host: str, python: str) -> str:
    """The script that serves a host. It runs its own release, whichever link it is called by."""
    return _RUN.format(
        folder=shlex.quote(layout.folder), python=shlex.quote(python), host=shlex.quote(host), log_limit=LOG_LIMIT
    )


def fleet_file(fleet: Fleet, host: Host, source: Source) -> str:
    """The host's own hosts.toml: the host itself and, for a prefill host, the decode hosts that it delivers KV to."""
    known = [host.name]
    if "prefill" in host.roles:
        known += [decoding.name for decoding in fleet.serving(host.model, "decode") if decoding.name != host.name]
    sources: dict[str, dict[str, str]] = {}
    for one in map(fleet.hosts.__getitem__, known):
        model, engine = fleet.models[one.model], one.engine.name
        sources.setdefault(model.name, {})[engine] = model.written.get(engine, model.sources[engine])
    sources[host.model][host.engine.name] = source.text
    return render(fleet, known, sources)
