"""A service definition, and a command on the host's machine."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Literal

Verb = Literal["start", "stop", "restart", "remove"]
"""`remove` stops the service and deletes its definition. Every verb may be repeated."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A file of a service manager. key: its name in HostFacts.installed. as_root: only root may write it."""

    key: str
    path: str
    content: bytes
    as_root: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """A POSIX sh script and its parameters, for Machine.run."""

    script: str
    argv: tuple[str, ...] = ()


def is_plain(text: str) -> bool:
    """Whether a service definition may contain this text: no control characters, which cannot be quoted safely."""
    return re.search(r"[\x00-\x1f\x7f]", text) is None


SUPERVISE: Final = """\
# $1: the folder of a host without a service manager. $2: start, stop or restart.
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
