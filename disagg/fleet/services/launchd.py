"""launchd daemons of the system domain, which start at boot, before anyone logs in. macOS lets them open LAN
connections, which it may deny to agents of a login session. Only root can install and start them."""

from __future__ import annotations

import plistlib
from typing import Any, Final

from disagg.config import Host
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.machine import script
from disagg.fleet.services.base import VERB_S, Definition, RunScript, Verb

FOLDER: Final = "/Library/LaunchDaemons"


def definitions(host: Host, facts: HostFacts) -> tuple[Definition, ...]:
    files = [_definition(host.name, server_plist(host.name, facts.paths, facts.user))]
    if host.wired_limit_mb is not None:
        name = f"{host.name}.wired-limit"
        files.append(_definition(name, wired_limit_plist(name, host.wired_limit_mb)))
    return tuple(files)


def _definition(name: str, content: bytes) -> Definition:
    return Definition(f"launchd:{name}", plist_path(name), content)


def label(name: str) -> str:
    return f"disagg.{name}"


def plist_path(name: str) -> str:
    return f"{FOLDER}/{label(name)}.plist"


def server_plist(host: str, paths: HostPaths, user: str) -> bytes:
    """The daemon that runs a host's server as `user`, and restarts it."""
    return _plist(
        {
            "Label": label(host),
            "ProgramArguments": ["/bin/sh", f"{paths.running}/run"],
            "UserName": user,
            "WorkingDirectory": paths.folder,
            "EnvironmentVariables": {
                "HOME": paths.home,
                "USER": user,
                "LANG": "en_US.UTF-8",
                "PATH": "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            },
            "RunAtLoad": True,
            "KeepAlive": True,
            "ThrottleInterval": 5,  # seconds between two starts: launchd has no increasing back-off
            "ExitTimeOut": 30,
            "ProcessType": "Interactive",  # else macOS may run it on the efficiency cores
            "SoftResourceLimits": {"NumberOfFiles": 8192},  # the default is 256
            "StandardOutPath": f"{paths.logs}/launchd.log",
            "StandardErrorPath": f"{paths.logs}/launchd.log",
        }
    )


def wired_limit_plist(name: str, megabytes: int) -> bytes:
    """The root daemon that sets the GPU's wired-memory limit, which macOS resets at every boot."""
    argv = ["/usr/sbin/sysctl", f"iogpu.wired_limit_mb={megabytes}"]
    return _plist({"Label": label(name), "ProgramArguments": argv, "RunAtLoad": True})


def _plist(values: dict[str, Any]) -> bytes:
    return plistlib.dumps(values, sort_keys=True)


def command(paths: HostPaths, verb: Verb) -> RunScript:
    """Every verb needs sudo without a password; exit code 77 if sudo asks for one."""
    return RunScript(script("launchd.sh"), (verb, label(paths.host), plist_path(paths.host)), VERB_S)
