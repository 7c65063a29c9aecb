"""`disagg plan`, `deploy`, `rollback`, `uninstall`: what is on the hosts that are reached by SSH."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from disagg.cli.common.context import (
    confirm,
    error_console,
    note_if_interrupted,
    note_if_interrupted_after,
    print_json,
    require_answer,
    settings,
    stderr,
    stdout,
)
from disagg.cli.common.hooks import hook_runner
from disagg.cli.common.options import AsJson, BreakLock, Yes
from disagg.cli.fleet.token import deployed, read_tokens

if TYPE_CHECKING:
    from rich.console import RenderableType

    from disagg.config import Fleet, Host
    from disagg.fleet.changes.hooks import HookRunner
    from disagg.fleet.deploy.deployment import Comparer, DeployResult, Planner
    from disagg.fleet.deploy.release import Installation
    from disagg.fleet.deploy.steps import Plan
    from disagg.fleet.facts.host import HostFacts

_INTERRUPTED: Final = {
    "deploy": "each host has the release it had, or the whole new one; `disagg deploy` goes on from here",
    "rollback": "some hosts may have gone back, others not; `disagg plan` shows what would bring each one forward",
    "uninstall": "what is not removed yet is still there; `disagg uninstall` goes on from here",
}
_MODELS_STAY: Final = "models stay below ~/.disagg/models: disagg uninstall --models removes them too"


def plan(
    context: typer.Context,
    *,
    as_json: AsJson = False,
) -> None:
    """Show what `disagg deploy` would do, step by step, and what differs from now. Changes nothing."""
    from disagg.fleet.deploy.deployment import comparer, planner

    fleet = settings(context).fleet()
    hosts, here = _choose(context, fleet), _installation(fleet, dry=True)
    _show_plan(fleet, _plan_only(hosts, planner(here), comparer(here)), as_json)


def deploy(
    context: typer.Context,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan only, as `disagg plan` does.")] = False,
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
    from disagg.fleet.deploy.deployment import comparer, planner

    fleet = settings(context).fleet()
    hosts = _choose(context, fleet)
    if not dry_run:
        require_answer("deploy", "changes", yes=yes, as_json=as_json)
    adopted = _adoptable(fleet, hosts, refused=dry_run or replace_token) if adopt_token else ()
    here = _installation(fleet, adopted=adopted, dry=dry_run)
    decide = planner(here, replace_token)
    if dry_run:
        _show_plan(fleet, _plan_only(hosts, decide, comparer(here)), as_json)

    def agreed(changing: bool) -> Planner:
        return _with_token(fleet, decide, adopted=adopted, needed=changing, replace_token=replace_token)

    question = None if yes else "Deploy"
    reports = _run(
        hosts,
        decide,
        "deploy",
        question=question,
        keep_going=keep_going,
        break_lock=break_lock,
        agreed=agreed,
        hooks=hook_runner(fleet, "deploy"),
        compare=None if yes else comparer(here),
    )
    _finish(fleet, reports, as_json)


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
    from disagg.errors import UsageError
    from disagg.fleet.deploy import undo

    wrong = [one for one in to or () if not re.fullmatch(r"[0-9a-f]{4,16}", one)]
    if wrong:
        raise UsageError(f"--to {wrong[0]!r}: not a release", "4 to 16 hexadecimal digits: disagg rollback --list")
    fleet = settings(context).fleet()
    hosts = _choose(context, fleet)
    if list_:
        reports = _plan_only(hosts, undo.list_releases)
    else:
        decide: Planner = undo.rollback_to(to) if to else undo.rollback
        reports = _run(hosts, decide, "rollback", break_lock=break_lock)
    _finish(fleet, reports, as_json, note=_notes(reports))


def uninstall(
    context: typer.Context,
    *,
    models: Annotated[bool, typer.Option("--models", help="Remove ~/.disagg/models too.")] = False,
    yes: Yes = False,
    break_lock: BreakLock = False,
    as_json: AsJson = False,
) -> None:
    """Stop the servers and remove all of disagg from the hosts, but models."""
    from disagg.fleet.deploy.undo import uninstall as planned

    require_answer("uninstall", "removes", yes=yes, as_json=as_json)
    fleet = settings(context).fleet()
    hosts = _choose(context, fleet)
    question = None if yes else "Uninstall"

    def decide(one: Host, facts: HostFacts) -> Plan:
        return planned(one, facts, models)

    reports = _run(hosts, decide, "uninstall", question=question, break_lock=break_lock, if_full=True)
    removed = any(report.result == "changed" for report in reports)
    note = _notes(reports) if models else _MODELS_STAY if removed else ""
    _finish(fleet, reports, as_json, {"changed": "removed", "unchanged": "nothing there"}, note)


def _choose(context: typer.Context, fleet: Fleet) -> list[Host]:
    from disagg.fleet.deploy.deployment import choose

    return choose(fleet, **settings(context).selection)


def _adoptable(fleet: Fleet, hosts: Sequence[Host], refused: bool) -> tuple[str, ...]:
    """The hosts' tokens, if they can be made this machine's. refused: another option forbids it."""
    from disagg.errors import UsageError
    from disagg.fleet.changes.tokens import adoptable
    from disagg.fleet.lifecycle.state import State

    if refused:
        raise UsageError("--adopt-token cannot be combined with --replace-token or --dry-run", "leave one of them out")
    state = State.of(fleet)
    state.require_own_file()
    return adoptable(hosts, read_tokens(deployed(fleet)), state.tokens() if state.has_token() else ())


def _installation(fleet: Fleet, *, adopted: tuple[str, ...] = (), dry: bool = False) -> Installation:
    """What is deployed, with this machine's tokens, or those to adopt. Makes none: without any it has none."""
    from disagg.fleet.deploy.release import Installation
    from disagg.fleet.lifecycle.state import State

    state = State.of(fleet)
    none = not state.has_token() and (dry or (state.makes_token and not state.has_earlier_token))
    return Installation.current(fleet, adopted or (() if none else state.ensure_tokens()))


