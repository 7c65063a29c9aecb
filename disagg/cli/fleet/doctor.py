"""`disagg doctor`: what is wrong with the fleet, and the command that mends it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from disagg.cli.context import settings, stderr, stdout
from disagg.cli.fleet.lifecycle import Hosts


def doctor(
    context: typer.Context,
    *,
    host: Hosts = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Examine the hosts and measure the links that KV takes. Changes nothing.

    Exit code 0: nothing is at fault; 1: something is; 4: a host cannot be reached.
    """
    from disagg.fleet.doctor.examine import examine
    from disagg.fleet.lifecycle.state import State

    fleet = settings(context).fleet()
    with stderr().status("examining …") as status:
        diagnosis = examine(fleet, State.of(fleet), host or (), tell=lambda what: status.update(f"examining {what} …"))
    if as_json:
        typer.echo(json.dumps({"fleet": fleet.name, **diagnosis.to_json()}, indent=2))
    else:
        from disagg.cli.views.fleet.doctor import doctor_view

        stdout().print(doctor_view(diagnosis))
    raise typer.Exit(diagnosis.exit_code)
