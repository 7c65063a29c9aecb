"""launchd daemons of the system domain, which start at boot, before anyone logs in. macOS lets them open LAN
connections, which it may deny to agents of a login session. Only root can install and start them."""

from __future__ import annotations

import plistlib
from typing import Any, Final

from disagg.config import Host
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.services.base import Definition, ScriptCommand, Verb

FOLDER: Final = "/Library/LaunchDaemons"
INSTALL: Final = """\
# Installs this release's daemons; run by root. They start with `disagg start`, or at the next boot.
folder=$(cd "$(dirname "$0")" && pwd -P) || exit 1
for plist in "$folder"/*.plist; do
    install -o root -g wheel -m 644 "$plist" /Library/LaunchDaemons/ || exit 1
    case $plist in
        *.wired-limit.plist) # reload it: a loaded daemon keeps its old limit
            label=${plist##*/}
            /bin/launchctl bootout "system/${label%.plist}" 2>/dev/null
            /bin/launchctl bootstrap system "/Library/LaunchDaemons/$label" || true ;;
    esac
done
"""
_ROOT: Final = """\
if ! sudo -n true 2>/dev/null; then
    echo 'launchd daemons belong to root, and sudo asks for a password here' >&2
    exit 77
fi
"""
_GONE: Final = """\
gone() { # bootout may return before the daemon has ended: 36, Operation now in progress; 3: not loaded
    output=$(sudo -n launchctl bootout "system/$1" 2>&1) || case $? in
        3 | 36) ;;
        *) printf '%s\\n' "$output" >&2; return 1 ;;
    esac
    n=0
    while sudo -n launchctl print "system/$1" >/dev/null 2>&1; do
        n=$((n + 1))
        if [ $n -gt 120 ]; then echo "launchd did not stop $1: $output" >&2; return 1; fi
        sleep 0.5
    done
}
"""
_COMMANDS: Final[dict[Verb, str]] = {
    "start": 'sudo -n launchctl print "system/$1" >/dev/null 2>&1 && exec sudo -n launchctl kickstart "system/$1"\n'
    'exec sudo -n launchctl bootstrap system "$2"\n',
    "stop": 'sudo -n launchctl print "system/$1" >/dev/null 2>&1 || exit 0\ngone "$1"\n',
    "restart": 'sudo -n launchctl print "system/$1" >/dev/null 2>&1 || exec sudo -n launchctl bootstrap system "$2"\n'
    'exec sudo -n launchctl kickstart -k "system/$1"\n',
    "remove": 'for label in "$1" "$1.wired-limit"; do\n'
    '    if sudo -n launchctl print "system/$label" >/dev/null 2>&1; then gone "$label" || exit 1; fi\n'
    f'    sudo -n rm -f "{FOLDER}/$label.plist" || exit 1\n'
    "done\n",
}


def definitions(host: Host, facts: HostFacts) -> tuple[Definition, ...]:
    files = [_definition(host.name, server_plist(host.name, facts.paths, facts.user))]
    if host.wired_limit_mb is not None:
        name = f"{host.name}.wired-limit"
        files.append(_definition(name, wired_limit_plist(name, host.wired_limit_mb)))
    return tuple(files)


def _definition(name: str, content: bytes) -> Definition:
    return Definition(f"launchd:{name}", plist_path(name), content, as_root=True)


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


def command(facts: HostFacts, verb: Verb) -> ScriptCommand:
    """Every verb needs sudo without a password; exit code 77 if sudo asks for one."""
    return ScriptCommand(_ROOT + _GONE + _COMMANDS[verb], (label(facts.host), plist_path(facts.host)))