def _with_token(
    fleet: Fleet, decide: Planner, *, adopted: tuple[str, ...], needed: bool, replace_token: bool
) -> Planner:
    """After the question: keep the adopted tokens, or make one if it is needed. The planner with it. UsageError if this
    machine has none and the fleet has."""
    from disagg.fleet.changes.tokens import require_none
    from disagg.fleet.deploy.deployment import planner
    from disagg.fleet.lifecycle.state import State

    state = State.of(fleet)
    if adopted:
        state.adopt_tokens(adopted)
    elif needed and not state.has_token():
        if not replace_token:
            require_none(read_tokens(deployed(fleet)))
        state.ensure_tokens()
        return planner(_installation(fleet), replace_token)
    return decide


def _plan_only(hosts: Sequence[Host], decide: Planner, compare: Comparer | None = None) -> list[DeployResult]:
    from disagg.fleet.deploy.deployment import Deployment

    with stderr().status("reading facts …"), Deployment(hosts, decide, "plan", compare=compare) as deployment:
        return deployment.plan()


def _run(
    hosts: Sequence[Host],
    decide: Planner,
    why: str,
    *,
    question: str | None = None,
    keep_going: bool = True,
    break_lock: bool = False,
    if_full: bool = False,
    agreed: Callable[[bool], Planner] | None = None,
    hooks: HookRunner | None = None,
    compare: Comparer | None = None,
) -> list[DeployResult]:
    """Plan and carry out, with progress on stderr. question: the verb to ask with on a terminal; None asks nothing.
    if_full, compare: see Deployment. agreed: called after the question with whether any host changes; the planner to
    carry out with. hooks: those of the command, if it has any."""
    from disagg.cli.views.fleet.deploy import DeployProgress, plan_view
    from disagg.cli.views.fleet.deploy import question as question_text
    from disagg.cli.views.fleet.hooks import hooks_view
    from disagg.fleet.changes.hooks import around
    from disagg.fleet.deploy.deployment import Deployment

    progress = DeployProgress(stderr())
    with Deployment(hosts, decide, why, progress.report, if_full=if_full, compare=compare) as deployment:
        with note_if_interrupted("nothing was changed"):
            with stderr().status("reading facts …"):
                planned = deployment.plan()
            changing = [report for report in planned if report.result == "planned"]
            if not keep_going and any(not report.ok for report in planned):
                return planned
            if changing and question is not None and sys.stdin.isatty():
                console = error_console()  # a question is shown with --quiet too
                console.print(plan_view(planned), *hooks_view(hooks.planned("deploy") if hooks else {}))
                if not confirm(question_text(question, changing, len(hosts)), console):
                    console.print("nothing was changed")
                    raise typer.Exit(1)
            if not changing:
                if agreed is not None:
                    agreed(False)
                return planned
        with ExitStack() as locks:
            with note_if_interrupted("nothing was changed"):
                locks.enter_context(deployment.locked(planned, break_lock))
            if agreed is not None:
                deployment.planner = agreed(True)
            releases = {report.host: report.plan.release for report in changing if report.plan is not None}
            hooked = around(hooks, "deploy", list(releases), releases)
            with note_if_interrupted_after(hooked, _INTERRUPTED[why]) as change, progress:
                done = deployment.carry_out(planned)
                change.end({one.host: one.error for one in done if one.error is not None})
        return deployment.settled(done)


