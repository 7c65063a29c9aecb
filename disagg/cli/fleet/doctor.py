"""`disagg doctor`: what is wrong with the fleet, and the command that fixes it."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from disagg.cli.common.change import finish
from disagg.cli.common.context import settings, stderr
from disagg.cli.common.options import AsJson
from disagg.cli.views.findings import finding_lines, marked
from disagg.fleet.doctor.examine import Diagnosis, HostFindings, PairFindings, examine
from disagg.fleet.lifecycle.state import State
from disagg.units import counted


def doctor(
    context: typer.Context,
    *,
    as_json: AsJson = False,
) -> None:
    """Check every host and measure the links that carry KV. Changes nothing.

    Exit code 0: no faults; 1: a fault; 4: a host cannot be reached.
    """
    fleet = settings(context).fleet()
    with stderr().status("examining …") as status:
        diagnosis = examine(
            fleet,
            State.of(fleet),
            settings(context).names(fleet),
            on_step=lambda what: status.update(f"examining {what} …"),
        )
    body = {"fleet": fleet.name, **diagnosis.to_json()}
    finish(as_json, body, doctor_view(diagnosis), code=diagnosis.exit_code)


def doctor_view(diagnosis: Diagnosis) -> RenderableType:
    """Hosts, then the links between them, then findings about the whole fleet, then the counts."""
    parts: list[RenderableType] = []
    for host in diagnosis.hosts:
        parts += [*_host(host), Text()]
    if diagnosis.pairs:
        parts.append(_header("KV links", "prefill → decode"))
        for pair in diagnosis.pairs:
            parts += _pair(pair)
        parts.append(Text())
    if diagnosis.fleet:
        parts += [_header("Fleet", ""), *finding_lines(diagnosis.fleet), Text()]
    return Group(*parts, _verdict(diagnosis))


def _host(report: HostFindings) -> Iterator[RenderableType]:
    host = report.host
    yield _header(host.name, f"{host.address}  {', '.join(host.roles)}  {', '.join(host.all_models)}".rstrip())
    yield from finding_lines(report.findings)


def _header(title: str, rest: str) -> RenderableType:
    return Rule(Text.assemble((title, "bold"), (f"  {rest}" if rest else "", "dim")), align="left", style="dim")


def _pair(report: PairFindings) -> Iterator[RenderableType]:
    shared = ", ".join(name for name in report.prefill.all_models if name in report.decode.all_models)
    yield Text.assemble((f"{report.prefill.name} → {report.decode.name}", "bold"), (f"  {shared}", "dim"))
    if report.link is None and not report.findings:
        yield marked("note", Text("not measured: one of them could not be examined"))
    yield from finding_lines(report.findings)


def _verdict(diagnosis: Diagnosis) -> Text:
    faults, warnings = diagnosis.count("fault"), diagnosis.count("warning")
    if not faults and not warnings:
        return Text(f"✔ no problems on {counted(len(diagnosis.hosts), 'host')}", "bold green")
    parts = [
        Text(counted(number, what), style)
        for number, what, style in ((faults, "fault", "bold red"), (warnings, "warning", "bold yellow"))
        if number
    ]
    return Text.assemble(Text(", ").join(parts), f" on {counted(len(diagnosis.hosts), 'host')}")
