"""Findings: all that are ok in one paragraph, each other one with its hint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from disagg.fleet.facts.findings import Finding, Level

MARKS: dict[Level, tuple[str, str]] = {
    "fault": ("✘", "bold red"),
    "warning": ("!", "bold yellow"),
    "note": ("·", "cyan"),
    "ok": ("✔", "green"),
}


def finding_lines(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """Findings that are ok as one paragraph, all others on lines of their own."""
    ok = [finding for finding in findings if finding.level == "ok"]
    if ok:
        yield marked("ok", _Paragraph(ok))
    for level in ("fault", "warning", "note"):
        for finding in findings:
            if finding.level == level:
                yield from _problem(finding)


class _Paragraph:
    """Findings one after the other, each on one line if it fits."""

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


def _problem(finding: Finding) -> Iterator[RenderableType]:
    yield marked(finding.level, Text.assemble((f"{finding.check}: ", "bold"), finding.text))
    if finding.hint:
        yield _hanging(Text("→", "cyan"), Text(finding.hint, "cyan"), 4)


def marked(level: Level, text: RenderableType) -> RenderableType:
    """A mark, and the text beside it."""
    mark, style = MARKS[level]
    return _hanging(Text(mark, style), text, 2)


def _hanging(mark: Text, text: RenderableType, width: int) -> RenderableType:
    grid = Table.grid(Column(width=width, justify="right"), Column(ratio=1), padding=(0, 1, 0, 0))
    grid.add_row(mark, text)
    return grid
