"""`disagg history`: the requests that the gateway has finished."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from disagg.api.gateway import ENDED_HOSTS, MAX_ENTRIES, EntryState, HistoryEntry
from disagg.cli.common.change import finish
from disagg.cli.common.context import settings, stderr
from disagg.cli.common.options import AsJson, model_option
from disagg.cli.views.items import Items, plain_table
from disagg.gateway.watch.history import Filter, history_path, read
from disagg.units import seconds

_SPEEDS = "prefill, decode: tokens per second"
_WIDE = 76  # columns, below which the table would be cut
_ONE_LINE = 110  # columns, below which the hosts stand under the model: names of 12 characters would wrap


def history(
    context: typer.Context,
    *,
    model: Annotated[str | None, model_option("Only this model.")] = None,
    state: Annotated[EntryState | None, typer.Option(help="Only requests that ended in this state.")] = None,
    hours: Annotated[float | None, typer.Option(min=0, metavar="N", help="Only the last N hours.")] = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=1, max=MAX_ENTRIES, metavar="N", help="At most this many.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the requests that `disagg serve` has finished on this machine, newest first.

    With --json all figures of each: times, parts of the time to the first token, tokens, speeds, hosts, errors.
    """
    fleet = settings(context).fleet()
    models = (fleet.model(model).name,) if model else None
    since = None if hours is None else time.time() - hours * 3600
    path = history_path(fleet)
    found = read(path, Filter(models=models, state=state, since=since, limit=limit))
    if not found and not as_json:
        nothing_served = "" if path.exists() else " disagg serve keeps those that it has finished."
        stderr().print(f"There are no such requests.{nothing_served}")
        return
    finish(as_json, {"entries": [entry.to_json() for entry in found]}, HistoryView(found))


class HistoryView:
    """One row per answer, on a narrow terminal a few lines. What went wrong, or differently than usual, stands after
    its hosts; below the table, why requests failed."""

    def __init__(self, entries: Sequence[HistoryEntry]) -> None:
        self._entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= _WIDE:
            yield _table(self._entries, beside=options.max_width >= _ONE_LINE)
            for entry in self._entries:
                if entry.state == "failed" and entry.error:
                    yield Text(f"{moment(entry.time)} {entry.model}: {_reason(entry)}", style="red")
        else:
            for entry in self._entries:
                yield from _stacked(entry)


def _stacked(entry: HistoryEntry) -> Iterator[RenderableType]:
    style = "dim" if entry.state == "cancelled" else ""
    yield Text.assemble(f"{moment(entry.time)} ", (entry.model, "bold"), style=style)
    tokens = f"{entry.prompt_tokens:,}+{entry.completion_tokens:,} tokens"
    yield Items(Text("  ", style), (tokens, f"TTFT {seconds(entry.ttft)}", f"total {seconds(entry.total_time)}"))
    if last := Text.assemble(hosts(entry.prefill_server, entry.decode_server), remark(entry), style=style):
        yield Padding(last, (0, 0, 0, 2))


def _table(entries: Sequence[HistoryEntry], *, beside: bool) -> Table:
    """beside: the hosts have a column of their own."""
    figures = ("tokens", "TTFT", "prefill", "decode", "total")
    names = ("time", "model", *figures, "hosts") if beside else ("time", "model\nhosts", *figures)
    table = plain_table(*names, right=figures, whole=("time", "model", *figures))
    table.caption, table.caption_justify = _SPEEDS, "left"
    for entry in entries:
        where = Text.assemble((hosts(entry.prefill_server, entry.decode_server), "dim"), _state(entry))
        table.add_row(
            moment(entry.time),
            Text(entry.model) if beside else Text.assemble(entry.model, "\n", where),
            f"{entry.prompt_tokens:,}+{entry.completion_tokens:,}",
            seconds(entry.ttft),
            _rate(entry.prefill_speed),
            _rate(entry.decode_speed),
            seconds(entry.total_time),
            *([where] if beside else []),
            style="dim" if entry.state == "cancelled" else None,
        )
    return table


def moment(at: float) -> str:
    """A time of today by its time, another by its date, too."""
    local, today = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if local[:3] == today[:3] else "%m-%d %H:%M", local)


def hosts(prefill: str | None, decode: str | None) -> str:
    """The hosts of a request."""
    return " → ".join(filter(None, (prefill, decode)))


def remark(entry: HistoryEntry) -> Text:
    """What went wrong, or differently than usual; empty if nothing did."""
    if entry.state == "failed":
        return Text(f" {_reason(entry)}", style="red")
    if entry.state == "cancelled":
        return Text(" cancelled")
    if entry.method == "fallback":
        return Text(" fallback", style="yellow")
    if entry.resumed_at is not None:
        return Text(f" prefill host failed after {entry.resumed_at:,}", style="yellow")
    notes = [f"{entry.held_tokens:,} held"] if entry.held_tokens else []
    notes += [f"split after {entry.layers}"] if entry.layers is not None else []
    return Text(f" {', '.join(notes)}" if notes else "", style="dim")


def _state(entry: HistoryEntry) -> Text:
    """The remark of a row whose reason stands below the table."""
    return Text(" failed", style="red") if entry.state == "failed" else remark(entry)


def _reason(entry: HistoryEntry) -> str:
    """Why a request failed; whose it was, if it ended hosts."""
    reason = entry.error or "failed"
    if entry.error_code != ENDED_HOSTS:
        return reason
    return f"{reason}: request {entry.request_id}" + (f" of key {entry.key}" if entry.key else "")


def _rate(value: float | None) -> str:
    return "–" if not value else f"{value:,.1f}" if value < 99.95 else f"{value:,.0f}"
