"""`disagg logs`: the log lines of all servers in one stream, or with --audit which command changed which host."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import typer

from disagg.cli.common.change import finish
from disagg.cli.common.context import print_error, settings, stderr, stdout
from disagg.cli.common.options import AsJson
from disagg.cli.views.logs import LogView
from disagg.config import Host
from disagg.errors import DisaggError, UsageError, exit_code_of_all
from disagg.fleet.lifecycle.logs import LogLine, follow, read
from disagg.fleet.lifecycle.state import State

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LINES = 100
_LINES_SINCE = 10_000


def logs(
    context: typer.Context,
    *,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines until interrupted.")] = False,
    since: Annotated[
        str | None, typer.Option(metavar="AGO", help="Only lines of the last 30s, 10m, 2h or 1d.", show_default=False)
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--lines",
            metavar="N",
            min=1,
            max=1_000_000,
            help="At most this many lines per host.",
            show_default=False,
        ),
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Who changed which host when, with which command, from where.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the servers' logs, merged by time: the last 100 lines of each host, or all with --since.

    With --model, the log of that model's process if a host has several. Times are this machine's local time. Exit code
    0, or 1 or 4 if a host's log cannot be read.
    """
    begin = time.time() - _ago(since) if since is not None else None
    chosen = settings(context)
    fleet = chosen.fleet()
    hosts, state = fleet.select(**chosen.selection, managed=True), State.of(fleet)
    if chosen.selection.get("model") is not None and not audit:
        model = fleet.model(chosen.selection["model"]).name
        hosts = [fleet.served[f"{host.name}/{model}"] if host.keeps else host for host in hosts]
    count = lines or (_LINES if since is None else _LINES_SINCE)
    if follow:
        ends = {"--audit": audit, "--json": as_json, "--timeout": chosen.host_s is not None}
        if wrong := next((name for name, given in ends.items() if given), None):
            raise UsageError(f"{wrong} and --follow cannot be combined", "following ends with Ctrl-C; or call it again")
        _follow(hosts, state, count, begin)
    entries, errors = read(hosts, state, count, begin, audits=audit)
    if not as_json:
        _print(hosts, entries, errors, dated=audit)
        if audit and not entries and not errors:
            stderr().print(f"no command has changed these hosts{' since then' if since else ''}", style="dim")
    shown, failed = ([one.to_json() for one in found] for found in (entries, errors))
    body = {"fleet": fleet.name, "ok": not errors, "lines": shown, "errors": failed}
    finish(as_json, body, code=exit_code_of_all(error.exit_code for error in errors))


def _print(hosts: Sequence[Host], entries: Sequence[LogLine], errors: Sequence[DisaggError], *, dated: bool) -> None:
    view, out = LogView([host.name for host in hosts], dated=dated), stdout()
    for line in entries:
        out.print(view.line(line), soft_wrap=True)
    for error in errors:
        print_error(error)


def _follow(hosts: Sequence[Host], state: State, count: int, begin: float | None) -> None:
    view, out = LogView([host.name for host in hosts]), stdout()
    with closing(follow(hosts, state, count, begin)) as entries:
        for line in entries:
            out.print(view.line(line), soft_wrap=True)


def _ago(text: str) -> int:
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if match is None:
        raise UsageError(f"--since {text!r}: not a duration", "as in 30s, 10m, 2h or 1d")
    return int(match[1]) * _UNITS[match[2]]
