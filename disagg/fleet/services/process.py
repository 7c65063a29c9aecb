"""A process under disagg's own supervisor, for hosts without a service manager. It is not restarted after a reboot."""

from __future__ import annotations

from typing import Final

from disagg.config import Host
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.services.base import Definition, ScriptCommand, Verb

_SCRIPT: Final = """\
for link in current running previous; do
    if test -f "$1/$link/supervise"; then exec /bin/sh "$1/$link/supervise" "$2"; fi
done
if [ "$2" = stop ]; then exit 0; fi
echo 'nothing is deployed here: disagg deploy' >&2
exit 1
"""

END_GROUP: Final = """\
# $1: a process group that no service manager controls.
kill -s TERM -- "-$1" 2>/dev/null || exit 0
n=0
while kill -0 "$1" 2>/dev/null; do
    n=$((n + 1))
    if [ $n -eq 150 ]; then kill -s KILL -- "-$1" 2>/dev/null; fi
    if [ $n -gt 175 ]; then echo "process $1 survives SIGKILL" >&2; exit 1; fi
    sleep 0.2
done
"""


def definitions(host: Host, facts: HostFacts) -> tuple[Definition, ...]:
    return ()


def command(facts: HostFacts, verb: Verb) -> ScriptCommand:
    return ScriptCommand(_SCRIPT, (facts.paths.folder, "stop" if verb == "remove" else verb))
