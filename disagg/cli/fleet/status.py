"""`disagg status`: the health of every server, and the command for each that is not healthy; once, again and again, or
its changes only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer
from rich.live import Live

from disagg.cli.common.change import finish
from disagg.cli.common.context import settings, stdout
from disagg.cli.common.options import AsJson, seconds_option, was_given
from disagg.cli.fleet.notify import URL_VARIABLE, notify_changes
from disagg.cli.views.health import health_view, status_line, watch_view
from disagg.errors import UsageError
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import diagnose, poll
from disagg.fleet.lifecycle.status.host_status import HostStatus, exit_code


def status(
    context: typer.Context,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until interrupted.")] = False,
    notify: Annotated[
        bool, typer.Option("--notify", help="Print only when a host goes down or comes back, until interrupted.")
    ] = False,
    run: Annotated[
        str, typer.Option("--run", metavar="CMD", help="With --notify: a line for sh for each change.")
    ] = "",
    url: Annotated[
        str,
        typer.Option(
            "--url", metavar="URL", envvar=URL_VARIABLE, help="With --notify: POST each change there as JSON."
        ),
    ] = "",
    misses: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --notify: readings in a row until a host is down.")
    ] = 2,
    as_json: AsJson = False,
    every: Annotated[
        float | None, seconds_option(0.1, "Seconds between two readings, by default 2, with --notify 5.")
    ] = None,
    timeout: Annotated[
        float | None,
        seconds_option(
            0.2, "Seconds for one reading, by default 6, half over HTTP, the rest over SSH; with --notify 3."
        ),
    ] = None,
) -> None:
    """Show the health of the fleet. Exit code 0: all healthy; 1: they are, and hosts differ; 3: some unhealthy; 4: a
    host cannot be reached.

    Reads each server over HTTP; if one does not serve, its machine over SSH for the reason.

    With --notify a host is down after two readings in which it is not healthy, and up again after one in which it is;
    with --json each change is one line of JSON.
    """
    if notify:
        if watch:
            raise UsageError(
                "--watch and --notify cannot be combined", "the one shows the fleet, the other its changes"
            )
        notify_changes(
            context, run=run, url=url, misses=misses, every=every or 5.0, timeout=timeout or 3.0, as_json=as_json
        )
        return
    for name in ("run", "url", "misses"):
        if was_given(context, name):
            raise UsageError(f"--{name} needs --notify", f"disagg status --notify --{name} ...")
    _show(context, every or 2.0, timeout or 6.0, watch=watch, as_json=as_json)


def _show(context: typer.Context, every: float, timeout: float, *, watch: bool, as_json: bool) -> NoReturn:
    if watch and as_json:
        raise UsageError("--watch and --json cannot be combined", "call `disagg status --json` in a loop")
    fleet = settings(context).fleet()
    state, names = State.of(fleet), settings(context).names(fleet)

    def look() -> list[HostStatus]:
        token = state.tokens.known
        began = time.monotonic()
        statuses = poll(fleet, token, state, names, timeout / 2)
        left = timeout - (time.monotonic() - began)
        return diagnose(fleet, statuses, token, max(left, timeout / 3))  # with --parallel none may be left

    if watch:
        _watch(look, every, tuple(fleet.hosts))

    statuses = look()
    code = exit_code(statuses)
    body = {"fleet": fleet.name, "ok": code == 0, "hosts": [one.to_json() for one in statuses]}
    finish(as_json, body, health_view(statuses, tuple(fleet.hosts)), code=code)


def _watch(look: Callable[[], list[HostStatus]], every: float, all_hosts: Sequence[str]) -> None:
    """Show the fleet until interrupted: a live table, or one line per change if stdout is no terminal."""
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
