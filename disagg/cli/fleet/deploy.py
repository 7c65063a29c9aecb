"""`disagg deploy` and `rollback`: the release on each host that is reached by SSH."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Annotated, Final, NoReturn

import typer
from rich.console import RenderableType
from rich.text import Text

from disagg.cli.common.change import Change, finish
from disagg.cli.common.context import note_if_interrupted, note_if_interrupted_after, settings, stderr
from disagg.cli.common.hooks import hook_runner, hooks_view
from disagg.cli.common.options import AsJson, BreakLock, Yes
from disagg.cli.fleet.token import deployed, read_tokens
from disagg.cli.views.plans import plan_view, reports_view, rotation_view
from disagg.cli.views.plans import question as question_text
from disagg.cli.views.progress import DeployProgress
from disagg.config import Fleet, Host
from disagg.errors import UsageError
from disagg.fleet.changes.hooks import HookRunner, around
from disagg.fleet.deploy.deployment import (
    Comparer,
    Deployment,
    DeployResult,
    Planner,
    choose,
    comparer,
    exit_code,
    planner,
)
from disagg.fleet.deploy.release import Installation, carried
from disagg.fleet.deploy.rollback import list_releases, rollback_to
from disagg.fleet.deploy.rollback import rollback as to_previous
from disagg.fleet.lifecycle.state import State
from disagg.fleet.tokens.there import KnownTokens, adopt_or_make, adoptable

_INTERRUPTED: Final = {
    "deploy": "each host has the release it had, or the whole new one; `disagg deploy` goes on from here",
    "rollback": "some hosts may have gone back, others not; `disagg deploy --dry-run` shows how each comes forward",
    "uninstall": "what is not removed yet is still there; `disagg uninstall` goes on from here",
}


def deploy(
    context: typer.Context,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show each step and what differs from now only.")] = False,
    yes: Yes = False,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going/--all-or-nothing",
            help="If one host cannot be deployed: deploy the others, or change nothing on any.",
        ),
    ] = True,
    adopt_token: Annotated[
        bool, typer.Option("--adopt-token", help="Use the token that the hosts have, on this machine too.")
    ] = False,
    replace_token: Annotated[
        bool, typer.Option("--replace-token", help="Put this machine's token on hosts that have another one.")
    ] = False,
    break_lock: BreakLock = False,
    as_json: AsJson = False,
) -> None:
    """Bring this disagg, its environment and its settings to the hosts. Running servers are not restarted.

    A host that has all of it already is left untouched. If something fails, the host keeps its current release,
    and the next run goes on.
    """
    fleet = settings(context).fleet()
    hosts = chosen(context, fleet)
    change = Change("deploy", yes=yes, as_json=as_json, asks=not dry_run)
    adopted = _adoptable(fleet, hosts, refused=dry_run or replace_token) if adopt_token else ()
    here = _installation(fleet, adopted=adopted, dry=dry_run)
    decide = planner(here, replace_token)
    if dry_run:
        show_plan(fleet, plan_only(hosts, decide, comparer(here)), as_json, hook_runner(fleet, "deploy"))

    def agreed(changing: bool) -> Planner:
        return _with_token(fleet, decide, adopted=adopted, needed=changing, replace_token=replace_token)

    reports = run(
        change,
        hosts,
        decide,
        "deploy",
        question="Deploy",
        keep_going=keep_going,
        break_lock=break_lock,
        agreed=agreed,
        hooks=hook_runner(fleet, "deploy"),
        compare=None if yes else comparer(here),
    )
    show(fleet, reports, as_json)


def rollback(
    context: typer.Context,
    *,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="RELEASE",
            help="To this release, by the beginning of its name; each host has its own, so it is repeatable.",
            show_default=False,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show each host's releases. Changes nothing.")] = False,
    break_lock: BreakLock = False,
    as_json: AsJson = False,
) -> None:
    """Go back to the release before the current one, or another one. Running servers are not restarted."""
    wrong = [one for one in to or () if not re.fullmatch(r"[0-9a-f]{4,16}", one)]
    if wrong:
        raise UsageError(f"--to {wrong[0]!r}: not a release", "4 to 16 hexadecimal digits: disagg rollback --list")
    fleet = settings(context).fleet()
    hosts = chosen(context, fleet)
    if list_:
        reports = plan_only(hosts, list_releases)
    else:
        decide: Planner = rollback_to(to) if to else to_previous
        change = Change("rollback", yes=True, as_json=as_json)
        reports = run(change, hosts, decide, "rollback", break_lock=break_lock)
    show(fleet, reports, as_json, note=notes(reports))


def chosen(context: typer.Context, fleet: Fleet) -> list[Host]:
    """The selected hosts that are deployed to."""
    return choose(fleet, **settings(context).selection)


def _adoptable(fleet: Fleet, hosts: Sequence[Host], refused: bool) -> tuple[str, ...]:
    """The hosts' tokens, if they can be made this machine's. refused: another option forbids it."""
    if refused:
        raise UsageError("--adopt-token cannot be combined with --replace-token or --dry-run", "leave one of them out")
    return adoptable(State.of(fleet).tokens, hosts, read_tokens(deployed(fleet)))


def _installation(fleet: Fleet, *, adopted: tuple[str, ...] = (), dry: bool = False) -> Installation:
    """What is deployed, with this machine's tokens, or those to adopt. Makes none: without any it has none."""
    return Installation.current(fleet, adopted or State.of(fleet).tokens.for_plan(dry))


