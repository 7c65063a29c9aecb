"""`disagg uninstall`: remove the hosts of hosts.toml from their machines, or with --unused what none of them needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, NoReturn

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from disagg.cli.common.change import Change
from disagg.cli.common.context import note_if_interrupted, settings, stderr
from disagg.cli.common.options import AsJson, BreakLock, Yes
from disagg.cli.fleet.deploy import chosen, notes, plan_only, run, show, show_plan
from disagg.cli.views.errors import error_views
from disagg.cli.views.items import Hanging, plain_table
from disagg.cli.views.progress import DeployProgress
from disagg.config import Fleet, Host
from disagg.errors import UsageError, exit_code_of_all
from disagg.fleet.deploy.steps import Plan
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine.connect import Machines
from disagg.fleet.removal.removal import Pruned, Pruning
from disagg.fleet.removal.removal import uninstall as planned
from disagg.token import token_digest
from disagg.units import counted, size

_INTERRUPTED = "what is not removed yet is still there; `disagg uninstall --unused` goes on from here"
_MODELS_STAY = "models stay below ~/.disagg/models: disagg uninstall --models removes them too"


def uninstall(
    context: typer.Context,
    *,
    models: Annotated[
        bool,
        typer.Option(
            "--models",
            help="Remove ~/.disagg/models too; with --unused, models of the hub's cache that no host of the machine "
            "names.",
        ),
    ] = False,
    unused: Annotated[
        bool, typer.Option("--unused", help="Remove only what no host of hosts.toml needs any more.")
    ] = False,
    others: Annotated[
        bool, typer.Option("--all", help="With --unused: also hosts of other fleets, and those with another token.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed only.")] = False,
    yes: Yes = False,
    break_lock: BreakLock = False,
    as_json: AsJson = False,
) -> None:
    """Stop the servers and remove all of disagg from the hosts, but models.

    With --unused the hosts of hosts.toml stay, and what is left over on their machines goes: hosts that the file no
    longer names, with their servers, releases and tokens; then environments and models that no host of the machine
    needs. What it finds is shown first.
    """
    if others and not unused:
        raise UsageError("--all needs --unused", "disagg uninstall --unused --all")
    fleet = settings(context).fleet()
    hosts = chosen(context, fleet)
    command = "uninstall --unused" if unused else "uninstall"
    change = Change(command, "removes", yes=yes, as_json=as_json, asks=not dry_run)
    if unused:
        _remove_unused(change, fleet, hosts, others=others, models=models, dry_run=dry_run, break_lock=break_lock)

    def decide(one: Host, facts: HostFacts) -> Plan:
        return planned(one, facts, models)

    if dry_run:
        show_plan(fleet, plan_only(hosts, decide), as_json)
    reports = run(change, hosts, decide, "uninstall", question="Uninstall", break_lock=break_lock, if_full=True)
    removed = any(report.result == "changed" for report in reports)
    note = notes(reports) if models else _MODELS_STAY if removed else ""
    show(fleet, reports, as_json, {"changed": "removed", "unchanged": "nothing there"}, note)


def _remove_unused(
    change: Change, fleet: Fleet, hosts: Sequence[Host], *, others: bool, models: bool, dry_run: bool, break_lock: bool
) -> NoReturn:
    """Exits with 4 if a machine cannot be reached, with 1 if anything else failed."""

    def finish(results: Sequence[Pruned]) -> NoReturn:
        code = exit_code_of_all(one.error.exit_code for one in results if one.error is not None)
        body = {"fleet": fleet.name, "ok": code == 0, "machines": [one.to_json() for one in results]}
        change.finish(body, found_view(results, tuple(fleet.hosts)), code=code)

    state = State.of(fleet)
    tokens = frozenset(map(token_digest, state.tokens.all)) if state.tokens.exists() else frozenset[str]()
    progress = DeployProgress(stderr())
    with Machines() as machines:
        work = Pruning(fleet, hosts, machines, tokens, others, models, break_lock, progress.report)
        with change.looking("reading what is there …"):
            found = work.find()
        if dry_run or not any(one.orphans for one in found):
            finish(found)
        change.ask(question(found), found_view(found, tuple(fleet.hosts)))
        with note_if_interrupted(_INTERRUPTED), progress:
            done = work.carry_out(found)
    finish(done)


def found_view(results: Sequence[Pruned], all_hosts: Collection[str] = ()) -> RenderableType:
    """One row for each thing, then what stays and why, then errors. `all_hosts`: all names of the fleet."""
    names, fold = ("machine", "left over", "size", "what it is"), ("machine", "left over", "what it is")
    table = plain_table(*names, bold=["machine"], dim=["what it is"], fold=fold, right=["size"], whole=["size"])
    for one in results:
        for orphan in one.orphans:
            gone = Text("removed ", "green") if one.removed else Text("")
            table.add_row(one.host.name, gone + Text(f"{orphan.kind} {orphan.name}"), size(orphan.nbytes), orphan.about)
    notes = [Hanging(Text(f"{one.host.name}: ", "bold"), Text(note)) for one in results for note in one.notes]
    errors = error_views([(one.host.name, one.error) for one in results if one.error is not None], all_hosts)
    found = any(one.orphans for one in results)
    head: list[RenderableType] = [table, Text()] if found else []
    return Group(*head, *notes, *errors, _summary(results))


def question(found: Sequence[Pruned]) -> str:
    """`Remove 3 things (5.2 GiB) from 2 machines?`."""
    orphans = [orphan for one in found for orphan in one.orphans]
    total = size(sum(orphan.nbytes or 0 for orphan in orphans))
    machines = counted(sum(bool(one.orphans) for one in found), "machine")
    return f"Remove {counted(len(orphans), 'thing')} ({total}) from {machines}?"


def _summary(results: Sequence[Pruned]) -> Text:
    """`3 things removed (5.2 GiB), 1 thing left over (12 KiB)`."""
    parts = []
    for removed, word in ((True, "removed"), (False, "left over")):
        orphans = [orphan for one in results if one.removed == removed for orphan in one.orphans]
        total = size(sum(orphan.nbytes or 0 for orphan in orphans))
        parts += [f"{counted(len(orphans), 'thing')} {word} ({total})"] if orphans else []
    if not parts and all(one.error is None for one in results):
        return Text("nothing is left over", "dim")
    return Text(", ".join(parts))
