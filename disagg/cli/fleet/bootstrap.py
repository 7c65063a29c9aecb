"""`disagg bootstrap`: what a bare machine needs before it is deployed to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from disagg.cli.common.change import Change
from disagg.cli.common.context import note_if_interrupted, settings, stderr
from disagg.cli.common.hooks import hook_output
from disagg.cli.common.options import AsJson, HostName, Yes
from disagg.cli.views.items import Hanging, plain_table
from disagg.config import Fleet, Host
from disagg.config.addresses import USER_RULE, is_user
from disagg.errors import LoginRefused, UsageError, printable
from disagg.fleet.bootstrap import Bootstrap, StepResult, StepState
from disagg.fleet.machine.connect import machine_for
from disagg.units import counted

_INTERRUPTED = "steps that are done stay; `disagg bootstrap` goes on from here"
_STYLE: Final[Mapping[StepState, str]] = {
    "in place": "dim",
    "missing": "yellow",
    "by hand": "yellow",
    "done": "green",
    "failed": "bold red",
}


def bootstrap(
    context: typer.Context,
    *,
    host: HostName,
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
    if login is not None and not is_user(login):
        raise UsageError("--login is not the name of an account", USER_RULE)
    fleet = settings(context).fleet()
    one = _chosen(fleet, host)
    change = Change(f"bootstrap {host}", yes=yes, as_json=as_json, asks=not dry_run)
    machine = machine_for(one if login is None else replace(one, user=login))
    try:
        work = Bootstrap(one, fleet.deploy, machine, hook_output(stderr()))
        with change.looking("checking …"):
            results = _look(work, login)
        missing = [step for step in results if step.state == "missing"]
        if missing and not dry_run:
            change.ask(question(one.name, missing), steps_view(results))
            with note_if_interrupted(_INTERRUPTED):
                results = work.carry_out(results)
    finally:
        machine.close()
    ok = all(one.state in ("in place", "done") for one in results)
    body = {"host": one.name, "ok": ok, "steps": [step.to_json() for step in results]}
    change.finish(body, steps_view(results), code=0 if ok or dry_run else 1)


def _chosen(fleet: Fleet, name: str) -> Host:
    """The host of this name. UsageError if it has several, or its host is not reached by SSH."""
    one, *others = fleet.select([name], managed=True)
    if others:
        raise UsageError(
            f"bootstrap prepares one host at a time, and {name} fits {len(others) + 1}", "name one of them"
        )
    if not one.server_kind.deployed:
        message = f'{one.name}: connector is "local", and bootstrap prepares machines that are reached by SSH'
        raise UsageError(message, "disagg doctor examines this one")
    return one


def _look(work: Bootstrap, login: str | None) -> list[StepResult]:
    """What is in place. The error of a login that is refused says that another account may make this one."""
    try:
        return work.look()
    except LoginRefused as error:
        if login is None and work.host.user is not None:
            error.hint += f"; or let another account make it: disagg bootstrap {work.host.name} --login USER"
        raise


def steps_view(results: Sequence[StepResult]) -> RenderableType:
    """One row for each step; then the commands of those that are missing, what is to be done by hand, and errors."""
    names, whole = ("step", "state", "found", "why"), ("step", "state")
    table = plain_table(*names, bold=["step"], dim=["why"], fold=["found", "why"], whole=whole)
    for one in results:
        table.add_row(one.step.name, Text(one.state, _STYLE[one.state]), Text(printable(one.found)), one.step.why)
    lines = [line for one in results for line in _more(one)]
    return Group(table, *([Text(), *lines] if lines else []))


def question(host: str, missing: Sequence[StepResult]) -> str:
    """`Run 2 steps on dgx-spark-1?`."""
    return f"Run {counted(len(missing), 'step')} on {host}?"


def _more(result: StepResult) -> Iterator[RenderableType]:
    step = result.step
    mark = Text(f"{step.name}: ", "bold")
    if result.state == "missing":
        yield Hanging(mark + Text("root $ " if step.root else "$ ", "dim"), Text(step.command))
    elif result.state == "by hand":
        yield Hanging(mark, Text(step.by_hand))
    elif result.state == "failed":
        yield Hanging(mark, Text(printable(result.error), "red"))
