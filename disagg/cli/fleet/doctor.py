"""`disagg doctor`: what is wrong with the fleet, and the command that fixes it."""

from __future__ import annotations

import typer

from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson


def doctor(
    context: typer.Context,
    *,
    as_json: AsJson = False,
) -> None:
    """Check every host and measure the links that carry KV. Changes nothing.

    Exit code 0: no faults; 1: a fault; 4: a host cannot be reached.
    """
    from disagg.fleet.doctor.examine import examine
    from disagg.fleet.lifecycle.state import State

    fleet = settings(context).fleet()
    with stderr().status("examining …") as status:
        diagnosis = examine(
            fleet,
            State.of(fleet),
            settings(context).names(fleet),
            on_step=lambda what: status.update(f"examining {what} …"),
        )
    if as_json:
        print_json({"fleet": fleet.name, **diagnosis.to_json()})
    else:
        from disagg.cli.views.fleet.doctor import doctor_view

        stdout().print(doctor_view(diagnosis))
    raise typer.Exit(diagnosis.exit_code)
