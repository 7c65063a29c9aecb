"""`disagg ssh` and `disagg exec`: a shell on one host, a command on many."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from threading import Lock
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from disagg.cli.common.context import print_error, print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, HostName, seconds_option
from disagg.cli.views.logs import coloured
from disagg.config import Host
from disagg.errors import FleetError, exit_code_of_all, printable
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import HostOutcome, each
from disagg.fleet.machine.machine import CommandResult
from disagg.fleet.machine.ssh.settings import ssh_command


def ssh(
    context: typer.Context,
    *,
    host: HostName,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="After --: run this instead of a login shell.")
    ] = None,
) -> None:
    """Open an SSH session on HOST with the user, port and keys that disagg uses.

    One argument after -- is a line for the remote shell; several are a command and its arguments.
    """
    one = settings(context).fleet().select([host], managed=True)[0]
    argv = ssh_command(one, command or (), terminal=sys.stdin.isatty())
    sys.stdout.flush()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        raise FleetError(f"cannot run ssh: {error.strerror}", "sudo apt install openssh-client") from error


def exec_(
    context: typer.Context,
    *,
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="After --: the command.")],
    timeout: Annotated[float, seconds_option(0.1, "Seconds until the command is stopped.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Run CMD on all hosts at the same time; each line of output starts with its host.

    One argument after -- is a line for sh; several are a command and its arguments, without a shell. Exit code 1: it
    failed on a host; 4: a host cannot be reached.
    """
    chosen = settings(context)
    hosts = chosen.fleet().select(**chosen.selection, managed=True)
    shown = Prefixed(stdout(), [one.name for one in hosts])
    argv = ["/bin/sh", "-c", command[0]] if len(command) == 1 else command

    def run(one: Host) -> CommandResult:
        def show(line: str) -> None:
            if not as_json:
                shown.line(one.name, line)

        machine = machine_for(one)
        try:
            return machine.run(argv, timeout=timeout, on_line=show)
        finally:
            machine.close()

    _finish(each(hosts, run), as_json)


def _finish(outcomes: Sequence[HostOutcome[CommandResult]], as_json: bool) -> None:
    """Print the failures on stderr, with --json all results on stdout, and exit with their code."""
    if as_json:
        print_json({"hosts": [_json_row(one) for one in outcomes]})
    codes = set()
    for one in outcomes:
        if one.error is not None:
            print_error(one.error)
            codes.add(one.error.exit_code)
        elif one.value is not None and not one.value.ok:
            stderr().print(f"{one.host.name}: exit code {one.value.code}", style="bold red", soft_wrap=True)
            codes.add(1)
    if codes:
        raise typer.Exit(exit_code_of_all(codes))


def _json_row(one: HostOutcome[CommandResult]) -> dict[str, object]:
    result, error = one.value, one.error.to_json() if one.error is not None else None
    output = {"code": result.code, "stdout": result.stdout, "stderr": result.stderr} if result is not None else {}
    return {"host": one.host.name, "seconds": round(one.seconds, 3), **output, "error": error}


class Prefixed:
    """Prints whole lines only; `line` may be called from several threads."""

    def __init__(self, console: Console, hosts: Sequence[str]) -> None:
        self._console = console
        self._lock = Lock()
        self._names = coloured(hosts)

    def line(self, host: str, text: str) -> None:
        """One line of a host's output, without control characters: what a file has is shown on a terminal later."""
        with self._lock:
            self._console.print(
                Text.assemble(self._names[host], (" │ ", self._names[host].style), printable(text)), soft_wrap=True
            )