def _with_token(
    fleet: Fleet, decide: Planner, *, adopted: tuple[str, ...], needed: bool, replace_token: bool
) -> Planner:
    """Keep the adopted tokens after the question, or make one if it is needed; the planner with it. UsageError if this
    machine has none and the fleet has."""

    def read() -> KnownTokens:
        return read_tokens(deployed(fleet))

    made = (adopted or needed) and adopt_or_make(State.of(fleet).tokens, adopted, replace_token, read)
    return planner(_installation(fleet), replace_token) if made else decide


def plan_only(hosts: Sequence[Host], decide: Planner, compare: Comparer | None = None) -> list[DeployResult]:
    """What would be done on each host."""
    with stderr().status("reading facts …"), Deployment(hosts, decide, "plan", compare=compare) as deployment:
        return deployment.plan()


def run(
    change: Change,
    hosts: Sequence[Host],
    decide: Planner,
    why: str,
    *,
    question: str = "",
    keep_going: bool = True,
    break_lock: bool = False,
    if_full: bool = False,
    agreed: Callable[[bool], Planner] | None = None,
    hooks: HookRunner | None = None,
    compare: Comparer | None = None,
) -> list[DeployResult]:
    """Plan, ask and carry out, with progress on stderr. question: its verb. if_full, compare: see Deployment. agreed:
    called after the question with whether any host changes; the planner to carry out with. hooks: those of the command,
    if it has any."""
    progress = DeployProgress(stderr())
    with Deployment(hosts, decide, why, progress.report, if_full=if_full, compare=compare) as deployment:
        with change.looking():
            planned = deployment.plan()
        changing = [report for report in planned if report.result == "planned"]
        if not keep_going and any(not report.ok for report in planned):
            return planned
        if not changing:
            if agreed is not None:
                agreed(False)
            return planned
        hooked = hooks_view(hooks.planned("deploy") if hooks else {})
        change.ask(question_text(question, changing, len(hosts)), plan_view(planned), *hooked)
        with ExitStack() as locks:
            with note_if_interrupted("nothing was changed"):
                locks.enter_context(deployment.locked(planned, break_lock))
            if agreed is not None:
                deployment.planner = agreed(True)
            releases = {report.host: report.plan.release for report in changing if report.plan is not None}
            around_it = around(hooks, "deploy", list(releases), releases, deployment.locks)
            with note_if_interrupted_after(around_it, _INTERRUPTED[why]) as ending, progress:
                done = deployment.carry_out(planned)
                ending.end({one.host: one.error for one in done if one.error is not None})
        return deployment.settled(done)


def notes(reports: Sequence[DeployResult]) -> str:
    """The notes of the plans that were carried out."""
    plans = [report.plan for report in reports if report.ok and report.plan is not None]
    return "\n".join(f"{plan.host}: {note}" for plan in plans for note in plan.notes)


def show_plan(fleet: Fleet, reports: list[DeployResult], as_json: bool, hooks: HookRunner | None = None) -> NoReturn:
    """Print what would be done on each host, and exit."""
    changing = any(report.result == "planned" for report in reports)
    hooked = hooks.planned("deploy") if changing and hooks is not None else {}
    _end(fleet, reports, as_json, plan_view(reports, tuple(fleet.hosts)), *hooks_view(hooked), hooks=hooked)


def show(
    fleet: Fleet,
    reports: list[DeployResult],
    as_json: bool,
    words: Mapping[str, str] = MappingProxyType({}),
    note: str = "",
) -> NoReturn:
    """Print how it ended on each host, and exit. words: other words for results."""
    pulled = {host.table: host for host in fleet.engine_hosts if not (host.simulated or carried(fleet, host))}
    pulling = list(pulled)
    _end(fleet, reports, as_json, reports_view(reports, tuple(fleet.hosts), pulling, words), note=note)


def _end(
    fleet: Fleet, reports: list[DeployResult], as_json: bool, *views: RenderableType, note: str = "", **more: object
) -> NoReturn:
    """Below the views: whether a rotation of the token is not finished, as this machine or a host shows."""
    rotating = State.of(fleet).tokens.rotating or any(one.plan is not None and one.plan.rotating for one in reports)
    body = {
        "fleet": fleet.name,
        "ok": all(report.ok for report in reports),
        "hosts": [report.to_json() for report in reports],
        "rotating": rotating,
        **more,
    }
    below = [*([rotation_view()] if rotating else []), *([Text(note, "dim")] if note else [])]
    finish(as_json, body, *views, *below, code=exit_code(reports))
