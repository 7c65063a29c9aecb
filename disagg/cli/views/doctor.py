"""A diagnosis: per host one paragraph of what is well, then each trouble with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
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
        yield _item("ok", _Paragraph(well))
    for level in ("fault", "warning", "note"):
        for finding in findings:
            if finding.level == level:
                yield from _trouble(finding)


class _Paragraph:
    """Findings that are well, one behind the other, each whole on one line where it fits."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self._parts = [Text.assemble((f"{one.check} ", "dim"), one.text) for one in findings]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [Text()]
        for part in self._parts:
            between = Text(" · " if lines[-1] else "", "dim")
            if lines[-1] and lines[-1].cell_len + between.cell_len + part.cell_len > options.max_width:
                lines.append(Text())
                between = Text()
            lines[-1].append_text(between).append_text(part)
        yield from lines


def _trouble(finding: Finding) -> Iterator[RenderableType]:
    yield _item(finding.level, Text.assemble((f"{finding.check}: ", "bold"), finding.text))
    if finding.mend:
        yield _hanging(Text("→", "cyan"), Text(finding.mend, "cyan"), 4)


def _item(level: Level, text: RenderableType) -> RenderableType:
    """A mark, and the text beside it."""
    mark, style = _MARKS[level]
    return _hanging(Text(mark, style), text, 2)


def _hanging(mark: Text, text: RenderableType, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=width, justify="right")
    grid.add_column(ratio=1)
    grid.add_row(mark, text)
    return grid


def _pair(report: PairReport) -> Iterator[RenderableType]:
    yield Text.assemble((f"{report.prefill.name} → {report.decode.name}", "bold"), (f"  {report.prefill.model}", "dim"))
    if report.link is None and not report.findings:
        yield _item("note", Text("not measured: one of them could not be examined"))
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
