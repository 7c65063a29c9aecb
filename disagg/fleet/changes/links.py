"""The links of a host's folder to its releases, and the script that moves them.

current    the release that was deployed last: `disagg start` and `restart` run it
running    the release that the service manager runs, also after a crash or a reboot
previous   the release of `disagg rollback`
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from disagg.errors import FleetError
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.machine import Machine, script

ReleaseLink = Literal["current", "running", "previous"]
Move = tuple[ReleaseLink, str]
"""A link, and the hash of the release that it is to point at."""


def move_argv(paths: HostPaths, moves: Sequence[Move]) -> tuple[str, ...]:
    """The parameters of move_links.sh."""
    return (paths.folder, *(word for move in moves for word in move))


def move_links(machine: Machine, paths: HostPaths, moves: Sequence[Move]) -> None:
    """Move links on a machine. FleetError names the first that cannot be moved."""
    result = machine.run(move_argv(paths, moves), script=script("move_links.sh"))
    if not result.ok:
        message = f"{paths.host}: cannot point its service at a release: {result.reason(3)}"
        raise FleetError(message, f"disagg ssh {paths.host}")


def described(release: str, runs: str, since: float | None) -> str:
    """`release 3f2a11bc pending since 2026-03-01 14:05, 9c04d7e1 runs`. since: seconds since 1970, in local time."""
    when = f" since {time.strftime('%Y-%m-%d %H:%M', time.localtime(since))}" if since else ""
    return f"release {release[:8]} pending{when}, {runs[:8] or 'an installation'} runs"
