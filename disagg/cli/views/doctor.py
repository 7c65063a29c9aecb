"""A diagnosis: per host one paragraph of what is well, then each trouble with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from disagg.fleet.doctor.examine import Diagnosis, HostReport, PairReport
from disagg.fleet.findings import Finding, Level

_MARKS: dict[Level, tuple[str, str]] = {
    "fault": ("✘", "bold red"),
    "warning": ("!", "bold yellow"),
    "note": ("·", "cyan"),
    "ok": ("✔", "green"),
}


def doctor_view(diagnosis: Diagnosis) -> RenderableType:
    """Hosts, then the links between them, then what is about all of them, then the verdict."""
    parts: list[RenderableType] = []
    for host in diagnosis.hosts:
        parts += [*_host(host), Text()]
    if diagnosis.pairs:
        parts.append(_header("KV links", "prefill → decode"))
        for pair in diagnosis.pairs:
            parts += _pair(pair)
        parts.append(Text())
    if diagnosis.fleet:
        parts += [_header("Fleet", ""), *_lines(diagnosis.fleet), Text()]
    return Group(*parts, _verdict(diagnosis))


def _host(report: HostReport) -> Iterator[RenderableType]:
    host = report.host
    yield _header(host.name, f"{host.address}  {', '.join(host.roles)}  {host.model}")
    yield from _lines(report.findings)


def _header(title: str, rest: str) -> RenderableType:
    return Rule(Text.assemble((title, "bold"), (f"  {rest}" if rest else "", "dim")), align="left", style="dim")


def _lines(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """What is well as one paragraph, everything else on lines of its own."""
    well = [finding for finding in findings if finding.level == "ok"]
    if well:
        yield _item("ok", _paragraph(well))
    for level in ("fault", "warning", "note"):
        for finding in findings:
            if finding.level == level:
                yield from _trouble(finding)


def _paragraph(findings: Sequence[Finding]) -> Text:
    parts = [
        Text.assemble((f"{one.check} ".replace(" ", "\u00a0"), "dim"), one.text.replace(" ", "\u00a0"))
        for one in findings
    ]
    return Text(" · ", "dim").join(parts)


def _trouble(finding: Finding) -> Iterator[RenderableType]:
    yield _item(finding.level, Text.assemble((f"{finding.check}: ", "bold"), finding.text))
    if finding.mend:
        yield Padding(Text.assemble(("→ ", "cyan"), (finding.mend, "cyan")), (0, 0, 0, 4))


def _item(level: Level, text: Text) -> RenderableType:
    """A mark, and the text hanging beside it."""
    from rich.table import Table

    mark, style = _MARKS[level]
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=2, justify="right")
    grid.add_column(ratio=1)
    grid.add_row(Text(mark, style), text)
    return grid


def _pair(report: PairReport) -> Iterator[RenderableType]:
    if not report.findings:
        text = Text.assemble((f"{report.prefill.name} → {report.decode.name}: ", "bold"), "not measured")
        yield _item("note", text)
    yield from _lines(report.findings)


def _verdict(diagnosis: Diagnosis) -> Text:
    faults, warnings = diagnosis.count("fault"), diagnosis.count("warning")
    if not faults and not warnings:
        return Text(f"✔ nothing wrong on {_count(len(diagnosis.hosts), 'host')}", "bold green")
    parts = [
        Text(_count(number, what), style)
        for number, what, style in ((faults, "fault", "bold red"), (warnings, "warning", "bold yellow"))
        if number
    ]
    return Text.assemble(Text(", ").join(parts), f" on {_count(len(diagnosis.hosts), 'host')}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
