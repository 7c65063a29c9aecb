"""`disagg start`, `stop`, `restart`: the servers, on this machine and on those that were deployed to."""

from __future__ import annotations

from typing import Annotated

import typer

from disagg.cli.common.context import (
    Settings,
    error_console,
    note_if_interrupted,
    note_if_interrupted_after,
    print_json,
    settings,
    stderr,
    stdout,
)
from disagg.cli.common.hooks import hook_runner
from disagg.cli.common.options import AsJson, BreakLock, seconds_option
from disagg.cli.views.progress import HostProgress, failures_view, results_table
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.one_server import ServerResult, exit_code
from disagg.fleet.lifecycle.state import State

Timeout = Annotated[float, seconds_option(0, "Seconds to wait for the servers to be healthy.")]


def start(
    context: typer.Context, *, timeout: Timeout = 300.0, break_lock: BreakLock = False, as_json: AsJson = False
) -> None:
    """Start the fleet's servers and wait until they are healthy. Servers that already run are left running.

    Exit code 0: all healthy; 1: a host failed; 3: some still load, and are left running; 4: a host cannot be reached.
    """
    lifecycle = _lifecycle(settings(context), break_lock)
    with note_if_interrupted("what this command had started was stopped"):
        results = lifecycle.start(settings(context).names(lifecycle.fleet), timeout)
    _finish(lifecycle, results, as_json)


def stop(
    context: typer.Context,
    *,
    others: Annotated[
        bool, typer.Option("--all", help="Also servers on these machines that hosts.toml does not name.")
    ] = False,
    break_lock: BreakLock = False,
    as_json: AsJson = False,
) -> None:
    """Stop the fleet's servers after their running requests have finished."""
    lifecycle = _lifecycle(settings(context), break_lock)
    with note_if_interrupted("servers may still run; `disagg status` shows which"):
        results = lifecycle.stop(settings(context).names(lifecycle.fleet), others)
    _finish(lifecycle, results, as_json)


def restart(
    context: typer.Context,
    *,
    timeout: Timeout = 300.0,
    all_at_once: Annotated[
        bool, typer.Option("--all-at-once", help="Restart all at the same time: a model is not served meanwhile.")
    ] = False,
    break_lock: BreakLock = False,
    as_json: AsJson = False,
) -> None:
    """Restart the fleet's servers, those of one model one after the other, each once the last is healthy.

    If one does not become healthy, the other hosts of its model are not restarted. Exit codes as of `start`.
    """
    lifecycle = _lifecycle(settings(context), break_lock)
    names = settings(context).names(lifecycle.fleet)
    changed = [host.name for host in lifecycle.fleet.select(names) if not host.whole]
    hooks = hook_runner(lifecycle.fleet, "restart")
    left = "servers that were started keep running; `disagg status` shows which do not run"
    with note_if_interrupted("nothing was changed"):
        results = lifecycle.restart(
            names,
            timeout,
            all_at_once,
            lambda locks: note_if_interrupted_after(hooks.around("restart", changed, locks=locks), left),
        )
    _finish(lifecycle, results, as_json)


def _lifecycle(chosen: Settings, break_lock: bool) -> FleetServers:
    fleet = chosen.fleet()
    return FleetServers(fleet, State.of(fleet), report=HostProgress(stderr()).report, break_lock=break_lock)


def _finish(lifecycle: FleetServers, results: list[ServerResult], as_json: bool) -> None:
    if as_json:
        rows = [result.to_json() for result in results]
        print_json({"fleet": lifecycle.fleet.name, "ok": exit_code(results) == 0, "hosts": rows})
        raise typer.Exit(exit_code(results))
    stdout().print(results_table(results))
    if failures := failures_view(results, tuple(lifecycle.fleet.hosts)):
        error_console().print(failures)
    raise typer.Exit(exit_code(results))
