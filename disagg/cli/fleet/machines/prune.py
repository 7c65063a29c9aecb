"""`disagg prune`: what is on the fleet's machines and belongs to no host of hosts.toml any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

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
from disagg.cli.common.options import AsJson, BreakLock, Yes
from disagg.errors import exit_code_of_all

if TYPE_CHECKING:
    from disagg.config import Fleet
    from disagg.fleet.deploy.prune.pruning import Pruned

_INTERRUPTED = "what is not removed yet is still there; `disagg prune` goes on from here"


def prune(
    context: typer.Context,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also hosts of other fleets, and those with another token.")
    ] = False,
    models: Annotated[
        bool, typer.Option("--models", help="Also models of the hub's cache that no host of the machine names.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed only.")] = False,
    yes: Yes = False,
    break_lock: BreakLock = False,
    as_json: AsJson = False,
) -> None:
    """Remove from the fleet's machines what no host of hosts.toml needs any more.

    That is: hosts that the file no longer names, with their servers, releases and tokens; then environments and models
    that no host of the machine needs. What it finds is shown first.
    """
    from disagg.cli.views.fleet.deploy import DeployProgress
    from disagg.cli.views.fleet.machines.prune import found_view, question
    from disagg.fleet.deploy.deployment import choose
    from disagg.fleet.deploy.prune.pruning import Pruning
    from disagg.fleet.lifecycle.state import State
    from disagg.token import token_digest

    fleet = settings(context).fleet()
    hosts, state = choose(fleet, **settings(context).selection), State.of(fleet)
    if not dry_run:
        require_answer("prune", "removes", yes=yes, as_json=as_json)
    tokens = frozenset(map(token_digest, state.tokens())) if state.has_token() else frozenset[str]()
    progress = DeployProgress(stderr())
    with Pruning(fleet, hosts, tokens, everything, models, break_lock, progress.report) as work:
        with note_if_interrupted("nothing was removed"), stderr().status("reading what is there …"):
            found = work.find()
        if dry_run or not any(one.orphans for one in found):
            _finish(fleet, found, as_json)
        if not yes:
            console = error_console()  # a question is shown with --quiet too
            console.print(found_view(found, tuple(fleet.hosts)))
            if not confirm(question(found), console):
                console.print("nothing was removed")
                raise typer.Exit(1)
        with note_if_interrupted(_INTERRUPTED), progress:
            done = work.carry_out(found)
    _finish(fleet, done, as_json)


def _finish(fleet: Fleet, results: Sequence[Pruned], as_json: bool) -> NoReturn:
    """Print the results and exit: 4 if a machine cannot be reached, 1 if anything else failed."""
    from disagg.cli.views.fleet.machines.prune import found_view

    code = exit_code_of_all(one.error.exit_code for one in results if one.error is not None)
    if as_json:
        print_json({"fleet": fleet.name, "ok": code == 0, "machines": [one.to_json() for one in results]})
    else:
        stdout().print(found_view(results, tuple(fleet.hosts)))
    raise typer.Exit(code)
