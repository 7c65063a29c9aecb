"""The interface of one host's server that `disagg start | stop | restart` use, and their result on one host.

`local` spawns the server on this machine from this installation; `deployed` uses the service manager of the machine
that disagg was deployed to. Order, waiting for health and results are the same for both: `fleet_servers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol

from disagg.config import Host
from disagg.errors import DisaggError, HostUnreachable, StartFailed
from disagg.fleet.lifecycle.loglines import last_error, last_plain_line, since_start
from disagg.fleet.lifecycle.status.host_status import HealthState

LAST_LINES = 50
UNDECIDED: Final[tuple[HealthState, ...]] = ("loading", "silent", "stalled", "draining")

ServerOutcome = Literal[
    "started", "restarted", "unchanged", "slow", "failed", "stopped", "killed", "not running", "left", "not managed"
]
"""not managed: a whole-request host, which disagg never starts. left: not touched, because an earlier host of its model
did not come back."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A server's process. pid: None if it does not run. stale: why it is not what should run, "" if it is.
    earlier_release: it runs an earlier release, to which `disagg rollback` can return. token_digests: of its machine's
    tokens, if it has its own."""

    pid: int | None = None
    stale: str = ""
    earlier_release: bool = False
    token_digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The outcome on one host. error: set if the outcome is failed or slow."""

    host: str
    outcome: ServerOutcome
    seconds: float = 0.0
    error: DisaggError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.outcome != "left"

    def to_json(self) -> dict[str, Any]:
        error = self.error.to_json() if self.error else None
        return {"host": self.host, "outcome": self.outcome, "seconds": round(self.seconds, 3), "error": error}


def exit_code(results: Sequence[ServerResult]) -> int:
    """0: all succeeded; 4: a machine does not answer; 1: a host failed; 3: nothing worse than a slow start."""
    if any(isinstance(result.error, HostUnreachable) for result in results):
        return 4
    if any(result.outcome in ("failed", "left") for result in results):
        return 1
    return 3 if any(not result.ok for result in results) else 0


class Server(Protocol):
    """One host's server. Used by one thread at a time. Methods raise FleetError, HostUnreachable."""

    @property
    def host(self) -> Host: ...

    undecided_states: ClassVar[tuple[HealthState, ...]]
    """The states over HTTP from which a server whose process runs may still become healthy."""

    def inspect(self) -> ProcessState:
        """The server's process now. FleetError if nothing is installed that could be started."""
        ...

    def running(self) -> bool | None:
        """Whether its process runs; None if nothing is installed that could run."""
        ...

    def start(self) -> None:
        """Start it. It must not run already. PortInUse if another program uses its port."""
        ...

    def ended(self) -> StartFailed | None:
        """Why the process that `start` started has ended, None while it runs. Cheap enough for a polling loop."""
        ...

    def stop(self) -> bool:
        """Stop it and wait until it has ended. True if it had to be killed. Does nothing if it does not run."""
        ...

    def last_lines(self) -> list[str]:
        """The last LAST_LINES lines of its log."""
        ...


def start_failed(name: str, lines: Sequence[str]) -> StartFailed:
    """Why a server exited: the last error it logged, else the last line it printed."""
    hint = f"disagg logs --host {name}"
    own = since_start(lines)
    if last_error(own) is None and not last_plain_line(own):  # just restarted: read the run before
        own = since_start(lines[: len(lines) - len(own)]) or own
    logged = last_error(own)
    if logged is not None:
        return StartFailed(f"{name} did not start: {logged.message}", logged.hint or hint, log=own[-LAST_LINES:])
    words = last_plain_line(own) or "it printed nothing"
    return StartFailed(f"{name} exited while starting: {words}", hint, log=own[-LAST_LINES:])
