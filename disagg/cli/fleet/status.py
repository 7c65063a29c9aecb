"""`disagg status`: the health of every server, and the command for each that is not healthy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.context import print_json, settings, stdout
from disagg.cli.common.options import AsJson, seconds_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from disagg.fleet.lifecycle.status.host_status import HostStatus

    Poll = Callable[[], list[HostStatus]]


def status(
    context: typer.Context,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until interrupted.")] = False,
    as_json: AsJson = False,
    every: Annotated[float, seconds_option(0.1, "Seconds between two readings with --watch.")] = 2.0,
    timeout: Annotated[float, seconds_option(0.2, "Seconds for one reading: half over HTTP, the rest over SSH.")] = 6.0,
) -> None:
    """Show the health of the fleet. Exit code 0: all healthy; 1: they are, and hosts differ; 3: some unhealthy; 4: a
    host cannot be reached.

    Reads each server over HTTP; if one does not serve, its machine over SSH for the reason.
    """
    from disagg.errors import UsageError
    from disagg.fleet.lifecycle.state import State
    from disagg.fleet.lifecycle.status.diagnose import diagnose
    from disagg.fleet.lifecycle.status.health import exit_code, poll

    if watch and as_json:
        raise UsageError("--watch and --json cannot be combined", "call `disagg status --json` in a loop")
    fleet = settings(context).fleet()
    state, names = State.of(fleet), settings(context).names(fleet)

    def look() -> list[HostStatus]:
        token = state.token() if state.has_token() else None
        began = time.monotonic()
        statuses = poll(fleet, token, state, names, timeout / 2)
        left = timeout - (time.monotonic() - began)
        return diagnose(fleet, statuses, token, max(left, timeout / 3))  # with --parallel none may be left

    if watch:
        _watch(look, every, tuple(fleet.hosts))
    statuses = look()
    if as_json:
        body = {"fleet": fleet.name, "ok": exit_code(statuses) == 0, "hosts": [one.to_json() for one in statuses]}
        print_json(body)
    else:
        from disagg.cli.views.fleet.health import health_view

        stdout().print(health_view(statuses, tuple(fleet.hosts)))
    raise typer.Exit(exit_code(statuses))


def _watch(look: Poll, every: float, all_hosts: Sequence[str]) -> None:
    """Show the fleet until interrupted: a live table, or one line per change if stdout is no terminal."""
    from rich.live import Live

    from disagg.cli.views.fleet.health import status_line, watch_view

    console = stdout()
    if console.is_terminal:
        with Live(watch_view(look(), all_hosts, every), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(watch_view(look(), all_hosts, every), refresh=True)
    last: dict[str, str] = {}
    while True:
        for one in look():
            line = status_line(one)
            if last.get(one.host) != line:
                last[one.host] = line
                console.print(f"{time.strftime('%H:%M:%S')} {line}", soft_wrap=True, markup=False)
        time.sleep(every)
