"""One host's server, however it is kept running: what `disagg start | stop | restart` need of it.

`local_server` spawns it on this machine from this installation; `deployed_server` asks the service manager of a
machine that something was deployed to. Waiting for health, order and reports are the same for both: `lifecycle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.config import Host
from disagg.errors import StartFailed
from disagg.fleet.lifecycle.loglines import last_error, last_words, since_start

LAST_LINES = 50


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A server before anything is done. pid: None where it does not run. stale: why what runs is not what should.
    earlier: it is of an earlier release, which can be gone back to."""

    pid: int | None = None
    stale: str = ""
    earlier_release: bool = False


class Server(Protocol):
    """One host's server. Used by one thread at a time. Methods raise FleetError, HostUnreachable."""

    @property
    def host(self) -> Host: ...

    def inspect(self) -> ProcessState:
        """What runs now. FleetError where nothing could be started."""
        ...

    def start(self) -> None:
        """Start it. It must not run already. PortInUse where another program has its port."""
        ...

    def ended(self) -> StartFailed | None:
        """Why the process that `start` started has ended, None while it runs. Cheap enough to ask all the time."""
        ...

    def stop(self) -> bool:
        """Stop it and wait for its end. True if it had to be killed. Nothing where it does not run."""
        ...

    def last_lines(self) -> list[str]:
        """The end of its log: at most LAST_LINES."""
        ...

    def close(self) -> None:
        """Let go of the machine."""
        ...


def start_failed(name: str, lines: Sequence[str]) -> StartFailed:
    """Why a server that exited did so: its last error line if it logged one, else its last words."""
    hint = f"disagg logs --host {name}"
    own = since_start(lines)
    if last_error(own) is None and not last_words(own):  # its manager is just starting it again: the run before counts
        own = since_start(lines[: len(lines) - len(own)]) or own
    logged = last_error(own)
    if logged is not None:
        return StartFailed(f"{name} did not start: {logged.message}", logged.hint or hint, log=own[-LAST_LINES:])
    words = last_words(own) or "it wrote nothing"
    return StartFailed(f"{name} exited while starting: {words}", hint, log=own[-LAST_LINES:])
