"""`disagg bench link`: the path that KV takes from a prefill host to a decode host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.common.change import finish
from disagg.cli.common.completion import complete_host
from disagg.cli.common.context import settings, stderr
from disagg.cli.common.options import AsJson
from disagg.cli.views.findings import MARKS, finding_lines
from disagg.cli.views.items import plain_table
from disagg.fleet.link.judge import worst
from disagg.units import seconds, size

if TYPE_CHECKING:
    from disagg.config import Fleet, Host
    from disagg.fleet.link.survey import LinkSurvey


Sender = Annotated[
    str | None,
    typer.Option("--from", metavar="HOST", help="The prefill host that KV leaves.", autocompletion=complete_host),
]
Receiver = Annotated[
    str | None,
    typer.Option("--to", metavar="HOST", help="The decode host that KV reaches.", autocompletion=complete_host),
]


def link(
    context: typer.Context,
    *,
    sender: Sender = None,
    receiver: Receiver = None,
    as_json: AsJson = False,
) -> None:
    """Measure the links between hosts the way KV goes: by default every prefill host to each decode host of its model.

    At most 2 s or 512 MiB a link, over SSH; the servers need not run.

    Exit code 0: nothing is at fault; 1: something is; 4: a host cannot be reached.
    """
    from disagg.fleet.link.survey import exit_code, pairs_between, survey

    fleet = settings(context).fleet()
    pairs = pairs_between(fleet, _host(fleet, sender), _host(fleet, receiver))
    with stderr().status("measuring …") as status:
        surveyed = survey(fleet, pairs, on_step=lambda what: status.update(f"measuring {what} …"))
    code = exit_code(surveyed)
    body = {"fleet": fleet.name, "ok": code == 0, "links": [one.to_json() for one in surveyed]}
    finish(as_json, body, links_view(surveyed), code=code)


def _host(fleet: Fleet, name: str | None) -> Host | None:
    return None if name is None else fleet.select([name], managed=True)[0]


def links_view(surveyed: Sequence[LinkSurvey]) -> RenderableType:
    """The table; below it the findings of links that are not well."""
    parts: list[RenderableType] = [_table(surveyed), Text()]
    for one in surveyed:
        if any(finding.level != "ok" for finding in one.findings):
            title = f"{one.sender.name} → {one.receiver.name}"
            parts += [Text(title, "bold"), *finding_lines([f for f in one.findings if f.level != "ok"]), Text()]
    return Group(*parts, Text("\n".join(_notes(surveyed)), "dim"))


def _table(surveyed: Sequence[LinkSurvey]) -> Table:
    ends, figures = ("from", "to"), ("nominal\nGb/s", "measured\nGb/s", "round\ntrip", "hides\ntok/s")
    table = plain_table(*ends, "interface", *figures, "verdict", bold=ends, fold=(*ends, "interface"), right=figures)
    table.padding = 0
    for one in surveyed:
        level = worst(one.findings)
        if level == "note":  # worth knowing, nothing to do
            level = "ok"
        mark, style = MARKS[level]
        verdict = Text(f"{mark} {level}", style)
        table.add_row(one.sender.name, one.receiver.name, *_figures(one), verdict)
    return table


def _figures(one: LinkSurvey) -> Iterator[str]:
    """Interface, nominal rate, measured rate, round trip, what it hides."""
    link, hidden = one.link, one.hidden_tokens_per_s
    taken = link.path.outgoing if link else None
    yield taken.name if taken else "–"
    yield _gigabits(taken.speed if taken else None)
    yield _gigabits(link.bits_per_s if link else None)
    yield seconds(link.latency) if link and link.latency else "–"
    yield f"{hidden:,.0f}" if hidden else "–"


def _gigabits(bits_per_s: float | None) -> str:
    """A rate in Gbit/s, whatever its size, so that rates can be compared: 9.41, 0.0385."""
    if bits_per_s is None:
        return "–"
    value = bits_per_s / 1e9
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _notes(surveyed: Sequence[LinkSurvey]) -> Iterator[str]:
    yield "nominal: as the interface negotiated it. measured: what arrived, one TCP stream."
    yield "round trip: until a connection stood."
    if any(one.kv_bytes_per_token for one in surveyed):
        yield "hides: prefill up to this speed waits for no link = measured / KV per token."
    sizes = {one.sender.model: one.kv_bytes_per_token for one in surveyed if one.carries_kv and one.link}
    for model, count in sizes.items():
        unknown = "unknown: neither its name nor its files state it"
        yield f"KV per token of {model}: {size(count) if count else unknown}."
