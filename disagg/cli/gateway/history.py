"""`disagg history`: the requests that the gateway has finished."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.api.history import MAX_ENTRIES
from disagg.cli.common.completion import complete_model
from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson

if TYPE_CHECKING:
    from disagg.api.history import HistoryEntry


class EntryStateName(StrEnum):
    """disagg.api.history.EntryState as a choice on the command line."""

    ok = "ok"
    failed = "failed"
    cancelled = "cancelled"


def history(
    context: typer.Context,
    *,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="NAME", help="Only this model.", autocompletion=complete_model),
    ] = None,
    state: Annotated[EntryStateName | None, typer.Option(help="Only requests that ended in this state.")] = None,
    hours: Annotated[float | None, typer.Option(min=0, metavar="N", help="Only the last N hours.")] = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=1, max=MAX_ENTRIES, metavar="N", help="At most this many.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the requests that `disagg serve` has finished on this machine, newest first.

    With --json all figures of each: times, parts of the time to the first token, tokens, speeds, hosts, errors.
    """
    found = _read(context, model, state, hours, limit)
    if as_json:
        print_json({"entries": [entry.to_json() for entry in found]})
        return
    if not found:
        stderr().print("There are no such requests.")
        return
    from disagg.cli.views.gateway.history import history_view

    stdout().print(history_view(found))


def _read(
    context: typer.Context, model: str | None, state: EntryStateName | None, hours: float | None, limit: int
) -> tuple[HistoryEntry, ...]:
    from disagg.gateway.watch.history import Filter, history_path, read

    fleet = settings(context).fleet()
    wanted = Filter(
        models=(fleet.model(model).name,) if model else None,
        state=state.value if state else None,
        since=None if hours is None else time.time() - hours * 3600,
        limit=limit,
    )
    return read(history_path(fleet), wanted)
