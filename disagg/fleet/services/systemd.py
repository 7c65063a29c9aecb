"""A systemd user unit. With linger the user's manager runs without a login, also after a reboot."""

from __future__ import annotations

from typing import Final, Literal

from disagg.config import Host
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.machine import script
from disagg.fleet.services.base import VERB_S, Definition, RunScript, Verb

_BACK_OFF_SINCE: Final = 254  # the version that introduced RestartSteps


def definitions(host: Host, facts: HostFacts) -> tuple[Definition, ...]:
    version = facts.systemd.version if facts.systemd else 0
    content = unit(host.name, f"{facts.paths.running}/run", version).encode()
    return (Definition("systemd", facts.paths.systemd_unit, content),)


def unit_name(host: str) -> str:
    return f"disagg-{host}.service"


def unit(host: str, run: str, version: int) -> str:
    """The unit that runs the script `run`, and restarts it. version: of the host's systemd.

    NotifyAccess: once its model is loaded the server sets WATCHDOG_USEC itself, and is restarted if it then hangs as a
    whole. WatchdogSec would run while the model loads.
    """
    back_off = "RestartSteps=6\nRestartMaxDelaySec=60\n" if version >= _BACK_OFF_SINCE else ""
    return f"""\
# Written by `disagg deploy`.
[Unit]
Description=disagg server of {host}
StartLimitIntervalSec=0

[Service]
ExecStart=/bin/sh {quoted(run)}
Restart=always
RestartSec=1
{back_off}KillMode=mixed
TimeoutStopSec=30
OOMPolicy=continue
NotifyAccess=all

[Install]
WantedBy=default.target
"""


def quoted(text: str) -> str:
    """Quote a text as one word of an ExecStart line."""
    signs = {"\\": "\\\\", '"': '\\"', "%": "%%", "$": "$$", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(signs.get(character, character) for character in text) + '"'


def command(paths: HostPaths, verb: Verb | Literal["enable", "disable"]) -> RunScript:
    """The command that does this with a host's unit. After `disable` a server that runs goes on, until the next
    boot."""
    file = (paths.systemd_unit,) if verb == "remove" else ()
    return RunScript(script("systemd.sh"), (verb, unit_name(paths.host), *file), VERB_S)