def _notes(reports: Sequence[DeployResult]) -> str:
    """The notes of the plans that were carried out."""
    plans = [report.plan for report in reports if report.ok and report.plan is not None]
    return "\n".join(f"{plan.host}: {note}" for plan in plans for note in plan.notes)


def _show_plan(fleet: Fleet, reports: list[DeployResult], as_json: bool) -> None:
    from disagg.cli.views.fleet.deploy import plan_view
    from disagg.cli.views.fleet.hooks import hooks_view
    from disagg.fleet.deploy.deployment import exit_code

    changing = any(report.result == "planned" for report in reports)
    hooks = hook_runner(fleet, "deploy").planned("deploy") if changing else {}
    if as_json:
        _print_json(fleet, reports, hooks=hooks)
    else:
        stdout().print(plan_view(reports, tuple(fleet.hosts)), *hooks_view(hooks), *_rotation(fleet, reports))
    raise typer.Exit(exit_code(reports))


def _finish(
    fleet: Fleet,
    reports: list[DeployResult],
    as_json: bool,
    words: Mapping[str, str] = MappingProxyType({}),
    note: str = "",
) -> None:
    from disagg.cli.views.fleet.deploy import reports_view
    from disagg.fleet.deploy.deployment import exit_code
    from disagg.fleet.deploy.models import carried

    if as_json:
        _print_json(fleet, reports)
    else:
        pulling = [host.name for host in fleet.engine_hosts if not carried(fleet, host)]
        stdout().print(reports_view(reports, tuple(fleet.hosts), pulling, words), *_rotation(fleet, reports))
        if note:
            stdout().print(note, style="dim")
    raise typer.Exit(exit_code(reports))


def _rotation(fleet: Fleet, reports: Sequence[DeployResult]) -> list[RenderableType]:
    """A line if a rotation of the token is not finished, as this machine or a host shows."""
    from disagg.cli.views.fleet.deploy import rotation_view

    return [rotation_view()] if _rotating(fleet, reports) else []


def _rotating(fleet: Fleet, reports: Sequence[DeployResult]) -> bool:
    from disagg.fleet.lifecycle.state import State

    return State.of(fleet).rotating or any(report.plan is not None and report.plan.rotating for report in reports)


def _print_json(fleet: Fleet, reports: list[DeployResult], **more: object) -> None:
    body = {
        "fleet": fleet.name,
        "ok": all(report.ok for report in reports),
        "hosts": [report.to_json() for report in reports],
        "rotating": _rotating(fleet, reports),
        **more,
    }
    print_json(body)
