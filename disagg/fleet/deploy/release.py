"""What a host should have: a release folder, the environment it runs in, its model's source, its token."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from disagg.config import Fleet, Host
from disagg.config.render import render
from disagg.fleet.deploy.environment import Environment
from disagg.fleet.deploy.facts import Facts
from disagg.fleet.deploy.layout import Layout
from disagg.fleet.deploy.models import Source
from disagg.fleet.deploy.package import digest
from disagg.fleet.services import launchd
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
PYTHONPATH=$release
export DISAGG_TOKEN_FILE PYTHONPATH
exec {python} -P -u -m disagg.servers --config "$release/hosts.toml" --host {host}
"""
_SUPERVISE: Final = """\
#!/bin/sh
# start | stop | restart | status of this host's supervisor.
release=$(cd "$(dirname "$0")" && pwd -P) || exit 1
exec {python} -P "$release/disagg/fleet/services/supervise.py" "$1" {folder}
"""


@dataclass(frozen=True, slots=True)
class Desired:
    """All that a host should have. `files`: of the release, whose name `hash` is over them all."""

    host: Host
    environment: Environment
    source: Source
    files: Mapping[str, bytes] = field(repr=False)
    hash: str = ""
    token: bytes = field(repr=False, default=b"")
    definitions: tuple[Definition, ...] = ()


def desired(
    fleet: Fleet,
    host: Host,
    facts: Facts,
    environment: Environment,
    source: Source,
    package: Mapping[str, bytes],
    token: str,
    definitions: tuple[Definition, ...],
) -> Desired:
    """What this host should have. `package`: the files of disagg, by path below the release folder."""
    layout = facts.layout
    python = f"{layout.environment(environment.hash)}/bin/python"
    files = {
        **package,
        "hosts.toml": fleet_file(fleet, host, source).encode(),
        "run": run_script(layout, host.name, python).encode(),
        "environment": f"{environment.hash}\n".encode(),
        **{f"service/{one.path.rpartition('/')[2]}": one.content for one in definitions},
    }
    if host.service == "process":
        files["supervise"] = _SUPERVISE.format(python=shlex.quote(python), folder=shlex.quote(layout.folder)).encode()
    if host.service == "launchd":
        files["service/install"] = launchd.INSTALL.encode()
    return Desired(host, environment, source, files, digest(files), f"{token}\n".encode(), definitions)


def run_script(layout: Layout, host: str, python: str) -> str:
    """The script that serves a host. It runs its own release, whichever link it is called by."""
    return _RUN.format(
        folder=shlex.quote(layout.folder), python=shlex.quote(python), host=shlex.quote(host), log_limit=LOG_LIMIT
    )


def fleet_file(fleet: Fleet, host: Host, source: Source) -> str:
    """The host's own hosts.toml: a gateway knows the whole fleet, any other host itself alone."""
    engine = host.engine.name
    if "gateway" not in host.roles:
        return render(fleet, [host.name], {host.model: {engine: source.text}})
    sources = {name: dict(model.written or model.sources) for name, model in fleet.models.items()}
    sources[host.model][engine] = source.text
    return render(fleet, list(fleet.hosts), sources)
