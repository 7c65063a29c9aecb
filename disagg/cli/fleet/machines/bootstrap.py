"""`disagg bootstrap`: what a bare machine needs before it is deployed to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from disagg.cli.common.completion import complete_host
from disagg.cli.common.context import (
    confirm,
    error_console,
    note_if_interrupted,
    print_json,
    require_answer,
    settings,
    stderr,
    stdout,
)
from disagg.cli.common.options import AsJson, Yes

if TYPE_CHECKING:
    from disagg.config import Fleet, Host
    from disagg.fleet.doctor.bootstrap.bootstrap import Bootstrap
    from disagg.fleet.doctor.bootstrap.steps import StepResult

_INTERRUPTED = "steps that are done stay; `disagg bootstrap` goes on from here"


def bootstrap(
    context: typer.Context,
    *,
    host: Annotated[str, typer.Argument(metavar="HOST", help="A host of hosts.toml.", autocompletion=complete_host)],
    login: Annotated[
        str | None,
        typer.Option(
            "--login",
            metavar="USER",
            help="Log in as this account, to make the one that hosts.toml names.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what is missing only.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Prepare the machine of HOST: account, uv, Python, clock, start at boot, sleep, driver. Only what is missing.

    Each step is shown with its command before anything is changed. Exit code 1: something is still missing.
    """
    from disagg.cli.views.fleet.hooks import hook_output
    from disagg.cli.views.fleet.machines.bootstrap import question, steps_view
    from disagg.config.addresses import USER_RULE, is_user
    from disagg.errors import UsageError
    from disagg.fleet.doctor.bootstrap.bootstrap import Bootstrap
    from disagg.fleet.machine.connect import machine_for

    if login is not None and not is_user(login):
        raise UsageError("--login is not the name of an account", USER_RULE)
    fleet = settings(context).fleet()
    one = _chosen(fleet, host)
    if not dry_run:
        require_answer(f"bootstrap {host}", "changes", yes=yes, as_json=as_json)
    machine = machine_for(one if login is None else replace(one, user=login))
    try:
        work = Bootstrap(one, fleet.deploy, machine, hook_output(stderr()))
        with note_if_interrupted("nothing was changed"), stderr().status("checking …"):
            found = _look(work, login)
        missing = [step for step in found if step.state == "missing"]
        if dry_run or not missing:
            _finish(one, found, as_json, dry_run=dry_run)
        if not yes:
            console = error_console()  # a question is shown with --quiet too
            console.print(steps_view(found))
            if not confirm(question(one.name, missing), console):
                console.print("nothing was changed")
                raise typer.Exit(1)
        with note_if_interrupted(_INTERRUPTED):
            done = work.carry_out(found)
    finally:
        machine.close()
    _finish(one, done, as_json)


def _chosen(fleet: Fleet, name: str) -> Host:
    """The host of this name. UsageError if it has several, or its host is not reached by SSH."""
    from disagg.errors import UsageError

    one, *others = fleet.select([name], managed=True)
    if others:
        raise UsageError(
            f"bootstrap prepares one host at a time, and {name} fits {len(others) + 1}", "name one of them"
        )
    if not one.placement.deployed:
        message = f'{one.name}: connector is "local", and bootstrap prepares machines that are reached by SSH'
        raise UsageError(message, "disagg doctor examines this one")
    return one


def _look(work: Bootstrap, login: str | None) -> list[StepResult]:
    """What is in place. The error of a login that is refused says that another account may make this one."""
    from disagg.errors import LoginRefused

    try:
        return work.look()
    except LoginRefused as error:
        if login is None and work.host.user is not None:
            error.hint += f"; or let another account make it: disagg bootstrap {work.host.name} --login USER"
        raise


def _finish(host: Host, results: Sequence[StepResult], as_json: bool, *, dry_run: bool = False) -> NoReturn:
    """Print the results and exit: 1 if something is still missing, unless that is all that was asked."""
    from disagg.cli.views.fleet.machines.bootstrap import steps_view

    ok = all(one.state in ("in place", "done") for one in results)
    if as_json:
        print_json({"host": host.name, "ok": ok, "steps": [one.to_json() for one in results]})
    else:
        stdout().print(steps_view(results))
    raise typer.Exit(0 if ok or dry_run else 1)
