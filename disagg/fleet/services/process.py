"""A process under disagg's own supervisor, for hosts without a service manager. It is not restarted after a reboot."""

from __future__ import annotations

from typing import Final

from disagg.config import Host
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.services.base import Definition, ScriptCommand, Verb

_SCRIPT: Final = """\
if [ "$2" = stop ] && ! test -f "$1/supervisor.json"; then exit 0; fi # it never ran
if ! test -f "$1/current/supervise"; then
    echo 'nothing is deployed here: disagg deploy' >&2
    exit 1
fi
exec /bin/sh "$1/current/supervise" "$2"
"""


def definitions(host: Host, facts: HostFacts) -> tuple[Definition, ...]:
    return ()


def command(facts: HostFacts, verb: Verb) -> ScriptCommand:
    return ScriptCommand(_SCRIPT, (facts.paths.folder, "stop" if verb == "remove" else verb))
