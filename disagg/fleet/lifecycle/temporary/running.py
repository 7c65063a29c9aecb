"""A fleet on this machine for as long as a block runs: started on free ports, and stopped however the block ends."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Literal, NamedTuple

from disagg.config import Fleet
from disagg.errors import DisaggError, FleetError, PortInUse, UsageError
from disagg.fleet.lifecycle import fleet_servers
from disagg.fleet.lifecycle.base import ServerResult
from disagg.fleet.lifecycle.fleet_servers import OnProgress
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.temporary import ports

GRACE_S: Final = 5.0
_MORE_TRIES: Final = 2  # on other ports, after another program took one


class RunningFleet(NamedTuple):
    """The fleet as it runs, and its state, whose `token()` its clients need."""

    fleet: Fleet
    state: State


@contextmanager
def temporary_fleet(
    fleet: Fleet,
    *,
    move: Literal["none", "taken", "all"] = "taken",
    timeout_s: float = 60.0,
    slow_hint: str = "is this machine busy? try again",
    report: OnProgress = lambda host, state: None,
    note: Callable[[str], None] = lambda text: None,
    ending: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[RunningFleet]:
    """Start all hosts of a local fleet, with a state folder of their own that is removed at the end.

    move: which ports are replaced by free ones. Unless it is "none", the start is tried again on other ports if another
    program, such as a second demo, took a port between the check and the server's own bind.
    timeout_s, slow_hint: for the servers to become healthy, and the hint of the error if they do not in time.
    note: called with a line about moved ports, and about each server that did not end. ending: the context in which the
    servers are stopped.
    Raises UsageError if a host is not local, and the first host's error if not all hosts become healthy.
    """
    if remote := [host.name for host in fleet.deployed_hosts]:
        raise UsageError(
            f"{fleet.path}: {', '.join(remote)} would be started and stopped over SSH",
            'give a file in which every host has connector = "local"',
        )
    with tempfile.TemporaryDirectory(prefix="disagg-fleet-") as name:
        folder = Path(name)
        copy = fleet
        if move != "none":
            copy, moved = ports.with_free_ports(fleet, folder, move)
            for port in moved if move == "taken" else ():
                note(f"port {port.old} is in use here; using {port.new}")
        for tries_left in range(_MORE_TRIES, -1, -1):
            state = State.of(copy, folder / "state")
            # In this program's session: with two models on two cores, a first token waited 31 ms (median) for threads
            # of other sessions that compute, and 14 ms within one.
            servers = fleet_servers.FleetServers(copy, state, report=report, grace_s=GRACE_S, own_session=False)
            try:
                error = _first_error(servers.start(timeout_s=timeout_s), timeout_s, slow_hint)
                if error is None:
                    yield RunningFleet(copy, state)
                    return
            finally:
                with ending():
                    for result in servers.stop():
                        if result.error is not None:  # the state folder, with its record, is about to be deleted
                            note(f"{result.host} was not stopped: {result.error}")
            if move == "none" or not tries_left or not _lost_a_port(copy, error):
                raise error
            note("another program took a port meanwhile; trying again on other ports")
            copy, _ = ports.with_free_ports(copy, folder, "all")


def _first_error(results: Sequence[ServerResult], timeout_s: float, slow_hint: str) -> DisaggError | None:
    """The first host's error. Unlike `disagg start`, a slow server is stopped, so its own message does not apply."""
    for result in results:
        if result.outcome == "slow":
            return FleetError(f"{result.host} was not ready after {timeout_s:g} s; all servers were stopped", slow_hint)
        if result.error is not None:
            return result.error
    return None


def _lost_a_port(fleet: Fleet, error: DisaggError) -> bool:
    """Whether the start failed because of another program's port. The fleet's own servers are stopped by now."""
    return isinstance(error, PortInUse) or bool(ports.taken_ports(fleet))
